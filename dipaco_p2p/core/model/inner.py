"""The inner loop of a path: AdamW, or Muon, on its own shard, with a schedule over the whole run.

Rule 1: a step depends on the modules, the optimizer state, the shard, the seed and the step's number only. Taking a
state rounds the moments to what it holds, so a restart from `state_bytes` goes on with the same bits.
Rule 2: no clock in here: `on_step` may stop the loop after any step, and `goes_on` within one, which is then not taken.
Rule 3: on a GPU nobody waits for a step: its report is read while the next one runs, so that `on_step` and the check of
its numbers come one step late, and the last ones before `run` returns.
Source: DiPaCo (arXiv 2403.10616) sections 2.3 and 4; DiLoCo keeps the optimizer state between rounds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ...config import InnerConfig, ModelConfig
from ...errors import Diverged
from ..arrays import Array, Floats
from .engine import Loss, attention_of, eager_loss, fast_loss, gives_up_compiling, has_failed, training_loss
from .microbatch import Fit, MicroBatch, accumulate, measure, within_memory
from .optimizer import InnerState, make_optimizer, moments_bytes_to_come, optimizer_name
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

        Raises EnvironmentUnfit when the device has not the memory, and as `check_optimizer`.
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
        state = InnerState.from_bytes(data, self._model, optimizer=self._config.optimizer)
        with within_memory():
            state.restore(self._model, self._optimizer)

    def read_state(self, values: Mapping[str, Array]) -> InnerState:
        """The inner state that `values` hold, this peer's or another's. Raises IntegrityError if they do not fit this
        path."""
        return InnerState.checked(values, self._model, optimizer=self._config.optimizer)

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
        """Wait for the numbers; raises Diverged if they are not finite."""
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
        raise Diverged(
            f"inner step {report.step} has the loss {report.loss} and a gradient of norm {report.grad_norm}",
            hint="fetch the newest modules and start the round again; if it happens again, the run's `lr` is too high",
        )
