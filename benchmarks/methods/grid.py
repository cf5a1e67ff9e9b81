"""Rounds of a grid of paths in one process: one worker after the other does what a volunteer does.

Rule: what a round does to a module is what the swarm's owners do: the same weights, average, Nesterov step and
quantised update of core/outer/outer_step.py. The same contributions in the same order give the same bytes
(tests/benchmarks/test_methods_grid.py compares with owner/version.py).
Controls and ablations differ only where a field of `Job` says so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dipaco_p2p.config import MUON, ModelConfig
from dipaco_p2p.core.arrays import Array, Floats, to_bfloat16
from dipaco_p2p.core.model.inner import InnerLoop
from dipaco_p2p.core.model.layout import Layout, module_layout
from dipaco_p2p.core.model.optimizer import BUFFER, MEAN, SEPARATOR, InnerState, is_hidden
from dipaco_p2p.core.model.shards import Shard
from dipaco_p2p.core.model.transformer import PathModel
from dipaco_p2p.core.outer.codec import Compressed
from dipaco_p2p.core.outer.compress import CODECS, Sent, beginning, compress
from dipaco_p2p.core.outer.outer_step import OuterState, Share, average, nesterov, outer_gradient, outer_step, weights
from dipaco_p2p.topology import ModuleId, PathId

from .jobs import WARMUP_STEPS, Job

TOP_SHARE = 0.03
Gradient = Compressed | Floats


class Sender:
    """What one worker sends of one module, round after round; with `feedback` nothing is lost for good."""

    def __init__(
        self, codec: str, *, feedback: bool, decay: float = 1.0, goes_on: bool = True, layout: Layout | None = None
    ) -> None:
        """`decay` is the share of what was lost that is tried again; without `goes_on` rounds begin at the versions.
        With the `layout` of the module, places are chosen in each of its tensors."""
        self._codec = codec
        self._layout = layout
        self._feedback = feedback
        self._goes_on = goes_on
        self._decay = np.float32(decay)
        self._residual: Floats | None = None
        self.told: list[Sent] = []
        """How much each message said."""

    def beginning(self, version: Floats) -> Floats:
        """Where the inner steps begin."""
        return beginning(version, self._residual, codec=self._codec) if self._goes_on else version

    def send(self, values: Floats, *, is_dense: bool = False) -> Gradient:
        """The outer gradient `values` (N,) as it arrives; one that `is_dense` as int4."""
        codec = "int4" if is_dense else self._codec
        if codec == "fp32":
            return values
        wanted = values if self._residual is None else values + self._residual
        if codec not in CODECS:
            sent = _largest(wanted)
        elif self._layout is None or is_dense:
            sent = compress(wanted, codec=codec)[0]
        else:
            sent = _by_tensor(wanted, codec, self._layout)
        residual = wanted - sent.expand()
        self._residual = residual * self._decay if self._feedback else None
        self.told.append(Sent.of(float(np.linalg.norm(values)), sent, residual))
        return sent


@dataclass(frozen=True, slots=True, eq=False)
class Plain(Compressed):
    """Values as they are, for what no codec does."""

    values: Floats

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.values.size

    @property
    def codec(self) -> str:
        return "plain"

    def expand(self) -> Floats:
        return self.values

    def add_to(self, total: Floats, factor: float) -> None:
        total += self.values * np.float32(factor)

    def less(self, before: Floats, *, out: Floats) -> None:
        np.subtract(before, self.values, out=out)

    def norm(self) -> float:
        return math.sqrt(self.dot(self))

    def dot(self, other: Plain) -> float:
        return float(np.dot(self.values.astype(np.float64), other.values))

    def thinned(self, every: int, first: int) -> Plain:
        raise NotImplementedError

    def tensors(self) -> dict[str, Array]:
        raise NotImplementedError


def _by_tensor(values: Floats, codec: str, layout: Layout) -> Compressed:
    """Each matrix in the codec by itself, and what is no matrix, which is norms, in int8."""
    found = np.empty_like(values)
    views = layout.split(found)
    for name, tensor in layout.split(values).items():
        own = codec if tensor.ndim > 1 else "int8"
        views[name][...] = compress(tensor.reshape(-1), codec=own)[0].expand().reshape(tensor.shape)
    return Plain(found)


def received(gradient: Gradient) -> Floats:
    """The values (N,) that a gradient stands for."""
    return gradient.expand() if isinstance(gradient, Compressed) else gradient


def _largest(values: Floats) -> Compressed:
    """The largest `TOP_SHARE` of the values, in int8."""
    kept = values.copy()
    kept[np.argsort(np.abs(values), kind="stable")[: -max(1, int(TOP_SHARE * values.size))]] = 0
    return compress(kept)[0]


ATTACK_FACTOR = np.float32(-10)
CLIP_FACTOR = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One worker's part of one module's round."""

    share: Share
    gradient: Gradient


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WarmStart:
    """The model that every path starts from, by the names of its tensors, and AdamW's state."""

    tensors: Mapping[str, Floats]
    optimizer: bytes

    def flats(self, model: ModelConfig) -> list[Floats]:
        """The modules that every path of `model` begins with, one per level."""
        layouts = [module_layout(model, level) for level in range(len(model.levels))]
        return [layout.flatten({name: self.tensors[name] for name in layout.names}) for layout in layouts]

    def state(self, path: PathModel, optimizer: str) -> bytes:
        """What that optimizer of `path` begins with. AdamW's first moment and Muon's momentum are means of the same
        gradients, the latter over twice as many."""
        state = InnerState.from_bytes(self.optimizer, path)
        if optimizer != MUON or not state.values:
            return self.optimizer
        hidden = {name for name, parameter in path.named_parameters() if is_hidden(name, parameter)}
        values = {key: value for key, value in state.values.items() if key.partition(SEPARATOR)[0] not in hidden}
        for name in hidden:
            mean = state.moment(f"{name}{SEPARATOR}{MEAN}").numpy()
            values[f"{name}{SEPARATOR}{BUFFER}"] = to_bfloat16(mean.reshape(-1)).reshape(mean.shape)
        return InnerState(values=values).to_bytes()


