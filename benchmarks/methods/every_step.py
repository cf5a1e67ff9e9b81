"""The control to rounds: modules that are synchronised at every inner step, with no outer step at all.

At each step every path computes the gradient of its own batch with the modules as they are, and clips it as a worker
does. A module's gradient is the average over the paths that it is part of, by the weights that a round gives them;
AdamW, one state per module, takes the step. Batches, learning rates and the number of steps are those of the rounds.
No rescaling by the root of the contributors: AdamW's step hardly depends on the length of a gradient.
Source: the fully synchronous training that DiPaCo (arXiv 2403.10616) section 4.5 compares itself with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.model.engine import training_loss
from dipaco_p2p.core.model.inner import learning_rate
from dipaco_p2p.core.model.layout import module_layout
from dipaco_p2p.core.model.optimizer import InnerState, make_optimizer
from dipaco_p2p.core.model.shards import Shard, batch
from dipaco_p2p.core.model.transformer import PathModel, load_modules, read_module
from dipaco_p2p.core.outer.compress import Sent
from dipaco_p2p.core.outer.outer_step import Share, weights
from dipaco_p2p.errors import Diverged
from dipaco_p2p.topology import ModuleId

from .grid import WarmStart, batch_seed
from .jobs import WARMUP_STEPS, Job

Parameters = dict[str, nn.Parameter]


class EveryStep:
    """What `Grid` is for rounds: all modules of a job, trained a round's number of steps at a time."""

    def __init__(self, job: Job, start: WarmStart, shards: Sequence[Shard], *, fast: bool) -> None:
        self.job = job
        self.topology = job.model.topology
        self.agreement: dict[int, list[float]] = {}
        """Always empty: there are no outer gradients to compare."""
        self.shards = list(shards)
        self.sent: list[Sent] = []
        """Always empty: nothing is compressed."""
        self._paths = list(self.topology.paths())
        self._models = [PathModel(job.model) for _ in self._paths]
        self._modules = self._shared(start)
        self._optimizer = make_optimizer(nn.ModuleList(self._models), job.inner)
        self._restore(start.optimizer)
        self._loss = training_loss(fast=fast)

    def flats(self, number: int) -> list[Floats]:
        """The modules of the path with this number, one per level."""
        return [read_module(self._models[number], level) for level in range(len(self.job.model.levels))]

    def round(self, number: int) -> None:
        """As many steps as a round has."""
        first, steps = WARMUP_STEPS + number * self.job.round_steps, self.job.round_steps
        for step in range(first, first + steps):
            self._step(step)

    def _shared(self, start: WarmStart) -> dict[ModuleId, Parameters]:
        """The parameters by module, after every path's model holds those of its own modules and no others."""
        config, found = self.job.model, dict[ModuleId, Parameters]()
        layouts, flats = [module_layout(config, level) for level in range(len(config.levels))], start.flats(config)
        for path, model in zip(self._paths, self._models, strict=True):
            load_modules(model, flats)
            for module in path.modules():
                own = dict(model.named_parameters())
                shared = found.setdefault(module, {name: own[name] for name in layouts[module.level].names})
                for name, parameter in shared.items():
                    owner, _, leaf = name.rpartition(".")
                    setattr(model.get_submodule(owner), leaf, parameter)
        return found

    def _restore(self, data: bytes) -> None:
        """Every module begins with the moments of the model that it is a copy of."""
        state: dict[Tensor, object] = {}
        for model in self._models:
            InnerState.from_bytes(data, model).restore(model, self._optimizer)
            state |= dict(self._optimizer.state)
        self._optimizer.state.update(state)

    def _step(self, step: int) -> None:
        lr = learning_rate(self.job.inner, step, WARMUP_STEPS + self.job.rounds * self.job.round_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        gradients = [self._gradient(number, step) for number in range(len(self._paths))]
        for module, parameters in self._modules.items():
            self._average(module, parameters, gradients)
        self._optimizer.step()

    def _gradient(self, number: int, step: int) -> dict[str, Tensor]:
        """Of the batch that this path's worker would have at this step, by name; clipped as there."""
        model, inner = self._models[number], self.job.inner
        tokens_BT = batch(self.shards[number], seed=batch_seed(self.job, number), step=step, size=inner.batch)
        model.zero_grad(set_to_none=True)
        loss = self._loss(model, tokens_BT)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), inner.clip))
        if not (math.isfinite(float(loss.detach())) and math.isfinite(norm)):
            raise Diverged(f"step {step} of path {number} has the loss {loss:g} and a gradient of norm {norm}")
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        # Taken away, since another path puts its own gradient there next.
        model.zero_grad(set_to_none=True)
        return gradients

    def _average(self, module: ModuleId, parameters: Parameters, gradients: Sequence[dict[str, Tensor]]) -> None:
        numbers = [self.topology.number(path) for path in self.topology.paths_through(module)]
        full = self.job.inner.batch * self.job.model.context
        sizes = [self.shards[number].tokens.size if self.job.weighted else 1 for number in numbers]
        shares = [Share(path=str(n), shard_size=size, tokens=full) for n, size in zip(numbers, sizes, strict=True)]
        alphas = weights(shares, tokens_full=full)
        for name, parameter in parameters.items():
            parts = [gradients[number][name] * alpha for number, alpha in zip(numbers, alphas, strict=True)]
            parameter.grad = torch.stack(parts).sum(dim=0)
