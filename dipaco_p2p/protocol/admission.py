"""Whether a contribution may count. Every refusal is one of `Reason`, and the leader tells it to the sender.

- `judge` is the one function for it: for the leader who takes a contribution in, for the leader who takes over from
  another, and for everybody who makes a version again. `AdmissionRules` holds the facts that they judge by.
- Order matters: cheap checks first, and nothing is read from the payload before its author, run and base are right.
  What needs the payload's numbers comes last, from the norm that the core measured.
- Decrees and claims are facts of one peer, and neither takes back a receipt: whoever makes a version again leaves them
  out. All other facts are on the chain, the measure of norms too (norms.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field

from ..topology import PathId
from .decrees import Decreed
from .documents import Contribution, ModuleVersion
from .norms import Norms
from .reasons import Reason
from .signing import PeerId


@dataclass(frozen=True, slots=True)
class Verdict:
    """None as reason means admitted."""

    reason: Reason | None
    detail: str = ""

    @property
    def is_admitted(self) -> bool:
        return self.reason is None


ADMITTED = Verdict(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRules:
    """What a leader knows when a contribution comes."""

    run: str
    head: ModuleVersion
    bases: Mapping[int, str]
    """Digest by version, for the head and the versions within the staleness limit."""
    paths: Container[PathId]
    """The paths through the module."""
    shardings: Mapping[int, int]
    """From which round on each sharding holds, by its number; 0 is the manifest's."""
    rounds: int
    payload_bytes_max: int
    tokens_max: int
    contributed: Mapping[tuple[PeerId, PathId, int], str]
    """Contribution id by author, path and base version, for the bases above."""
    base_min: int = 0
    """The newest rollback: what began before it is undone."""
    decreed: Decreed = field(default_factory=Decreed)
    """By the coordinator. Nothing, for a contribution that has a receipt: that is a promise."""
    norms: Norms
    """What outer gradients are measured by."""
    places: int
    """How many contributions of one path the version may count."""
    taken: Mapping[PathId, Sequence[PeerId]] = field(default_factory=dict)
    """Of each path, the authors that have a place in it."""
    workers: Collection[PeerId] = frozenset()
    """Whose work the last versions count."""


def judge(
    contribution: Contribution,
    *,
    sender: PeerId,
    contribution_id: str,
    rules: AdmissionRules,
    norm: float | None = None,
) -> Verdict:
    """Whether it may be in the version after `rules.head`. The signature is checked already (`unseal`).

    `norm` is that of the outer gradient; without it the verdict is all that can be said without the payload.
    """
    verdict = judge_decreed(contribution.author, rules.decreed)
    if verdict.is_admitted:
        verdict = _judge_document(contribution, sender, contribution_id, rules)
    if verdict.is_admitted and norm is not None:
        verdict = judge_norm(norm, rules.norms, base=contribution.base_version)
    return verdict


def _judge_document(contribution: Contribution, sender: PeerId, contribution_id: str, rules: AdmissionRules) -> Verdict:
    if contribution.run != rules.run:
        return Verdict(Reason.WRONG_RUN, f"this is run {rules.run[:8]}, not {contribution.run[:8]}")
    if contribution.module != rules.head.module:
        return Verdict(Reason.WRONG_MODULE, f"{contribution.module} is not led here")
    if contribution.path not in rules.paths:
        return Verdict(Reason.WRONG_PATH, f"{contribution.path} does not go through {contribution.module}")
    if sender != contribution.author:
        return Verdict(Reason.NOT_AUTHOR, "a contribution must be pushed by its author")
    if contribution.payload.size > rules.payload_bytes_max:
        size_bytes = contribution.payload.size
        return Verdict(Reason.OVERSIZED, f"payload of {size_bytes} bytes, limit {rules.payload_bytes_max}")
    if contribution.tokens > rules.tokens_max:
        return Verdict(Reason.MALFORMED, f"{contribution.tokens} tokens in one round, limit {rules.tokens_max}")
    earlier = rules.contributed.get((contribution.author, contribution.path, contribution.base_version))
    if earlier is not None and earlier != contribution_id:
        detail = f"{contribution.path} has contributed from version {contribution.base_version}"
        return Verdict(Reason.ALREADY_CONTRIBUTED, detail)
    if earlier is None:
        verdict = _judge_base(contribution, rules)
        return verdict if not verdict.is_admitted else _judge_places(contribution, rules)
    return ADMITTED