Arrived = dict[ModuleId, list[Contribution]]


def batch_seed(job: Job, number: int, replica: int = 0) -> int:
    """As peers/path/trainer.py: every worker draws batches of its own."""
    return (job.seed * 1_000_003 + number * 7919 + replica) % 2**31


class Worker:
    """One replica of one path: its optimizer, and what compression still owes."""

    def __init__(self, job: Job, path: PathId, replica: int, start: WarmStart, *, fast: bool, device: str) -> None:
        self.path = path
        number = job.model.topology.number(path)
        seed = batch_seed(job, number, replica)
        total_steps = WARMUP_STEPS + job.rounds * job.round_steps
        self._job = job
        self._is_attacker = job.attack and number == 0
        self._loop = InnerLoop(job.inner, total_steps, job.model, device=device, seed=seed, fast=fast)
        self._loop.load_state(start.state(self._loop.path, job.optimizer))
        levels = range(len(job.model.levels))
        layouts = [module_layout(job.model, level) if job.by_tensor else None for level in levels]
        codecs = job.codecs or [job.codec for _ in levels]
        self.senders = [
            Sender(codec, feedback=job.feedback, decay=job.decay, goes_on=job.goes_on, layout=layout)
            for codec, layout in zip(codecs, layouts, strict=True)
        ]
        self.own: list[Floats] = []
        """Its last outer gradients, one per level, as they were before compression."""

    def train(self, flats: Sequence[Floats], shard: Shard, number: int) -> list[Contribution]:
        """One contribution per level after the inner steps of round `number`."""
        first_step = WARMUP_STEPS + number * self._job.round_steps
        flats = [sender.beginning(flat) for sender, flat in zip(self.senders, flats, strict=True)]
        result = self._loop.run(flats, shard, first_step=first_step, steps=self._job.round_steps)
        # Replicas of a path share its weight, so it does not matter that each sees a part of the shard only.
        size = shard.tokens.size if self._job.weighted else 1
        share = Share(path=str(self.path), shard_size=size, tokens=result.tokens)
        gradients = [outer_gradient(before, after) for before, after in zip(flats, result.flats, strict=True)]
        if self._is_attacker:
            gradients = [gradient * ATTACK_FACTOR for gradient in gradients]
        self.own = gradients
        job = self._job
        is_dense = number < job.dense_first or number >= job.rounds - job.dense_last
        sent = [sender.send(one, is_dense=is_dense) for sender, one in zip(self.senders, gradients, strict=True)]
        return [Contribution(share=share, gradient=gradient) for gradient in sent]


