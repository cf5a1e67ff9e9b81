"""The loss gate: whether work makes its own path better, as other peers have measured it before it counts.

A judge draws sequences of the path's shard, and measures by how much their loss falls from where the inner steps began
to where they came to: an `Appraisal`, signed, and named by the version that was made after it. What follows from the
appraisals of a round is decided here, by the leader and by everyone who makes the version again.

- Work is **harmful** if the loss rises, by three standard errors of a paired test: honest work may end a little past
  the best point, since momentum carries a module there.
- It gains **too little** if that is significantly less than a quarter of what is usual in the round, for as many tokens
  and no higher a learning rate: after a rollback the last round of one path is beside an early one of another, and its
  steps are a tenth as long. So nothing that only looks like work takes weight from work. Where the chain knows fewer
  than KNOWN_MIN authors, strangers' work that gains nothing is too little beside others' that surely gains: else a
  stranger beside one other author says what is usual.
- One judge may be a friend of the author, or an enemy: two must agree to refuse, or the coordinator says so. While
  they do not agree, and it is away, work counts only of those whom the chain knows.
- If most of those whom the chain knows would be refused, the run has a problem and not the peers: none of them is. One
  alone is refused if the work of anybody else surely gains.

An **audit** looks at the work itself: another peer takes the same inner steps from the same state on the same text.
An author's first works are audited, later ones now and then, so that work which gains and is still not what it claims
to be is found too: trained on other text, or made longer.

- An outer gradient is **not repeated** if its cosine with the auditor's is below 0.99 or its norm off by over 5 %,
  before compression in both cases; or if AdamW's second moments after it differ by more than twice. Whoever does not
  give what a repetition needs has failed as well: the work is unjudged, if nobody could repeat it. Whoever gives it so
  slowly that two rounds are over has failed only if it is in full standing, so that it used to come in time
  (verdicts.py): a newcomer's line may be too slow for audits.
- Two auditors must agree, and more than half of them, whatever the losses say and whoever the author is. Those whom
  most contradict are not heard for a while (standing.py).
- If of three audited authors or more most had work that came out different, auditors' machines differ from the
  trainers', and none is refused for that. If most gave nothing, lines are cut, and none is refused for that. Both must
  hold for those who worked before as well: keys are free, and a crowd of forgers would excuse itself.

Source: paired t-test; Gauntlet (arXiv 2505.21684) compares losses before and after as well.
"""

from __future__ import annotations

import functools
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..strict import added, bounded
from .reasons import Reason
from .signing import VALUES_MAX, PeerId, require_digest
from .standing import Finding, Findings

DRAW = "draw"
"""The kind under which leaders and judges sign a work's id: nobody can tell beforehand what comes of it."""
GAIN_MAX = 1e6
"""Nats per token: what a loss beyond any number counts as."""
HARM_ERRORS = 3.0
LITTLE_ERRORS = 2.0
USUAL_SHARE = 0.25
AGREED = 2
"""Judges that must agree to refuse work."""
NOTHING_AGREED = 3
"""Auditors by which those that were given nothing must outnumber those that came to the same, for nobody else to be
asked: two may be friends."""
COSINE_MIN, NORM_OFF_MAX, MOMENTS_MAX = 0.99, 0.05, 2.0
AUTHORS_MANY = 3
"""Of so many audited authors most can hardly be forgers: then something else is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """What an author's round came to, beside the same one taken again by an auditor."""

    cosine: float = bounded(low=-1.0, high=1.0)
    """Of the two outer gradients of the module that is farthest off, before compression."""
    ratio: float = bounded(low=0.0, high=GAIN_MAX)
    """The norm of the author's to that of the auditor's."""
    moments: float = bounded(low=0.0, high=GAIN_MAX)
    """The same of AdamW's second moments after it."""

    @property
    def is_same(self) -> bool:
        is_near = COSINE_MIN <= self.cosine and 1 - NORM_OFF_MAX <= self.ratio <= 1 + NORM_OFF_MAX
        return is_near and 1 / MOMENTS_MAX <= self.moments <= MOMENTS_MAX