def _judge_places(contribution: Contribution, rules: AdmissionRules) -> Verdict:
    """Whether the version has a place left. Half of them are for those who have worked: keys are free, and a crowd of
    new ones would be there first."""
    authors = rules.taken.get(contribution.path, ())
    if len(authors) >= rules.places:
        return Verdict(Reason.FULL, f"{len(authors)} have contributed on {contribution.path}: no more may count")
    newcomers = sum(author not in rules.workers for author in authors)
    if rules.workers and contribution.author not in rules.workers and newcomers >= max(1, rules.places // 2):
        return Verdict(Reason.FULL, f"the places left on {contribution.path} are for those who have worked here")
    return ADMITTED


def judge_decreed(author: PeerId, decreed: Decreed) -> Verdict:
    """Whether a new contribution of `author` is taken at all by the coordinator's decrees. Not asked of one that has a
    receipt: that is a promise."""
    if author in decreed.banned:
        return Verdict(Reason.BANNED, f"banned by the coordinator: {decreed.banned[author]}")
    if decreed.frozen is not None:
        return Verdict(Reason.FROZEN, f"frozen by the coordinator: {decreed.frozen}")
    return ADMITTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """What a leader has seen of the claim behind a contribution."""

    since_s: float | None
    """Since when the author's newest claim is one of the path; None if it is one of another path, or of none."""
    opened_s: float | None
    """When the version was published from which the steps began; None if the leader does not know."""
    is_covered: bool
    """Whether others train the path: somebody claims it who came before the author and has worked on it (from version
    0: in the stage before), or work of another from the same version is in."""
    others: int
    """Further paths on which work of the author from the same version is in."""
    next_s: float | None
    """When the author may be through with its next path at the earliest; None if nothing is known of that."""


def judge_claim(contribution: Contribution, hold: Hold, *, now_s: float, deadline_s: float) -> Verdict:
    """Whether its author trains the path, as far as its leader can see; `deadline_s` is how long the round waits.

    A peer has one claim, so it may train one path from each version, and further ones that nobody else trains: who
    comes to a path in the middle of a round, while others train it, begins with the next round, or after a deadline.
    In the first round everybody has just come, but to a second path. Nor is anybody through with one path after the
    other much faster than others are.
    """
    path, since_s, opened_s = contribution.path, hold.since_s, hold.opened_s
    if since_s is None:
        return Verdict(Reason.UNCLAIMED, f"the newest claim of its author is not one of {path}")
    is_first_round = contribution.base_version == 0
    is_newcomer = hold.others > 0 if is_first_round else opened_s is not None and since_s > opened_s
    if is_newcomer and hold.is_covered and now_s - since_s < deadline_s:
        return Verdict(Reason.COVERED, f"{path} is trained by others: a newcomer begins with the next round")
    if hold.others and hold.next_s is not None and now_s < hold.next_s:
        detail = f"work on {hold.others + 1} paths from version {contribution.base_version} takes others longer"
        return Verdict(Reason.TOO_SOON, detail)
    return ADMITTED


def _judge_base(contribution: Contribution, rules: AdmissionRules) -> Verdict:
    base, head = contribution.base_version, rules.head.version
    if head >= rules.rounds:
        return Verdict(Reason.COMPLETE, f"{contribution.module} has its last version, {head}")
    if base < rules.base_min:
        return Verdict(Reason.ROLLED_BACK, f"based on version {base}, which version {rules.base_min} undid by decree")
    if base not in rules.bases:
        reason = Reason.STALE_BASE if base < head else Reason.UNKNOWN_BASE
        return Verdict(reason, f"based on version {base}, but the head is {head} and only {sorted(rules.bases)} count")
    if rules.bases[base] != contribution.base_digest:
        detail = f"version {base} is {rules.bases[base][:8]}, not {contribution.base_digest[:8]}"
        return Verdict(Reason.UNKNOWN_BASE, detail)
    if contribution.recipe is not None and contribution.recipe.round > base:
        # The learning rate falls, and with it what the work has to gain.
        return Verdict(Reason.MALFORMED, f"steps of round {contribution.recipe.round}, from version {base}")
    return _judge_sharding(contribution, rules)


def _judge_sharding(contribution: Contribution, rules: AdmissionRules) -> Verdict:
    """The size of the shard weighs in the average, so nobody may name a shard that it cannot have trained on."""
    from_round = rules.shardings.get(contribution.sharding)
    if from_round is None:
        return Verdict(Reason.UNKNOWN_SHARDING, f"sharding {contribution.sharding} is not known here")
    if contribution.base_version < from_round:
        detail = f"sharding {contribution.sharding} holds from round {from_round} on"
        return Verdict(Reason.UNKNOWN_SHARDING, detail)
    return ADMITTED


def judge_norm(norm: float, norms: Norms, *, base: int) -> Verdict:
    """Whether an outer gradient of this norm, whose steps began with version `base`, may count."""
    if not math.isfinite(norm):  # finite values may still have an infinite norm
        return Verdict(Reason.NORM, f"norm {norm}")
    if norm == 0.0:
        return Verdict(Reason.NORM, "an outer gradient of zeros")
    low, high = norms.bounds(base)
    if norm > high:
        return Verdict(Reason.NORM, f"norm {norm:.4g}, at most {high:.4g}")
    if norm < low:
        return Verdict(Reason.NORM, f"norm {norm:.4g}, at least {low:.4g}")
    return ADMITTED