class Grid:
    """All modules and workers of a job."""

    def __init__(self, job: Job, start: WarmStart, shards: Sequence[Shard], *, fast: bool, device: str = "cpu") -> None:
        self.job = job
        self.topology = job.model.topology
        self.agreement: dict[int, list[float]] = {}
        """By number of contributors: norm of the mean outer gradient over the mean of their norms, a value a round."""
        self.shards = list(shards)
        fresh = start.flats(job.model)
        self.states = {module: OuterState.fresh(fresh[module.level]) for module in self.topology.modules()}
        self._norms: dict[ModuleId, list[float]] = {module: [] for module in self.states}
        self._late: Arrived = {}
        self._workers = [
            [Worker(job, path, replica, start, fast=fast, device=device) for replica in range(job.replicas)]
            for path in self.topology.paths()
        ]

    @property
    def sent(self) -> list[Sent]:
        """How much the messages of each round said, as means over workers and modules."""
        senders = [sender for workers in self._workers for worker in workers for sender in worker.senders]
        return [
            Sent(
                captured=statistics.fmean(one.captured for one in each), owed=statistics.fmean(one.owed for one in each)
            )
            for each in zip(*(sender.told for sender in senders), strict=True)
        ]

    def flats(self, number: int) -> list[Floats]:
        """The modules of the path with this number, one per level."""
        return [self.states[module].params for module in self.topology.path(number).modules()]

    def starts(self, number: int) -> list[Floats]:
        """What the path with this number begins its next round with."""
        return self.flats(number)

    def round(self, number: int) -> None:
        """Train every path from the modules as they are, then step every module with what arrives."""
        self.step(self.arriving(self.train(number), number), number)

    def train(self, number: int) -> Arrived:
        """The contributions to each module, by path and replica."""
        made: Arrived = {module: [] for module in self.states}
        for place, workers in enumerate(self._workers):
            flats = self.starts(place)
            for replica, worker in enumerate(workers):
                part = self.shards[place].part(replica, self.job.replicas)
                contributions = worker.train(flats, part, number)
                for module, contribution in zip(worker.path.modules(), contributions, strict=True):
                    made[module].append(contribution)
        return made

    def arriving(self, made: Arrived, number: int) -> Arrived:
        """What arrives in this round: what was not lost, what is late from the last round, and zeros for the rest."""
        job, lost = self.job, missing(self.job, number)
        here, self._late, late = dict[ModuleId, list[Contribution]](), {}, self._late
        for module, contributions in made.items():
            places = map(self.topology.number, self.topology.paths_through(module))
            absent = [lost[place * job.replicas + n] for place in places for n in range(job.replicas)]
            pairs = list(zip(contributions, absent, strict=True))
            here[module] = late.get(module, []) + [found for found, is_lost in pairs if not is_lost]
            if job.zero and here[module]:
                here[module] += [nothing(found) for found, is_lost in pairs if is_lost]
            if job.late:
                self._late[module] = [weighed(found, job.late) for found, is_lost in pairs if is_lost]
        return here

    def step(self, arrived: Arrived, number: int) -> None:
        """Step the modules for which something arrived."""
        order = np.random.default_rng([self.job.seed, 78, number])
        for module, contributions in arrived.items():
            if contributions:
                self._step(module, contributions, order)
            elif self.job.coasts:
                state = self.states[module]
                zeros = np.zeros_like(state.params)
                self.states[module] = outer_step(state, zeros, lr=self.job.lr, momentum=self.job.momentum)[0]

    def _step(self, module: ModuleId, contributions: list[Contribution], order: np.random.Generator) -> None:
        job, state = self.job, self.states[module]
        if job.outer == "none" or (job.outer == "shared" and self.topology.is_private(module.level)):
            assert len(contributions) == 1, module
            self.states[module] = OuterState.fresh(state.params - received(contributions[0].gradient))
            return
        if job.outer == "single":
            for place in order.permutation(len(contributions)):
                state = next_state(state, [contributions[place]], job)
            self.states[module] = state
            return
        self._measure(contributions)
        self.states[module] = next_state(state, contributions, job, clip_norm=self._clip_norm(module, contributions))

    def _clip_norm(self, module: ModuleId, contributions: Sequence[Contribution]) -> float | None:
        self._norms[module] += [float(np.linalg.norm(received(c.gradient))) for c in contributions]
        return CLIP_FACTOR * statistics.median_low(self._norms[module]) if self.job.clip else None

    def _measure(self, contributions: Sequence[Contribution]) -> None:
        if len(contributions) > 1:
            values = np.stack([received(c.gradient) for c in contributions])
            ratio = np.linalg.norm(values.mean(axis=0)) / np.linalg.norm(values, axis=1).mean()
            self.agreement.setdefault(len(values), []).append(float(ratio))


