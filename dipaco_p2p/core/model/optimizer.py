"""The optimizer of a path's inner steps, and its state in the form that travels with the path.

AdamW has the form that suits the device: torch's fused one, or bitsandbytes' with 8-bit moments. These save 6 bytes a
parameter, but bitsandbytes waits for the GPU after every parameter (0.50, its `Optimizer8bit.step`), so that the
processor cannot launch work ahead: they are for GPUs that are short of memory. A limit on a GPU's memory counts as its
size.

Muon is torch's own (2.9 and newer). It steps the matrices inside the blocks along their momentum, with all singular
values made about 1; embedding, head and norms stay with AdamW. Its steps get the root mean square that AdamW's have, so
that one learning rate and one weight decay serve both. Sources: Muon (K. Jordan, 2024), that scale (arXiv 2502.16982),
Muon inside DiLoCo (MuLoCo, arXiv 2505.23725).

The state has one form for all optimizers of a kind (`InnerState`): by the parameter's name AdamW's two moments
(moments.py) and the count of steps, or Muon's momentum in bfloat16, which takes as much and is what Muon computes with.
So the state that a coordinator's CPU made starts an 8-bit AdamW on a volunteer's GPU, and a path may move between the
two.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from ...config import ADAMW, MUON, InnerConfig
from ...errors import ConfigError, EnvironmentUnfit, IntegrityError
from ..arrays import Array, is_finite
from ..tensor_file import decode, encode
from .layout import EMBEDDING, HEAD
from .moments import BLOCK, SIGNED, SQUARES, pack, unpack

MOMENTS_SHARE = 0.1
"""Of a GPU's memory: where float32 moments would take more, they are held in 8 bits."""
MOMENTS_BYTES, MOMENTS_BYTES_8BIT = 8, 2
"""Of one parameter, in float32 and in 8 bits."""
MOMENTUM, MOMENTUM_BYTES = 0.95, 4
"""Muon's own, which every source of it uses; and what it takes for a parameter, in float32."""


class MuonAndAdamW:
    """Two optimizers that step as one: Muon the matrices inside the blocks, AdamW all else."""

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> None:
        self._both = (muon, adamw)
        self.param_groups = [group for each in self._both for group in each.param_groups]
        self.state = muon.state = adamw.state

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        for each in self._both:
            each.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        for each in self._both:
            each.step()


Optimizer = torch.optim.Optimizer | MuonAndAdamW

TORCH_HINT = "install a newer torch on this machine, then start again: pip install 'torch>=2.9'"
EIGHT_BIT_HINT = "leave `eight_bit` out for this run: the momentum of Muon takes half of what AdamW's two moments take"


def check_optimizer(config: InnerConfig, *, eight_bit: bool | None = None) -> None:
    """Raise EnvironmentUnfit if this machine's torch has not the run's optimizer, and ConfigError if 8-bit moments are
    wanted of one that has none."""
    if config.optimizer != MUON:
        return
    if not hasattr(torch.optim, "Muon"):
        raise EnvironmentUnfit(f"the run trains with Muon, and torch {torch.__version__} has none", hint=TORCH_HINT)
    if eight_bit:
        raise ConfigError("the run trains with Muon, which has no 8-bit moments", hint=EIGHT_BIT_HINT)


def make_optimizer(model: nn.Module, config: InnerConfig, *, eight_bit: bool | None = None) -> Optimizer:
    """The run's optimizer, which decays matrices but not norms.

    `eight_bit` says outright whether AdamW's moments have 8 bits; None leaves it to the device. Raises as
    `check_optimizer`.
    """
    check_optimizer(config, eight_bit=eight_bit)
    if config.optimizer != MUON:
        return _adamw(list(model.parameters()), config, eight_bit=eight_bit)
    hidden, others = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in model.named_parameters():
        (hidden if is_hidden(name, parameter) else others).append(parameter)
    # By name: older releases of torch, which the other optimizers do with, have none.
    muon = getattr(torch.optim, "Muon")(  # noqa: B009
        hidden, lr=config.lr, weight_decay=config.weight_decay, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )
    return MuonAndAdamW(muon, _adamw(others, config, eight_bit=False))


def is_hidden(name: str, parameter: Tensor) -> bool:
    """Whether Muon would step this parameter: a matrix inside a block."""
    return parameter.ndim == 2 and not name.endswith((EMBEDDING, HEAD))


def _adamw(parameters: list[nn.Parameter], config: InnerConfig, *, eight_bit: bool | None) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    if _is_8bit_better(parameters) if eight_bit is None else eight_bit:
        optimizer = importlib.import_module("bitsandbytes.optim").AdamW8bit(groups, lr=config.lr, betas=betas)
        return cast(torch.optim.Optimizer, optimizer)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)