NOTHING_GIVEN = Repetition(cosine=0.0, ratio=0.0, moments=0.0)
"""For an author that lives and does not give what a repetition needs; its line may be cut."""
GIVEN_SLOWLY = Repetition(cosine=0.0, ratio=1.0, moments=0.0)
"""For one whose state was still coming when it need not have it any more; its line may be slow. No steps come to this:
a cosine is hardly ever 0 where norms are the same."""
NOTHING_TO_COMPARE = NOTHING_GIVEN, GIVEN_SLOWLY
MADE_UP = Repetition(cosine=-1.0, ratio=0.0, moments=0.0)
"""For steps that cannot have begun as their author says."""


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
    lr_percent: int = bounded(100, low=1, high=100)
    """Their mean learning rate, of the highest, as its recipe's round has it (norms.py)."""
    gain: float = bounded(low=-GAIN_MAX, high=GAIN_MAX)
    """By how much the loss fell, in nats per token: the mean over sequences of the path's shard."""
    error: float = bounded(low=0.0, high=GAIN_MAX)
    """Its standard error."""
    draw: str
    """The author's signature under `work`, which says which sequences these were."""
    repeated: Repetition | None = added(None)
    """What came of taking its inner steps again, if that was asked for."""
    author: PeerId
    """The judge."""

    def __post_init__(self) -> None:
        require_digest(self.run, self.work)

    def rate(self, lr_percent: int) -> float:
        """Nats per token of text, for each token that was trained, as far as that may be expected of work at this
        learning rate: of work at a lower one in proportion, of work at a higher one the same."""
        return self.gain / self.tokens * min(1.0, lr_percent / self.lr_percent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a version may count, and what judges say of it."""

    is_known: bool
    """Whether the chain counts earlier work of its author, or the stage before does."""
    appraisals: Sequence[Appraisal]
    is_counted: bool = False
    """Whether an earlier version counts it: then its losses decide nothing any more, and audits may still end."""

    @property
    def author(self) -> PeerId:
        """Of the work, as its appraisals say: there must be some."""
        return self.appraisals[0].of


def refused(works: Mapping[str, Judged], *, coordinator: PeerId) -> dict[str, Reason]:
    """Which of a round's works, by id, do not count, and why. Same appraisals, same verdict, on any machine."""
    new = {id_: work for id_, work in works.items() if not work.is_counted}
    usual = functools.cache(functools.partial(usual_rate, new.values()))
    faults = {
        id_: _fault(work, coordinator, usual, must_gain=_must_gain(work, new.values())) for id_, work in new.items()
    }
    found = {id_: reason for id_, reason in faults.items() if reason is not None}
    known = {id_: work.author for id_, work in new.items() if work.is_known and work.appraisals}
    others = [work for id_, work in new.items() if id_ not in found]
    if _is_of_the_run({known[id_] for id_ in known.keys() & found.keys()}, set(known.values()), others):
        found = {id_: reason for id_, reason in found.items() if id_ not in known}
    failed = {id_: _why_not(work) for id_, work in works.items() if is_forged(work.appraisals)}
    audited = {work.author for work in works.values() if any(_repetitions(work.appraisals))}
    workers = audited & {work.author for work in works.values() if work.appraisals and work.is_known}
    crowds = [crowd for crowd in (audited, workers) if crowd]
    for why in (Reason.NOT_REPEATED, Reason.UNJUDGED):  # each alone: else who withholds states excused who forges
        alike = [id_ for id_, reason in failed.items() if reason == why]
        authors = {works[id_].author for id_ in alike}
        if not all(_are_most(authors, crowd) for crowd in crowds):
            found |= dict.fromkeys(alike, why)
    return found


def _is_of_the_run(failed: set[PeerId], known: set[PeerId], others: Iterable[Judged]) -> bool:
    """Whether so many of the `known` authors failed that it says something of the run, and nothing of them. Each counts
    once, on however many paths it works; and of one alone it says nothing if `others`, even strangers, surely gain."""
    is_alone = len(known) < KNOWN_MIN
    return 2 * len(failed) > len(known) and not (is_alone and any(map(_surely_gains, others)))


def _are_most(failed: set[PeerId], audited: set[PeerId]) -> bool:
    """Whether so many of these authors failed that it says something of machines or lines, and nothing of them."""
    return len(audited) >= AUTHORS_MANY and 2 * len(failed & audited) > len(audited)


def is_undecided(appraisals: Iterable[Appraisal]) -> bool:
    """Whether one more auditor should repeat the work."""
    same, failed = _repetitions(appraisals)
    return not (same > failed or failed >= AGREED)


def is_open(appraisals: Collection[Appraisal]) -> bool:
    """Whether its leader should ask one more auditor, if there is one: also where two failed that had nothing to
    compare. To say so costs nothing, since nobody contradicts it; so as many as two liars together are outvoted."""
    same, failed = _repetitions(appraisals)
    is_doubtful = same <= failed < same + NOTHING_AGREED and is_withheld(appraisals)
    return is_undecided(appraisals) or is_doubtful


def findings(
    works: Mapping[str, Judged],
    reasons: Mapping[str, Reason],
    *,
    repeatable: Collection[str],
    is_noted: Callable[[Finding], bool],
) -> Findings | None:
    """What a version notes of these works, of which `reasons` are refused, and what no earlier one says (`is_noted`);
    None for nothing. Only of the `repeatable` ones it notes that they were repeated: of what the chain counts."""
    found: dict[str, list[tuple[PeerId, str]]] = defaultdict(list)
    for id_, work in works.items():
        said = [("contradicted", peer) for peer in contradicted(work.appraisals)]
        kind = _kind(work, reasons.get(id_))
        if kind is not None and (kind != "repeated" or id_ in repeatable):
            said.append((kind, work.author))
        for kind, peer in said:
            if not is_noted((kind, peer, id_)):
                found[kind].append((peer, id_))
    return Findings.of(**found)


def agreed(appraisals: Sequence[Appraisal]) -> list[PeerId]:
    """The auditors that took the steps again, and came to what most who repeated the work did; none while they do not
    agree."""
    same, failed = _repetitions(appraisals)
    if same == failed or is_undecided(appraisals):
        return []
    nothing_done = *NOTHING_TO_COMPARE, MADE_UP
    return [peer for peer, one in _audits(appraisals) if one.is_same == (same > failed) and one not in nothing_done]


def is_repeated(appraisals: Iterable[Appraisal]) -> bool:
    """Whether enough auditors came to the same."""
    same, failed = _repetitions(appraisals)
    return same > failed


def is_forged(appraisals: Iterable[Appraisal]) -> bool:
    """Whether enough auditors came to something else, or were given nothing."""
    same, failed = _repetitions(appraisals)
    return failed >= AGREED and failed > same


def is_withheld(appraisals: Iterable[Appraisal]) -> bool:
    """Whether two auditors or more failed, and no two of them with what its author gave."""
    failed = [one for _, one in _audits(appraisals) if not one.is_same]
    return len(failed) >= AGREED and sum(one not in NOTHING_TO_COMPARE for one in failed) < AGREED


def contradicted(appraisals: Sequence[Appraisal]) -> list[PeerId]:
    """The auditors that came to something else than most others, once enough agree. What an author gives to one and
    withholds from others contradicts nobody."""
    same, failed = _repetitions(appraisals)
    if same == failed or is_undecided(appraisals):
        return []
    is_same = same > failed
    given = [(peer, one) for peer, one in _audits(appraisals) if one not in NOTHING_TO_COMPARE]
    wrong = [peer for peer, one in given if one.is_same != is_same]
    return wrong if 2 * len(wrong) < len(given) else []


KNOWN_MIN = 2
"""Authors whom the chain knows, for the usual rate to be theirs alone: the lower of two is not one author's word."""


def usual_rate(works: Iterable[Judged], lr_percent: int = 100) -> float:
    """What work at this learning rate usually gains for each token: the median of those authors whom the chain knows.
    If it knows only one, the median of all at the most: that one may gain much more than others do, and so may a
    crowd."""
    appraised = [work for work in works if work.appraisals]
    known = _rates((work for work in appraised if work.is_known), lr_percent)
    everybody = known if len(known) >= KNOWN_MIN else _rates(appraised, lr_percent)
    return min((statistics.median_low(rates) for rates in (known, everybody) if rates), default=0.0)


def _must_gain(work: Judged, works: Iterable[Judged]) -> bool:
    """Whether it is too little if it gains nothing: a stranger's, while the chain knows too few authors for the usual
    rate to be theirs alone, and other authors' work surely gains, that of known ones if there are any."""
    if work.is_known or not work.appraisals:
        return False
    others = [one for one in works if one.appraisals and one.author != work.author]
    known = [one for one in others if one.is_known]
    is_usual_known = len({one.author for one in known}) >= KNOWN_MIN
    return not is_usual_known and any(map(_surely_gains, known or others))


def _surely_gains(work: Judged) -> bool:
    said = work.appraisals
    return bool(said) and all(one.gain > HARM_ERRORS * one.error for one in said)


def _rates(works: Iterable[Judged], lr_percent: int) -> list[float]:
    """A rate for each author. Of several judges and works the one that says least counts: neither a judge nor an author
    with many works, of much gain for the tokens that it names, can make others' work look like nothing."""
    rates: dict[PeerId, float] = {}
    for work in works:
        rate = min(appraisal.rate(lr_percent) for appraisal in work.appraisals)
        rates[work.author] = min(rate, rates.get(work.author, rate))
    return list(rates.values())


def is_split(appraisals: Sequence[Appraisal], *, coordinator: PeerId) -> bool:
    """Whether more should be asked: judges do not agree, or a single one found harm."""
    if any(appraisal.author == coordinator for appraisal in appraisals):
        return False
    faults = sum(_is_harmful(appraisal) for appraisal in appraisals)
    return 0 < faults < AGREED or (faults > 0 and 2 * faults <= len(appraisals))


def _audits(appraisals: Iterable[Appraisal]) -> list[tuple[PeerId, Repetition]]:
    """Who repeated the work, and what came of it."""
    return [(said.author, said.repeated) for said in appraisals if said.repeated is not None]


def _repetitions(appraisals: Iterable[Appraisal]) -> tuple[int, int]:
    """How many auditors came to the same, and how many did not."""
    found = [one.is_same for _, one in _audits(appraisals)]
    return sum(found), len(found) - sum(found)


def _kind(work: Judged, reason: Reason | None) -> str | None:
    """Which of the findings names the author of a work that is refused for this, or not at all."""
    if reason is None:
        return "repeated" if is_repeated(work.appraisals) else None
    if reason == Reason.NOT_REPEATED:
        return "forged"
    if is_withheld(work.appraisals):
        return "withheld"
    return None if reason == Reason.UNJUDGED else "failed"


def _why_not(work: Judged) -> Reason:
    """One auditor alone makes nobody a forger, whatever others could not have: an author's disk may be lost."""
    return Reason.UNJUDGED if is_withheld(work.appraisals) else Reason.NOT_REPEATED


def _fault(work: Judged, coordinator: PeerId, usual: Callable[[int], float], *, must_gain: bool) -> Reason | None:
    last_word = [appraisal for appraisal in work.appraisals if appraisal.author == coordinator]
    heard, needed = (last_word, 1) if last_word else (work.appraisals, AGREED)
    found = (_fault_of(appraisal, usual(appraisal.lr_percent), must_gain=must_gain) for appraisal in heard)
    faults = [reason for reason in found if reason is not None]
    if len(faults) >= needed and 2 * len(faults) > len(heard):
        return min(faults)
    same, failed = _repetitions(work.appraisals)
    is_doubted = (faults and 2 * len(faults) >= len(heard)) or failed > same
    return Reason.UNJUDGED if not work.is_known and is_doubted else None


def _fault_of(appraisal: Appraisal, usual: float, *, must_gain: bool) -> Reason | None:
    if _is_harmful(appraisal):
        return Reason.HARMFUL
    is_little = appraisal.gain + LITTLE_ERRORS * appraisal.error < USUAL_SHARE * usual * appraisal.tokens
    return Reason.LITTLE_GAIN if (usual > 0 and is_little) or (must_gain and appraisal.gain <= 0) else None


def _is_harmful(appraisal: Appraisal) -> bool:
    return appraisal.gain + HARM_ERRORS * appraisal.error < 0
