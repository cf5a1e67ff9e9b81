"""The loss gate: whether work makes its own path better, as other peers have measured it before it counts.

A judge draws sequences of the path's shard, and measures by how much their loss falls from where the inner steps began
to where they came to: an `Appraisal`, signed, and named by the version that was made after it. What follows from the
appraisals of a round is decided here, by the leader and by everyone who makes the version again.

- Work is **harmful** if the loss rises, by three standard errors of a paired test: honest work may end a little past
  the best point, since momentum carries a module there.
- It gains **too little** if that is significantly less than a quarter of what is usual in the round, for as many
  tokens. So nothing that only looks like work takes weight from work.
- One judge may be a friend of the author, or an enemy: two must agree to refuse, or the coordinator says so. While
  they do not agree, and it is away, work counts only of those whom the chain knows.
- If most of those whom the chain knows would be refused, the run has a problem and not the peers: none of them is.

Source: paired t-test; Gauntlet (arXiv 2505.21684) compares losses before and after as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..strict import bounded
from .reasons import Reason
from .signing import VALUES_MAX, PeerId, require_digest

DRAW = "draw"
"""The kind under which leaders and judges sign a work's id: nobody can tell beforehand what comes of it."""
GAIN_MAX = 1e6
"""Nats per token: what a loss beyond any number counts as."""
HARM_ERRORS = 3.0
LITTLE_ERRORS = 2.0
USUAL_SHARE = 0.25
AGREED = 2
"""Judges that must agree to refuse work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Appraisal:
    """How much better one peer's work of one round makes its path, as another peer has measured it."""

    KIND: ClassVar[str] = "appraisal"
    run: str
    work: str
    """`Contribution.work`: the same for all modules of the path."""
    of: PeerId
    """Who did the work."""
    tokens: int = bounded(low=1, high=VALUES_MAX)
    """Trained to make it, as its author says: so much it would weigh."""
    gain: float = bounded(low=-GAIN_MAX, high=GAIN_MAX)
    """By how much the loss fell, in nats per token: the mean over sequences of the path's shard."""
    error: float = bounded(low=0.0, high=GAIN_MAX)
    """Its standard error."""
    draw: str
    """The author's signature under `work`, which says which sequences these were."""
    author: PeerId
    """The judge."""

    def __post_init__(self) -> None:
        require_digest(self.run, self.work)

    @property
    def rate(self) -> float:
        """Nats per token of text, for each token that was trained."""
        return self.gain / self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a version may count, and what judges say of it."""

    is_known: bool
    """Whether the chain counts earlier work of its author."""
    appraisals: Sequence[Appraisal]


def refused(works: Mapping[str, Judged], *, coordinator: PeerId) -> dict[str, Reason]:
    """Which of a round's works, by id, do not count, and why. Same appraisals, same verdict, on any machine."""
    usual = usual_rate(works.values())
    found = {id_: reason for id_, work in works.items() if (reason := _fault(work, usual, coordinator)) is not None}
    known = {id_ for id_, work in works.items() if work.is_known and work.appraisals}
    if 2 * len(known & found.keys()) > len(known):
        return {id_: reason for id_, reason in found.items() if id_ not in known}
    return found


def usual_rate(works: Iterable[Judged]) -> float:
    """What work usually gains for each token: the median of those whom the chain knows, if it knows any. Of several
    judges the one that says least counts, so that no judge can make others' work look like nothing."""
    appraised = [work for work in works if work.appraisals]
    known = [work for work in appraised if work.is_known] or appraised
    rates = [min(appraisal.rate for appraisal in work.appraisals) for work in known]
    return statistics.median_low(rates) if rates else 0.0


def is_split(appraisals: Sequence[Appraisal], *, coordinator: PeerId) -> bool:
    """Whether more should be asked: judges do not agree, or a single one found harm."""
    if any(appraisal.author == coordinator for appraisal in appraisals):
        return False
    faults = sum(_is_harmful(appraisal) for appraisal in appraisals)
    return 0 < faults < AGREED or (faults > 0 and 2 * faults <= len(appraisals))


def _fault(work: Judged, usual: float, coordinator: PeerId) -> Reason | None:
    last_word = [appraisal for appraisal in work.appraisals if appraisal.author == coordinator]
    heard, needed = (last_word, 1) if last_word else (work.appraisals, AGREED)
    faults = [reason for appraisal in heard if (reason := _fault_of(appraisal, usual)) is not None]
    if len(faults) >= needed and 2 * len(faults) > len(heard):
        return min(faults)
    return Reason.UNJUDGED if not work.is_known and faults and 2 * len(faults) >= len(heard) else None


def _fault_of(appraisal: Appraisal, usual: float) -> Reason | None:
    if _is_harmful(appraisal):
        return Reason.HARMFUL
    is_little = appraisal.gain + LITTLE_ERRORS * appraisal.error < USUAL_SHARE * usual * appraisal.tokens
    return Reason.LITTLE_GAIN if usual > 0 and is_little else None


def _is_harmful(appraisal: Appraisal) -> bool:
    return appraisal.gain + HARM_ERRORS * appraisal.error < 0