def optimizer_name(optimizer: Optimizer) -> str:
    """For people."""
    if isinstance(optimizer, MuonAndAdamW):
        return "Muon, and fused AdamW for embedding, head and norms"
    return "fused AdamW" if isinstance(optimizer, torch.optim.AdamW) else "8-bit AdamW"


def moments_bytes_to_come(optimizer: Optimizer) -> int:
    """What the optimizer's first step will take for moments: those that a state has brought are there already."""
    is_8bit = not isinstance(optimizer, (torch.optim.AdamW, MuonAndAdamW))

    def each(group: Mapping[str, Any]) -> int:
        if "momentum" in group:
            return MOMENTUM_BYTES
        return MOMENTS_BYTES_8BIT if is_8bit else MOMENTS_BYTES

    counted = ((each(group), p) for group in optimizer.param_groups for p in group["params"])
    return sum(bytes_each * int(p.numel()) for bytes_each, p in counted if p not in optimizer.state)


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
MEAN, SQUARED = "exp_avg", "exp_avg_sq"
BLOCKSIZE = 256
"""Values that share a scale in bitsandbytes' 8-bit optimizers."""
MOMENTS = {"state1": MEAN, "state2": SQUARED}
"""What bitsandbytes calls the moments, and what torch and we call them."""
FORMS = {MEAN: SIGNED, SQUARED: SQUARES}
"""Of AdamW's moments, as they are packed."""
SCALES = "_scales"
KINDS = ("step", *FORMS, *(kind + SCALES for kind in FORMS))
BUFFER = "momentum_buffer"
"""Muon's momentum, as torch calls it; kept in bfloat16."""
EPSILON = 1e-8
"""What AdamW adds to the root that it divides by."""
WAY_MAX = 1.0
"""A mean of gradients is hardly longer than the root of their mean square. Beside squares that 8-bit moments have
rounded to zero it seems to be: without a bound, a few of these would be all that counts."""
STEPS_MAX = 1 << 24
"""AdamW counts its steps in float32, which ends here. The steps of the run are no bound: a path whose work found no
leader is trained again, and the moments keep count of that."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InnerState:
    """What the optimizer keeps per parameter, packed: `values["model.norm.weight/exp_avg"]` and so on; nothing before a
    step."""

    values: Mapping[str, Array]

    @classmethod
    def taken(cls, model: nn.Module, optimizer: Optimizer) -> Self:
        """The optimizer's state. What it holds is rounded to that, but 8-bit moments, which are not exact anyway."""
        values: dict[str, Array] = {}
        for name, parameter in model.named_parameters():
            state = optimizer.state.get(parameter, {})
            if "step" in state:
                values[f"{name}{SEPARATOR}step"] = np.array(min(int(state["step"]), STEPS_MAX), dtype=np.int64)
            if BUFFER in state:
                halves = state[BUFFER].detach().bfloat16()
                values[f"{name}{SEPARATOR}{BUFFER}"] = halves.cpu().view(torch.int16).numpy().view(np.uint16)
                state[BUFFER].copy_(halves)
            for kind, moment in _moments(state).items():
                codes, scales = pack(moment.detach().float(), FORMS[kind])
                values[f"{name}{SEPARATOR}{kind}"] = codes.cpu().numpy()
                values[f"{name}{SEPARATOR}{kind}{SCALES}"] = scales.cpu().numpy()
                if kind in state:
                    state[kind].copy_(unpack(codes, scales, FORMS[kind]))
        return cls(values=values)

    @classmethod
    def from_bytes(cls, data: bytes, model: nn.Module, *, optimizer: str = ADAMW) -> Self:
        """The inverse of `to_bytes`; raises IntegrityError if it is not a state of `model`'s parameters that an
        `optimizer` of this kind leaves."""
        return cls.checked(decode(data)[0], model, optimizer=optimizer)

    @classmethod
    def checked(cls, values: Mapping[str, Array], model: nn.Module, *, optimizer: str = ADAMW) -> Self:
        """The state with these values; raises IntegrityError as above."""
        wanted = dict(_wanted(model, optimizer))
        for key, value in values.items():
            if key not in wanted:
                raise IntegrityError(f"an optimizer state of another model or optimizer: it has {ascii(key)[:80]}")
            _check(value, key.rpartition(SEPARATOR)[2], key, shape=wanted[key])
        missing = wanted.keys() - values.keys()
        if values and missing:
            raise IntegrityError(f"an optimizer state without `{min(missing)}`")
        return cls(values=values)

    def to_bytes(self) -> bytes:
        return encode(self.values)

    def restore(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Make this the optimizer's state."""
        optimizer.state.clear()
        places = {
            id(p): (g, i) for g, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"])
        }
        for name, parameter in model.named_parameters():
            prefix, device = name + SEPARATOR, parameter.device
            if prefix + BUFFER in self.values:
                optimizer.state[parameter] = {BUFFER: self._buffer(prefix + BUFFER).to(device)}
            if prefix + "step" not in self.values:
                continue
            step = torch.tensor(int(self.values[prefix + "step"]), dtype=torch.float32, device=device)
            moments = {kind: self.moment(prefix + kind, device=device) for kind in FORMS}
            if hasattr(optimizer, "init_state"):
                group, index = places[id(parameter)]
                optimizer.init_state(optimizer.param_groups[group], parameter, group, index)
                _fill_8bit(optimizer.state[parameter], int(step), list(moments.values()))
            else:
                optimizer.state[parameter] = {"step": step, **moments}

    def moments(self) -> tuple[float, ...]:
        """Euclidean norms that auditors compare: of all second moments, and, where there is one, of Muon's momentum.

        Apart, since either would hide in the other.
        """
        found = [[self.moment(key) for key in self.values if key.endswith(SEPARATOR + SQUARED)]]
        if momentum := [self._buffer(key) for key in self.values if key.endswith(SEPARATOR + BUFFER)]:
            found.append(momentum)
        squares = ([float(values.double().square().sum()) for values in kind] for kind in found)
        return tuple(math.sqrt(math.fsum(each)) for each in squares)

    def heading(self, other: InnerState) -> float:
        """The cosine of the ways that both would go next, before any further gradient. A state that leads its path
        elsewhere than its steps did shows here, whatever its norms are."""
        product = ours = theirs = 0.0
        for key in self.values if other.values else ():
            if key.endswith((SEPARATOR + SQUARED, SEPARATOR + BUFFER)):
                name = key.rpartition(SEPARATOR)[0]
                one, two = self._way(name), other._way(name)
                product += float((one * two).sum())
                ours += float(one.square().sum())
                theirs += float(two.square().sum())
        lengths = math.sqrt(ours) * math.sqrt(theirs)
        return product / lengths if lengths else float(ours == theirs)

    def _way(self, name: str) -> Tensor:
        """Where the moments of a parameter lead: AdamW divides the mean by the root of the mean of squares, and Muon
        makes all steps of a matrix about as long."""
        if (key := f"{name}{SEPARATOR}{BUFFER}") in self.values:
            momentum = self._buffer(key).double()
            return momentum * (math.sqrt(momentum.numel()) / max(float(momentum.norm()), EPSILON))
        mean, squares = (self.moment(f"{name}{SEPARATOR}{kind}").double() for kind in FORMS)
        return (mean / (squares.sqrt() + EPSILON)).clamp(-WAY_MAX, WAY_MAX)

    def moment(self, key: str, *, device: torch.device | str = "cpu") -> Tensor:
        """The moment of that name, such as `model.norm.weight/exp_avg`, as float32."""
        codes, scales = (torch.from_numpy(np.array(self.values[name])).to(device) for name in (key, key + SCALES))
        return unpack(codes, scales, FORMS[key.rpartition(SEPARATOR)[2]])

    def _buffer(self, key: str) -> Tensor:
        halves = torch.from_numpy(np.array(self.values[key]).view(np.int16))
        return halves.view(torch.bfloat16).float()


def _wanted(model: nn.Module, optimizer: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every value that the state of a model has after a step, and the shape of its parameter."""
    for name, parameter in model.named_parameters():
        kinds = (BUFFER,) if optimizer == MUON and is_hidden(name, parameter) else KINDS
        yield from ((name + SEPARATOR + kind, tuple(parameter.shape)) for kind in kinds)


def _check(value: Array, kind: str, key: str, *, shape: tuple[int, ...]) -> None:
    """Raise IntegrityError for what no optimizer leaves behind: the state may come from another volunteer."""
    if kind == BUFFER:
        if value.dtype != np.uint16 or value.shape != shape or not is_finite(value):
            raise IntegrityError(f"`{key}` of an optimizer state is not finite bfloat16 values of the shape {shape}")
        return
    if kind == "step":
        if value.dtype != np.int64 or value.shape or not 0 <= value <= STEPS_MAX:
            raise IntegrityError(f"`{key}` of an optimizer state is not a count of up to {STEPS_MAX} steps")
        return
    is_scales = kind.endswith(SCALES)
    dtype, wanted = (np.float32, (-(-math.prod(shape) // BLOCK),)) if is_scales else (np.uint8, shape)
    if value.dtype != dtype or value.shape != wanted:
        raise IntegrityError(f"`{key}` of an optimizer state has the shape {value.shape} of {value.dtype}")
    if is_scales and not (np.isfinite(value) & (value >= 0)).all():
        raise IntegrityError(f"`{key}` of an optimizer state has a scale that is negative or not finite")


def _moments(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The moments of one parameter's state; those of 8 bits are expanded."""
    if "state1" not in state:
        return {kind: state[kind] for kind in FORMS if kind in state}
    return {ours: _expand_8bit(state, theirs) for theirs, ours in MOMENTS.items()}


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
