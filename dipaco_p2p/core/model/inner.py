"""The inner loop of a path: AdamW on its own shard, with a schedule over the whole run.

Rule 1: a step depends on the modules, the optimizer state, the shard, the seed and the step's number only. Taking a
state rounds the moments to what it holds, so a restart from `state_bytes` goes on with the same bits.
Rule 2: no clock in here: `on_step` may stop the loop after any step, and `goes_on` within one, which is then not taken.
Rule 3: on a GPU nobody waits for a step: its report is read while the next one runs, so that `on_step` and the check of
its numbers come one step late, and the last ones before `run` returns.
Source: DiPaCo (arXiv 2403.10616) sections 2.3 and 4; DiLoCo keeps the optimizer state between rounds.

AdamW has the form that suits the device: torch's fused one, or bitsandbytes' with 8-bit moments. These save 6 bytes a
parameter, but bitsandbytes waits for the GPU after every parameter (0.50, its `Optimizer8bit.step`), so that the
processor cannot launch work ahead: they are for GPUs that are short of memory. A limit on a GPU's memory counts as its
size.
Its state has one form for all optimizers (`InnerState`): AdamW's two moments (moments.py) and the count of steps, by
the parameter's name. So the state that a coordinator's CPU made starts an 8-bit optimizer on a volunteer's GPU, and a
path may move between the two.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from ...config import InnerConfig, ModelConfig
from ...errors import DipacoError, IntegrityError
from ..arrays import Array, Floats
from ..tensor_file import decode, encode
from .engine import Loss, attention_of, eager_loss, fast_loss, gives_up_compiling, has_failed, training_loss
from .microbatch import Fit, MicroBatch, accumulate, measure, within_memory
from .moments import BLOCK, SIGNED, SQUARES, pack, unpack
from .shards import Shard, batch
from .transformer import PathModel, load_modules, read_module


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished inner step."""

    step: int
    """Its number in the whole run."""
    loss: float
    """Mean loss in nats per token of its batch, before the step."""
    grad_norm: float
    """Before clipping."""
    lr: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InnerResult:
    """The path after some inner steps."""

    flats: list[Floats]
    """One flat vector per level, in level order."""
    steps_done: int
    tokens: int
    loss: float
    """Mean over the steps; NaN without one."""


