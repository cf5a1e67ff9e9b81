"""AdamW for a path, in the form that suits the device: torch's fused one, or bitsandbytes' with 8-bit moments.

8-bit moments save 6 bytes a parameter, but bitsandbytes waits for the GPU after every parameter (0.50, its
`Optimizer8bit.step`), so that the processor cannot launch work ahead: they are for GPUs that are short of memory.
A limit on a GPU's memory counts as its size. Not measured on a GPU yet.

Its state goes into bytes by parameter name, so that a restart goes on with the same bits, and in one form for all
optimizers: AdamW's two moments as float32 and the count of steps, per parameter. So the state that a coordinator's CPU
made starts an 8-bit optimizer on a volunteer's GPU, and a path may move between the two.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np
import torch

from ...config import InnerConfig
from ...errors import IntegrityError
from ..arrays import Array
from ..tensor_file import decode, encode
from .transformer import PathModel

MOMENTS_SHARE = 0.1
"""Of a GPU's memory: where float32 moments would take more, they are held in 8 bits."""
MOMENTS_BYTES, MOMENTS_BYTES_8BIT = 8, 2
"""Of one parameter, in float32 and in 8 bits."""


def make_optimizer(
    model: torch.nn.Module, config: InnerConfig, *, eight_bit: bool | None = None
) -> torch.optim.Optimizer:
    """AdamW that decays matrices but not norms.

    `eight_bit` says outright whether its moments have 8 bits; None leaves it to the device.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    if _is_8bit_better(parameters) if eight_bit is None else eight_bit:
        optimizer = importlib.import_module("bitsandbytes.optim").AdamW8bit(groups, lr=config.lr, betas=betas)
        return cast(torch.optim.Optimizer, optimizer)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """For people."""
    return "fused AdamW" if isinstance(optimizer, torch.optim.AdamW) else "8-bit AdamW"


def moments_bytes_to_come(optimizer: torch.optim.Optimizer) -> int:
    """What the optimizer's first step will take for moments: those that a state has brought are there already."""
    each = MOMENTS_BYTES if isinstance(optimizer, torch.optim.AdamW) else MOMENTS_BYTES_8BIT
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return each * sum(int(p.numel()) for p in parameters if p not in optimizer.state)


def is_short(parameter_count: int, *, memory_bytes: int) -> bool:
    """Whether float32 moments of so many parameters would take too much of a device's memory."""
    return MOMENTS_BYTES * parameter_count > MOMENTS_SHARE * memory_bytes


def _is_8bit_better(parameters: list[torch.nn.Parameter]) -> bool:
    device = parameters[0].device
    if device.type != "cuda" or importlib.util.find_spec("bitsandbytes") is None:
        return False
    return is_short(sum(p.numel() for p in parameters), memory_bytes=_allowed_bytes(device))


def _allowed_bytes(device: torch.device) -> int:
    """Of a GPU's memory, what this process may take (`set_per_process_memory_fraction`)."""
    fraction_of = getattr(torch.cuda.memory, "get_per_process_memory_fraction", None)  # newer than our oldest torch
    fraction = 1.0 if fraction_of is None else float(fraction_of(device))
    return int(fraction * int(torch.cuda.get_device_properties(device).total_memory))


