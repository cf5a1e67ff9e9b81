"""Judgements on this machine alone: from facts to findings, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dipaco_p2p.node.sizes import Needs
from dipaco_p2p.program.examination import DAMAGED, Finding, failure, fine, warning
from dipaco_p2p.program.text import in_bytes
from dipaco_p2p.version_gate import PACKAGE

from ..preview import Machine
from .facts import GpuFacts, HomeFacts, Leftovers

PYTHON_MIN = (3, 11)
PINS: Mapping[str, tuple[str, str]] = {
    "hivemind": ("1.1.12", "1.2"),
    "torch": ("2.4", "3"),
    "numpy": ("1.26", "2.4"),
    "bitsandbytes": ("0.44", "1"),
    "safetensors": ("0.4.3", "1"),
}
"""From the first version on, below the second; the reasons are in pyproject.toml."""
FILES_MIN, FILES_WELL = 256, 1024
DISK_WELL = 2**30
MEMORY_WELL = 2**30
"""What a machine should have free while nothing is known of a run."""


def judge_python(version: tuple[int, ...]) -> Finding:
    words = ".".join(map(str, version))
    if version[:2] < PYTHON_MIN:
        return failure("python", f"Python {words}", "install Python 3.11 or newer, and the program into it")
    return fine("python", f"Python {words}")


def judge_packages(versions: Mapping[str, str | None]) -> Finding:
    """`versions` of what `PINS` names; one finding for all."""
    wrong = [name for name, found in versions.items() if found is None or not _is_within(found, PINS[name])]
    if wrong:
        found = ", ".join(f"{name} {versions[name] or 'is missing'}" for name in wrong)
        wanted = " ".join(f"'{name}>={PINS[name][0]},<{PINS[name][1]}'" for name in wrong)
        return failure("packages", found, f"pip install {wanted}, in the environment of {PACKAGE}")
    return fine("packages", ", ".join(f"{name} {found}" for name, found in versions.items()))


def _is_within(found: str, pin: tuple[str, str]) -> bool:
    return _numbers(pin[0]) <= _numbers(found) < _numbers(pin[1])


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13, 0); what follows the numbers plays no part."""
    plain = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, plain[0].split("."))) if plain else ()


def judge_gpu(facts: GpuFacts, *, is_wanted: bool = False) -> Finding:
    """`is_wanted`: the user asks for a GPU, so that training on the CPU is no way out."""
    worse = failure if is_wanted else warning
    if facts.unsupported:
        names = ", ".join(facts.unsupported)
        return worse("gpu", f"this torch has no code for {names}", "install a build of torch for it: constraints.txt")
    if facts.devices:
        return fine("gpu", f"{', '.join(facts.devices)}; driver {facts.driver}, CUDA {facts.torch_cuda}")
    if facts.driver is None:
        if is_wanted:
            return failure("gpu", "no NVIDIA driver is here", "install the driver, or take --device cpu")
        return fine("gpu", "no NVIDIA GPU: training goes on the CPU")
    if facts.torch_cuda is None:
        found = f"there is a GPU (driver {facts.driver}), and torch is a build for CPUs"
        return worse("gpu", found, "install the CUDA build of the pinned torch: constraints.txt says how")
    found = f"torch for CUDA {facts.torch_cuda} cannot use the GPU with driver {facts.driver}"
    return worse("gpu", found, "renew the driver, or install torch for an older CUDA")


def judge_memory(machine: Machine, needs: Needs | None) -> Finding:
    free = machine.memory_bytes
    if free is None:
        return fine("memory", "nobody here says how much is free")
    if needs is None:
        if free < MEMORY_WELL:
            return warning("memory", f"{in_bytes(free)} free", "end other programs before joining")
        return fine("memory", f"{in_bytes(free)} free")
    least = needs.least_memory(is_cpu=machine.is_cpu)
    words = f"at least {in_bytes(least)} needed on {machine.device}, {in_bytes(free)} free"
    if least > free:
        return failure("memory", words, "end other programs, or join a run of smaller paths")
    return fine("memory", words)


def judge_disk(home: HomeFacts, needs: Needs | None) -> Finding:
    """Rights and room of the home folder."""
    if home.problem is not None:
        remedy = "choose a folder that you may write to: --home or DIPACO_HOME"
        return failure("disk", f"cannot write to {home.path}: {home.problem}", remedy)
    wanted = DISK_WELL if needs is None else needs.disk
    words = f"{in_bytes(home.free_bytes)} free in {home.path}"
    if needs is None:
        return fine("disk", words) if home.free_bytes >= wanted else warning("disk", words, "free some space")
    words = f"up to {in_bytes(wanted)} needed, {words}"
    return (
        failure("disk", words, "free some space, or move --home") if wanted > home.free_bytes else fine("disk", words)
    )


def judge_identity(home: HomeFacts) -> Finding:
    key = home.path / "identity.key"
    if home.key_mode is None:
        return fine("identity", "none yet: the first join makes one")
    if home.key_mode & 0o077:
        return failure("identity", f"{key} is open to others (mode {home.key_mode:03o})", f"chmod 600 {key}")
    if home.key_problem is not None:
        remedy = "restore it, or move it away: then a new one is made"
        return failure("identity", home.key_problem, remedy, code=DAMAGED)
    return fine("identity", f"{key}, for its owner only")


def judge_files(soft: int, hard: int) -> Finding:
    """Open files: every call of a peer is one."""
    words = f"{soft} open files are allowed"
    if soft >= FILES_WELL:
        return fine("files", words)
    remedy = f"ulimit -n {min(hard, 4096)}" if hard > soft else "raise `nofile` in /etc/security/limits.conf"
    return (failure if soft < FILES_MIN else warning)("files", words, remedy)


def judge_port(place: str, problem: str | None, hint: str = "") -> Finding:
    """Whether this machine may listen at `place`, a multiaddr."""
    if problem is not None:
        return failure("port", f"{place}: {problem}", hint or "choose another --listen, or --no-listen")
    return fine("port", f"can listen at {place}")


def judge_leftovers(left: Leftovers, *, is_fixed: bool = False) -> Finding:
    parts = (("sockets", left.sockets), ("shared memory segments", left.segments), ("libp2p daemons", left.daemons))
    words = ", ".join(f"{len(found)} {name}" for name, found in parts if found)
    if not words:
        return fine("leftovers", "dead processes left nothing")
    if is_fixed:
        return fine("leftovers", f"removed {words} of dead processes")
    return warning("leftovers", f"{words} of dead processes", "dipaco-peer doctor --fix removes them")