class InnerLoop:
    """A model and an optimizer that stay with one path between rounds."""

    def __init__(
        self,
        config: InnerConfig,
        total_steps: int,
        model: ModelConfig,
        *,
        device: str | torch.device,
        seed: int,
        eight_bit: bool | None = None,
        fast: bool = False,
        micro: MicroBatch | None = None,
        reads_late: bool | None = None,
    ) -> None:
        """`fast` trains with the fast loss of engine.py: quicker, but not to the bit what others would compute. `micro`
        says how much of a batch goes through at once, all of it by default; `reads_late` is rule 3, by default where it
        helps.

        Raises EnvironmentUnfit when the device has not the memory.
        """
        self._config = config
        self._total_steps = total_steps
        self._seed = seed
        self._device = torch.device(device)
        with within_memory():
            self._model = PathModel(model).to(self._device)
        self._optimizer = make_optimizer(self._model, config, eight_bit=eight_bit)
        self._micro = micro or MicroBatch()
        self._reads_late = self._device.type == "cuda" if reads_late is None else reads_late
        self._has_begun = False
        self.has_compiled = False
        """Whether a step was taken that had to be compiled first, or that could not be."""
        self.use(fast=fast)

    def use(self, *, fast: bool, compiled: bool = True) -> None:
        """Compute the steps from now on with the fast loss, compiled or not, or exactly."""
        self._is_compiled = fast and compiled
        self._loss = training_loss(fast=fast, compiled=compiled)

    def run(
        self,
        flats: Sequence[Floats],
        shard: Shard,
        *,
        first_step: int,
        steps: int,
        on_step: Callable[[StepReport], bool] | None = None,
        goes_on: Callable[[], bool] | None = None,
    ) -> InnerResult:
        """Take `steps` steps from `flats` (one per level); fewer if `on_step` returns False, or `goes_on` does,
        which is asked before each part of a batch: then the step under way is left out, and perhaps none is taken.

        Raises DipacoError when the loss is not finite, and EnvironmentUnfit when memory is too small; what was trained
        until then is lost, and the optimizer's state is of no use.
        """
        assert steps > 0, steps
        load_modules(self._model, flats)
        with within_memory():
            reports = self._steps(shard, range(first_step, first_step + steps), on_step, goes_on)
        return InnerResult(
            flats=[read_module(self._model, level) for level in range(len(flats))],
            steps_done=len(reports),
            tokens=sum(report.tokens for report in reports),
            loss=math.fsum(report.loss for report in reports) / len(reports) if reports else math.nan,
        )

    def state(self) -> InnerState:
        """The optimizer state; the next step begins with its moments."""
        return InnerState.taken(self._model, self._optimizer)

    def state_bytes(self) -> bytes:
        """The same, for `load_state` after a restart."""
        return self.state().to_bytes()

    def load_state(self, data: bytes) -> None:
        """Continue from `state_bytes`; raises IntegrityError, and then nothing has changed, and EnvironmentUnfit."""
        state = InnerState.from_bytes(data, self._model)
        with within_memory():
            state.restore(self._model, self._optimizer)

    def moments(self, values: Mapping[str, Array] | None = None) -> float:
        """The norm of all second moments: its own, or in the `values` of a state; raises IntegrityError if they are no
        state of this path."""
        return (self.state() if values is None else InnerState.checked(values, self._model)).moments()

    @property
    def path(self) -> PathModel:
        """The path as it is now."""
        return self._model

    def described(self) -> str:
        """What steps are taken with on this machine, besides their precision."""
        attention = attention_of(self._loss, self._device)
        failed = ["not compiled after all"] if self._is_compiled and has_failed() else []
        threads = f"{torch.get_num_threads()} thread(s)"
        parts = [str(self._device), attention, optimizer_name(self._optimizer), self._micro.described(), threads]
        return ", ".join(filter(None, [*failed, *parts]))

    def _steps(
        self,
        shard: Shard,
        steps: range,
        on_step: Callable[[StepReport], bool] | None,
        may_go_on: Callable[[], bool] | None,
    ) -> list[StepReport]:
        under_way: deque[_Reading] = deque()
        reports: list[StepReport] = []

        def goes_on() -> bool:
            reports.append(under_way.popleft().report())
            return on_step is None or on_step(reports[-1])

        for step in steps:
            reading = self._step(shard, step, may_go_on)
            if reading is None:
                break
            under_way.append(reading)
            if len(under_way) > self._reads_late and not goes_on():
                break
        while under_way:
            goes_on()
        return reports

    def _step(self, shard: Shard, step: int, goes_on: Callable[[], bool] | None) -> _Reading | None:
        """None for a step that was left out."""
        lr = learning_rate(self._config, step, self._total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        tokens_BT = self._tokens(shard, step)
        if self._micro.is_open and self._device.type == "cpu":
            self._measure(tokens_BT)
        take = self._fitted if self._has_begun else self._first_gradient
        loss = take(tokens_BT, self._loss, goes_on)
        if loss is None:
            return None
        grad_norm = nn.utils.clip_grad_norm_(self._model.parameters(), self._config.clip)
        reading = _Reading(step=step, lr=lr, tokens=tokens_BT.numel(), loss=loss, grad_norm=grad_norm)
        if not self._reads_late:
            reading.report()  # what is not finite must not reach the optimizer
        self._optimizer.step()
        self._has_begun = True
        return reading

    def _first_gradient(self, tokens_BT: Tensor, loss_of: Loss, goes_on: Callable[[], bool] | None) -> Tensor | None:
        """That of the first step, with what the optimizer will take held free: its moments come after the gradient.

        While the fit is being found nothing is compiled, which takes a minute for each size.
        """
        kept = torch.empty(moments_bytes_to_come(self._optimizer), dtype=torch.uint8, device=self._device)
        is_search = loss_of is fast_loss and not self._micro.is_found
        loss = self._fitted(tokens_BT, eager_loss if is_search else loss_of, goes_on)
        del kept
        return loss

    def _fitted(self, tokens_BT: Tensor, loss_of: Loss, goes_on: Callable[[], bool] | None) -> Tensor | None:
        return self._micro.fitted(len(tokens_BT), partial(self._gradient, tokens_BT, loss_of, goes_on))

    def _gradient(
        self, tokens_BT: Tensor, loss_of: Loss, goes_on: Callable[[], bool] | None, fit: Fit
    ) -> Tensor | None:
        """The batch's mean loss, its gradient left with the parameters; None as in `accumulate`."""
        self._model.model.is_checkpointed = fit.is_checkpointed
        self._optimizer.zero_grad(set_to_none=True)
        try:
            loss = accumulate(tokens_BT, fit.size, partial(loss_of, self._model), goes_on=goes_on)
        except Exception as error:  # the backward pass is compiled when it is first needed, which may fail by itself
            if loss_of is not fast_loss or not gives_up_compiling(error):
                raise
        else:
            self.has_compiled |= loss_of is fast_loss and loss is not None
            return loss
        self.has_compiled = True
        return self._gradient(tokens_BT, eager_loss, goes_on, fit)

    def _tokens(self, shard: Shard, step: int) -> Tensor:
        # Not made ahead in a thread: it takes far less than 1 % of a step (benchmarks/trainer), and a GPU is busy then.
        tokens_BT = batch(shard, seed=self._seed, step=step, size=self._config.batch)
        if self._device.type != "cuda":
            return tokens_BT.to(self._device)
        return tokens_BT.pin_memory().to(self._device, non_blocking=True)

    def _measure(self, tokens_BT: Tensor) -> None:
        """Let the budget decide, from what one sequence keeps in an exact step, which keeps the most."""
        need = measure(self._model, self._model.loss, tokens_BT[:1], blocks=len(self._model.model.layers))
        self._micro.choose(len(tokens_BT), need)


class _Reading:
    """A step whose numbers may still be on their way from the device."""

    def __init__(self, *, step: int, lr: float, tokens: int, loss: Tensor, grad_norm: Tensor) -> None:
        self._step, self._lr, self._tokens = step, lr, tokens
        values = torch.stack((loss, grad_norm))
        # From a GPU a copy into pinned memory, and an event behind it: reading waits for this step, not for later ones.
        self._values = values.to("cpu", non_blocking=values.is_cuda)
        self._is_there: torch.cuda.Event | None = None
        if values.is_cuda:
            self._is_there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._is_there.record()

    def report(self) -> StepReport:
        """Wait for the numbers; raises DipacoError if they are not finite."""
        if self._is_there is not None:
            self._is_there.synchronize()
        loss, grad_norm = self._values.tolist()
        report = StepReport(step=self._step, loss=loss, grad_norm=grad_norm, lr=self._lr, tokens=self._tokens)
        _check_finite(report)
        return report


def learning_rate(config: InnerConfig, step: int, total_steps: int) -> float:
    """Learning rate of `step` (from 0): a linear rise over `warmup_steps`, then a cosine to `lr * lr_min_ratio`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = min((step - config.warmup_steps) / max(total_steps - config.warmup_steps, 1), 1.0)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.lr_min_ratio + (1 - config.lr_min_ratio) * cosine)


def _check_finite(report: StepReport) -> None:
    if not (math.isfinite(report.loss) and math.isfinite(report.grad_norm)):
        raise DipacoError(
            f"inner step {report.step} has the loss {report.loss} and a gradient of norm {report.grad_norm}",
            hint="fetch the newest modules and start the round again; if it happens again, the run's `lr` is too high",
        )


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
SQUARED = "exp_avg_sq"
BLOCKSIZE = 256
"""Values that share a scale in bitsandbytes' 8-bit optimizers."""
MOMENTS = {"state1": "exp_avg", "state2": SQUARED}
"""What bitsandbytes calls the moments, and what torch and we call them."""
FORMS = {"exp_avg": SIGNED, SQUARED: SQUARES}
"""Of AdamW's moments, as they are packed."""
SCALES = "_scales"
KINDS = ("step", *FORMS, *(kind + SCALES for kind in FORMS))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InnerState:
    """What the optimizer keeps per parameter, packed: `values["model.norm.weight/exp_avg"]` and so on; nothing before a
    step."""

    values: Mapping[str, Array]

    @classmethod
    def taken(cls, model: PathModel, optimizer: torch.optim.Optimizer) -> Self:
        """The optimizer's state. What it holds is rounded to that, but 8-bit moments, which are not exact anyway."""
        values: dict[str, Array] = {}
        for name, parameter in model.named_parameters():
            state = optimizer.state.get(parameter, {})
            if "step" in state:
                values[f"{name}{SEPARATOR}step"] = np.array(int(state["step"]), dtype=np.int64)
            for kind, moment in _moments(state).items():
                codes, scales = pack(moment.detach().float(), FORMS[kind])
                values[f"{name}{SEPARATOR}{kind}"] = codes.cpu().numpy()
                values[f"{name}{SEPARATOR}{kind}{SCALES}"] = scales.cpu().numpy()
                if kind in state:
                    state[kind].copy_(unpack(codes, scales, FORMS[kind]))
        return cls(values=values)

    @classmethod
    def from_bytes(cls, data: bytes, model: PathModel) -> Self:
        """The inverse of `to_bytes`; raises IntegrityError if it is not a state of `model`'s parameters."""
        return cls.checked(decode(data)[0], model)

    @classmethod
    def checked(cls, values: Mapping[str, Array], model: PathModel) -> Self:
        """The state with these values; raises IntegrityError as above."""
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
            prefix, device = name + SEPARATOR, parameter.device
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

    def moments(self) -> float:
        """Euclidean norm of all second moments."""
        keys = (key for key in self.values if key.endswith(SEPARATOR + SQUARED))
        return math.sqrt(math.fsum(float(self.moment(key).double().square().sum()) for key in keys))

    def moment(self, key: str, *, device: torch.device | str = "cpu") -> Tensor:
        """The moment of that name, such as `model.norm.weight/exp_avg`, as float32."""
        codes, scales = (torch.from_numpy(np.array(self.values[name])).to(device) for name in (key, key + SCALES))
        return unpack(codes, scales, FORMS[key.rpartition(SEPARATOR)[2]])


def _check(value: Array, kind: str, key: str, *, shape: tuple[int, ...]) -> None:
    """Raise IntegrityError for what no AdamW leaves behind: the state may come from another volunteer."""
    if kind == "step":
        if value.dtype != np.int64 or value.shape or value < 0:
            raise IntegrityError(f"`{key}` of an optimizer state is not a count of steps")
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
