"""The optimizer state of a path as bytes, by parameter name, so that a restart goes on with the same bits.

One form for all optimizers: AdamW's two moments as float32 and the count of steps, per parameter. So the state that a
coordinator's CPU made starts an 8-bit optimizer on a volunteer's GPU, and a path may move between the two.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np
import torch

from ..errors import IntegrityError
from .arrays import Array
from .codec import decode, encode
from .model import PathModel

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
            raise IntegrityError(f"`{key}` of an optimizer state is no count of steps")
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
