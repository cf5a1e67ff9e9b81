"""How long outer gradients may be: judged by the chain alone, so that everyone who makes a version again comes to the
same verdict, also after a takeover or a restart.

- *What the optimiser can do* is the first bound: a step of AdamW moves a parameter by about the learning rate, so a
  round moves a module of N parameters by at most about `lr_sum` x sqrt(N), where `lr_sum` is the sum of the round's
  learning rates. This holds from the first contribution on, without any history.
- *What is usual* is the second: of each path the median of its norms in the last versions, and of the paths the median
  again. So a crowd on few paths does not move it, and neither does a single path with many replicas. Norms are counted
  per unit of `lr_sum`: at the end of the schedule honest ones are a tenth of what they were.
- A contribution may count up to NORM_MULTIPLE_MAX times the usual norm; one that is longer than CLIP_MULTIPLE times it
  is scaled down to that. It may count from NORM_SHARE_MIN of the usual norm on: smaller ones harm nobody at once, but
  they would become the measure, and honest work would be scaled down to nothing.
- *While nothing is usual*, the contributions of one version are each other's measure. Nobody can audit the first round:
  else it took three times the step of whoever hands that in, and outer momentum carried it on for rounds. And because a
  version may have one author alone, no parameter moves further than the optimiser can take it: in first steps some of
  them go the whole way, so that this finds longer steps much better than a norm, of which honest ones have a third.

Everything is sums and products of floats in a fixed order, so all machines get the same bits. A cosine may differ in
its last bits from machine to machine, so a polynomial replaces the schedule's.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ..config import InnerConfig
from ..topology import PathId
from .documents import ModuleVersion
from .signing import PeerId

NORM_MULTIPLE_MAX = 10.0
"""Honest norms stay within 3 times the usual one."""
NORM_SHARE_MIN = 0.001
"""A slow machine may do one step where others do five hundred."""
CLIP_MULTIPLE = 3.0
FIRST_MULTIPLE = 1.25
"""While nothing is usual, over the lower median of a version's authors: of two that is the lesser one, for a step too
short costs a round, and one too long is carried on by outer momentum. Honest ones begin at the same point with the same
steps: theirs differed by 6 % on an idle machine, and by half where modules came at different times."""
FIRST_AUTHORS_MIN = 2
FURTHEST_MULTIPLE = 1.25
"""While nothing is usual, over the sum of the learning rates up to then: as far as any parameter may move. By AdamW's
rule 1.17 is the most with its usual 0.9 and 0.95; honest first steps of the demo's model had 0.83 to 1.08
(docs/judging.md)."""
NORM_VERSIONS = 8
"""How many versions back say what is usual."""
NORM_SAMPLES_MIN = 3
LR_MULTIPLE_MAX = 4.0
"""AdamW may move a parameter whose gradients are rare by (1 - beta1) / sqrt(1 - beta2) learning rates, 3.2 with the
usual 0.9 and 0.999; weight decay and what a codec left for later come on top."""


@functools.lru_cache(maxsize=4096)
def lr_sum(inner: InnerConfig, first_step: int, total_steps: int) -> float:
    """About the sum of the learning rates of one round, whose steps begin with `first_step` of the run's schedule."""
    return math.fsum(_rate(inner, step, total_steps) for step in range(first_step, first_step + inner.steps))


def _rate(inner: InnerConfig, step: int, total_steps: int) -> float:
    """As `core.model.inner.learning_rate`, within 1 % of `lr`, and to the bit the same everywhere."""
    if step < inner.warmup_steps:
        return inner.lr * (step + 1) / inner.warmup_steps
    progress = min((step - inner.warmup_steps) / max(total_steps - inner.warmup_steps, 1), 1.0)
    falling = 1.0 - progress * progress * (3.0 - 2.0 * progress)
    return inner.lr * (inner.lr_min_ratio + (1.0 - inner.lr_min_ratio) * falling)


def lr_percent(inner: InnerConfig, first_step: int, total_steps: int) -> int:
    """How much of the highest learning rate the steps of one round have on average, in percent, rounded up. While the
    rate still rises it counts as the highest: nobody gets away with less by naming an early round."""
    begun = replace(inner, warmup_steps=0)
    left_steps = max(total_steps - inner.warmup_steps, 1)
    mean = lr_sum(begun, max(first_step - inner.warmup_steps, 0), left_steps) / inner.steps
    return max(1, min(math.ceil(100 * mean / inner.lr), 100)) if inner.lr > 0 else 100


def first_clip_norm(norms: Iterable[tuple[PeerId, float]]) -> float | None:
    """The norm that longer contributions to a version are scaled down to while nothing is usual, from the authors and
    norms of those that did a whole round's steps from its parent; None for too few authors. Each has one say, its
    least: one author with many paths does not move it."""
    least: dict[PeerId, float] = {}
    for peer, norm in norms:
        least[peer] = min(norm, least.get(peer, norm))
    if len(least) < FIRST_AUTHORS_MIN:
        return None
    return FIRST_MULTIPLE * statistics.median_low(least.values())


@dataclass(frozen=True, kw_only=True)
class Norms:
    """The measure of one module at one place of its chain."""

    history: Sequence[ModuleVersion]
    """The versions up to the parent, at least the last NORM_VERSIONS, the oldest first."""
    paths: int
    """How many go through the module."""
    size: int
    """Of the module, in parameters."""
    lr_sum: Callable[[int], float]
    """Of the round that begins with a version."""

    @functools.cached_property
    def usual(self) -> float | None:
        """The usual norm per unit of `lr_sum`; None until half of the paths and NORM_SAMPLES_MIN contributions have
        counted. Found once: every share of a version is judged by it."""
        found: dict[PathId, list[float]] = defaultdict(list)
        for version in self.history[-NORM_VERSIONS:]:
            for share in version.shares:
                found[share.path].append(share.norm / self.lr_sum(share.base_version))
        if 2 * len(found) < self.paths or sum(map(len, found.values())) < NORM_SAMPLES_MIN:
            return None
        return statistics.median(statistics.median(norms) for norms in found.values())

    def bounds(self, base: int) -> tuple[float, float]:
        """The least and the greatest norm of an outer gradient whose steps began with version `base`."""
        usual, round_lr = self.usual, self.lr_sum(base)
        high = LR_MULTIPLE_MAX * round_lr * math.sqrt(self.size)
        if usual is None:
            return 0.0, high
        return NORM_SHARE_MIN * usual * round_lr, min(high, NORM_MULTIPLE_MAX * usual * round_lr)

    def furthest(self, base: int) -> float:
        """How far any parameter may move by steps that began with version `base`, and by what a codec left over from
        those of the author's earlier rounds."""
        return FURTHEST_MULTIPLE * math.fsum(map(self.lr_sum, range(base + 1)))

    def clip_norm(self, base: int) -> float | None:
        """The norm that longer contributions to the version after `base` are scaled down to; None while nothing is
        usual."""
        usual = self.usual
        return None if usual is None else CLIP_MULTIPLE * usual * self.lr_sum(base)