def missing(job: Job, number: int) -> list[bool]:
    """Of each worker, by path and replica: whether its contributions to all modules miss this round. The lots depend
    on the seed and the round only, so they are the same for all jobs of a seed that lose the same share."""
    count = job.model.path_count * job.replicas
    lots = np.random.default_rng([job.seed, 77, number]).random(count)
    untrained = untrained_path(job)
    return [bool(lots[n] < job.drop) or (job.untrained and n // job.replicas == untrained) for n in range(count)]


def untrained_path(job: Job) -> int:
    """The number of the path that is never trained in jobs that have one."""
    return job.seed % job.model.path_count


def weighed(contribution: Contribution, weight: float) -> Contribution:
    """The same outer gradient with a part of its weight: as if fewer tokens had been trained for it."""
    share = contribution.share
    return replace(contribution, share=replace(share, tokens=max(1, round(weight * share.tokens))))


def nothing(contribution: Contribution) -> Contribution:
    """The same share of the average, and an outer gradient of zeros."""
    zeros = np.zeros_like(received(contribution.gradient))
    return replace(contribution, gradient=compress(zeros)[0])


def next_state(
    state: OuterState, contributions: Sequence[Contribution], job: Job, *, clip_norm: float | None = None
) -> OuterState:
    """A module after one round; with int8 and the rules of a run file, what `owner.version.make_version` makes."""
    tokens_full = job.inner.steps * job.inner.batch * job.model.context
    alphas = weights([c.share for c in contributions], tokens_full=tokens_full)
    gradients = [c.gradient for c in contributions]
    compressed = [gradient for gradient in gradients if isinstance(gradient, Compressed)]
    if len(compressed) == len(gradients):
        paths = [c.share.path for c in contributions]
        clip_norms = None if clip_norm is None else [clip_norm] * len(alphas)
        gradient = average(compressed, alphas, rule=job.rule, paths=paths, clip_norms=clip_norms)
        if job.down_of == "gradient":
            if job.down == "fp32":
                return _stepped(state, gradient, state.residual, job)
            told, left = compress(gradient, state.residual, codec=job.down)
            return _stepped(state, told.expand(), left, job)
        return outer_step(state, gradient, lr=job.lr, momentum=job.momentum, codec=job.down)[0]
    assert job.rule == "sqrt" and clip_norm is None and job.replicas == 1, "fp32 is there to compare codecs with"
    scale = 1 / math.sqrt(math.fsum(alpha * alpha for alpha in alphas))
    total = np.zeros_like(state.params)
    for values, alpha in zip(map(received, gradients), alphas, strict=True):
        total += values * np.float32(alpha * scale)
    return _stepped(state, total, state.residual, job)


def _stepped(state: OuterState, gradient: Floats, residual: Floats, job: Job) -> OuterState:
    """After the step that everybody makes of this gradient; `residual` is what updates could not say of it so far."""
    buffer, step = nesterov(state.momentum, gradient, lr=job.lr, momentum=job.momentum)
    return OuterState(params=state.params - step, momentum=buffer, residual=residual)