SEPARATOR = "/"
"""Between a parameter's name and the name of a value that the optimizer keeps for it."""
BLOCKSIZE = 256
"""Values that share a scale in bitsandbytes' 8-bit optimizers."""
MOMENTS = {"state1": "exp_avg", "state2": "exp_avg_sq"}
"""What bitsandbytes calls the moments, and what torch and we call them."""
KINDS = ("step", *MOMENTS.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InnerState:
    """What the optimizer keeps per parameter: `values["model.norm.weight/exp_avg"]` and so on; none before a step."""

    values: Mapping[str, Array]

    @classmethod
    def capture(cls, model: PathModel, optimizer: torch.optim.Optimizer) -> Self:
        """A copy of the optimizer's state."""
        values = {}
        for name, parameter in model.named_parameters():
            for key, value in _moments(optimizer.state.get(parameter, {})).items():
                values[name + SEPARATOR + key] = _to_array(value)
        return cls(values=values)

    @classmethod
    def from_bytes(cls, data: bytes, model: PathModel) -> Self:
        """The inverse of `to_bytes`; raises IntegrityError if it is not a state of `model`'s parameters."""
        values, _ = decode(data)
        parameters = dict(model.named_parameters())
        for key, value in values.items():
            name, _, kind = key.partition(SEPARATOR)
            if name not in parameters or kind not in KINDS:
                raise IntegrityError(f"an optimizer state of another model: it has {ascii(key)[:80]}")
            _check(value, kind, key, shape=tuple(parameters[name].shape))
        missing = {name + SEPARATOR + kind for name in parameters for kind in KINDS} - values.keys()
        if values and missing:
            raise IntegrityError(f"an optimizer state without `{min(missing)}`")
        return cls(values=values)

    def to_bytes(self) -> bytes:
        return encode(self.values)

    def restore(self, model: PathModel, optimizer: torch.optim.Optimizer) -> None:
        """Make this the optimizer's state."""
        optimizer.state.clear()
        places = {
            id(p): (g, i) for g, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"])
        }
        for name, parameter in model.named_parameters():
            fields = {kind: self.values.get(name + SEPARATOR + kind) for kind in KINDS}
            if any(value is None for value in fields.values()):
                continue
            step, *moments = (torch.from_numpy(np.array(value)) for value in fields.values())
            if hasattr(optimizer, "init_state"):
                group, index = places[id(parameter)]
                optimizer.init_state(optimizer.param_groups[group], parameter, group, index)
                _fill_8bit(optimizer.state[parameter], int(step), moments)
            else:
                device = parameter.device
                state = {key: moment.to(device) for key, moment in zip(MOMENTS.values(), moments, strict=True)}
                optimizer.state[parameter] = {"step": step.float().to(device), **state}


def _check(value: Array, kind: str, key: str, *, shape: tuple[int, ...]) -> None:
    """Raise IntegrityError for what no AdamW leaves behind: the state may come from another volunteer."""
    if kind == "step":
        if value.dtype != np.int64 or value.shape or value < 0:
            raise IntegrityError(f"`{key}` of an optimizer state is not a count of steps")
        return
    if value.dtype != np.float32 or value.shape != shape:
        raise IntegrityError(f"`{key}` of an optimizer state has the shape {value.shape} of {value.dtype}")
    if not np.isfinite(value).all():
        raise IntegrityError(f"`{key}` of an optimizer state is not finite")
    if kind == "exp_avg_sq" and (value < 0).any():
        raise IntegrityError(f"`{key}` of an optimizer state is negative, but holds squares")


def _moments(state: Mapping[str, Any]) -> dict[str, Any]:
    """The portable part of one parameter's state; 8-bit moments are expanded."""
    if "state1" not in state:
        return {kind: state[kind] for kind in KINDS if kind in state}
    return {"step": state["step"]} | {ours: _expand_8bit(state, theirs) for theirs, ours in MOMENTS.items()}


def _expand_8bit(state: Mapping[str, Any], name: str) -> torch.Tensor:
    """A moment as bitsandbytes holds it, in float32: small parameters are not quantised by it."""
    codes: torch.Tensor = state[name]
    if codes.dtype != torch.uint8:
        return codes
    functional = importlib.import_module("bitsandbytes.functional")
    absmax, code = state[f"absmax{name[-1]}"], state[f"qmap{name[-1]}"]
    expanded = functional.dequantize_blockwise(codes, absmax=absmax, code=code, blocksize=BLOCKSIZE)
    return cast(torch.Tensor, expanded)


def _fill_8bit(state: dict[str, Any], step: int, moments: Sequence[torch.Tensor]) -> None:
    """Put float32 moments into a state that `init_state` of bitsandbytes has made."""
    state["step"] = step
    functional = importlib.import_module("bitsandbytes.functional")
    for name, moment in zip(MOMENTS, moments, strict=True):
        moment = moment.to(state[name].device)
        if state[name].dtype != torch.uint8:
            state[name].copy_(moment)
            continue
        code = state[f"qmap{name[-1]}"]
        codes, quantised = functional.quantize_blockwise(moment, code=code, blocksize=BLOCKSIZE)
        state[name].copy_(codes.view_as(moment))
        state[f"absmax{name[-1]}"].copy_(quantised.absmax)


def _to_array(value: Any) -> Array:
    """Moments keep their type; counts of steps, which torch holds as a float tensor, become whole numbers."""
    if isinstance(value, torch.Tensor) and value.ndim:
        return value.detach().float().cpu().numpy().copy()
    return np.array(int(value), dtype=np.int64)
