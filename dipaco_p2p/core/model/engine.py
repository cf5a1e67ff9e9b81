"""How inner steps are computed on this machine: exactly, in bfloat16, or in bfloat16 and one compiled graph.

The choice is made once in a process, between two rounds, from what a step took and how many are left: compiling costs
10 to 40 s on a CPU, which only a long run repays. Before that, a CPU's steps are exact and a GPU's in bfloat16, which
costs nothing there. What it is, and why, is told to the user, who may choose otherwise.
On a GPU nothing of this has run yet; `COMPILING["cuda"]` is an assumption.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from .fast import compiler

AUTO, EXACT, BFLOAT16, FAST = "auto", "exact", "bf16", "fast"
ENGINES = (AUTO, EXACT, BFLOAT16, FAST)
ASKED = "as was asked for"

REPAYS = 3.0
"""The time saved must be this many times that of compiling: a volunteer may leave before the run ends."""


@dataclass(frozen=True, slots=True)
class Compiling:
    """What it costs and gives."""

    takes_s: float
    """The first fast step at the most, on the slowest machine that was measured."""
    gain: float
    """How many times quicker a compiled step is at the least than one before the choice."""


COMPILING = {"cpu": Compiling(40.0, 1.8), "cuda": Compiling(120.0, 1.2)}


@dataclass(frozen=True, slots=True)
class Engine:
    """The choice, and in words why."""

    is_fast: bool
    """Whether products are in bfloat16."""
    is_compiled: bool
    why: str
    setup: str = ""
    """The rest of what was chosen on this machine, in words."""

    def __str__(self) -> str:
        precision = "bfloat16" if self.is_fast else "float32"
        compiled = "compiled" if self.is_compiled else "not compiled"
        return f"{precision}, {compiled}{self.setup and ', '}{self.setup}: {self.why}"


def at_first(wanted: str, device: str) -> Engine:
    """What the steps are computed with whose time is measured for `choose`."""
    is_fast = wanted != EXACT and _kind(device) == "cuda" and hindrance(device) is None
    return Engine(is_fast, False, "until the choice")


def choose(wanted: str, device: str, *, step_s: float | None, steps_left: int) -> Engine | None:
    """The engine for the rest of a run; None while that needs to know what a step takes (`step_s`) `at_first`."""
    if wanted == EXACT:
        return Engine(False, False, ASKED)
    problem = hindrance(device)
    if problem is not None:
        return Engine(False, False, problem)
    if wanted == BFLOAT16:
        return Engine(True, False, ASKED)
    first, problem = at_first(wanted, device), compile_hindrance(device)
    if problem is not None:
        return Engine(first.is_fast, False, problem)
    if wanted == FAST:
        return Engine(True, True, ASKED)
    if step_s is None:
        return None
    does_pay, why = repays(COMPILING[_kind(device)], step_s=step_s, steps_left=steps_left)
    return Engine(does_pay or first.is_fast, does_pay, why)


def repays(compiling: Compiling, *, step_s: float, steps_left: int) -> tuple[bool, str]:
    """Whether this many steps repay compiling, and why."""
    saved_s = steps_left * step_s * (1 - 1 / compiling.gain)
    left = f"{steps_left} steps of {1000 * step_s:.0f} ms are left"
    if saved_s < REPAYS * compiling.takes_s:
        return False, f"{left}, which does not repay {compiling.takes_s:.0f} s of compiling"
    return True, f"{left}; up to {compiling.takes_s:.0f} s of compiling save about {saved_s / 60:.0f} min"


def hindrance(device: str) -> str | None:
    """Why this machine has no products in bfloat16 that are worth having; None if it has."""
    if _kind(device) not in COMPILING:
        return f"the fast mode is for processors and CUDA, not for {_kind(device)}"
    return None if has_bfloat16(device) else f"this {_noun(device)} has no bfloat16 products"


def compile_hindrance(device: str) -> str | None:
    """Why torch cannot compile for the device here; None if it can."""
    if not compiler():
        return "no C++ compiler (g++) was found"
    if _kind(device) == "cuda" and not has_triton():
        return "triton is not installed"
    return None


def has_bfloat16(device: str = "cpu") -> bool:
    """Whether the device multiplies bfloat16 matrices itself; where it does not, they are slower than float32."""
    if _kind(device) == "cuda":
        return torch.cuda.get_device_capability(torch.device(device)) >= (8, 0)
    checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(bool(getattr(torch.cpu, name, bool)()) for name in checks)


def has_triton() -> bool:
    """Whether torch could compile for a GPU: it does that through triton."""
    return importlib.util.find_spec("triton") is not None


def _kind(device: str) -> str:
    return torch.device(device).type


def _noun(device: str) -> str:
    return "processor" if _kind(device) == "cpu" else "GPU"
