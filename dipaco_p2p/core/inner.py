"""The inner loop of a path: AdamW on its own shard, with a schedule over the whole run.

Rule 1: a step depends on the modules, the optimizer state, the shard, the seed and the step's number only, so a
restart from `state_bytes` goes on with the same bits.
Rule 2: no clock in here: `on_step` may stop the loop after any step.
Source: DiPaCo (arXiv 2403.10616) sections 2.3 and 4; DiLoCo keeps the optimizer state between rounds.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from ..config import InnerConfig, ModelConfig
from ..errors import DipacoError
from .arrays import Floats
from .fast import training_loss
from .inner_state import InnerState
from .model import PathModel, load_modules, read_module
from .shards import Shard, batch


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
    """Mean over the steps."""


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
    ) -> None:
        """`fast` trains with core/fast.py: quicker on a CPU, but not to the bit what others would compute."""
        self._config = config
        self._total_steps = total_steps
        self._seed = seed
        self._model = PathModel(model).to(device)
        self._optimizer = make_optimizer(self._model, config, eight_bit=eight_bit)
        self._loss = training_loss(fast=fast)

    def run(
        self,
        flats: Sequence[Floats],
        shard: Shard,
        *,
        first_step: int,
        steps: int,
        on_step: Callable[[StepReport], bool] | None = None,
    ) -> InnerResult:
        """Take `steps` steps from `flats` (one per level); fewer if `on_step` returns False.

        Raises DipacoError when the loss is not finite; what was trained until then is lost.
        """
        assert steps > 0, steps
        load_modules(self._model, flats)
        reports: list[StepReport] = []
        for step in range(first_step, first_step + steps):
            reports.append(self._step(shard, step))
            if on_step is not None and not on_step(reports[-1]):
                break
        return InnerResult(
            flats=[read_module(self._model, level) for level in range(len(flats))],
            steps_done=len(reports),
            tokens=sum(report.tokens for report in reports),
            loss=math.fsum(report.loss for report in reports) / len(reports),
        )

    def state_bytes(self) -> bytes:
        """The optimizer state, for `load_state` after a restart."""
        return InnerState.capture(self._model, self._optimizer).to_bytes()

    def load_state(self, data: bytes) -> None:
        """Continue from `state_bytes`; raises IntegrityError, and then nothing has changed."""
        InnerState.from_bytes(data, self._model).restore(self._model, self._optimizer)

    def _step(self, shard: Shard, step: int) -> StepReport:
        lr = learning_rate(self._config, step, self._total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        device = next(self._model.parameters()).device
        tokens_BT = batch(shard, seed=self._seed, step=step, size=self._config.batch).to(device)
        loss = self._loss(self._model, tokens_BT)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        grad_norm = float(nn.utils.clip_grad_norm_(self._model.parameters(), self._config.clip))
        report = StepReport(step=step, loss=float(loss.detach()), grad_norm=grad_norm, lr=lr, tokens=tokens_BT.numel())
        _check_finite(report)
        self._optimizer.step()
        return report


def learning_rate(config: InnerConfig, step: int, total_steps: int) -> float:
    """Learning rate of `step` (from 0): a linear rise over `warmup_steps`, then a cosine to `lr * lr_min_ratio`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = min((step - config.warmup_steps) / max(total_steps - config.warmup_steps, 1), 1.0)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.lr_min_ratio + (1 - config.lr_min_ratio) * cosine)


def make_optimizer(model: PathModel, config: InnerConfig, *, eight_bit: bool | None = None) -> torch.optim.Optimizer:
    """AdamW that decays matrices but not norms: bitsandbytes' 8-bit one on CUDA, else torch's fused one.

    `eight_bit` says it outright; None leaves it to the device.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    if eight_bit is None:
        eight_bit = parameters[0].device.type == "cuda" and importlib.util.find_spec("bitsandbytes") is not None
    if eight_bit:
        optimizer = importlib.import_module("bitsandbytes.optim").AdamW8bit(groups, lr=config.lr, betas=betas)
        return cast(torch.optim.Optimizer, optimizer)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)


def _check_finite(report: StepReport) -> None:
    if not (math.isfinite(report.loss) and math.isfinite(report.grad_norm)):
        raise DipacoError(
            f"inner step {report.step} has the loss {report.loss} and a gradient of norm {report.grad_norm}",
            hint="fetch the newest modules and start the round again; if it happens again, the run's `lr` is too high",
        )
