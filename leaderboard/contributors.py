"""Contributors: whose work is in the versions, and how much, recently and in all."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dipaco_p2p.protocol.credit import recent_credit
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import PathId

from .live import Live
from .model import CheckRow, ContributorRow, LossRow
from .rows import Work

KINDS = ("lost", "rejected")
NEWCOMERS_MAX = 1000
"""Peers without any credit that are shown: claims cost nothing."""


def contributor_rows(
    work: Iterable[Work], losses: Iterable[LossRow], live: Live, *, checks: Iterable[CheckRow] = (), now_s: float
) -> tuple[ContributorRow, ...]:
    """By rank: most recent credit first, then most credit, then by id. What a leader says that it refused changes none
    of that."""
    losses = list(losses)
    by_peer: dict[PeerId, list[Work]] = defaultdict(list)
    for one in work:
        by_peer[one.peer].append(one)
    counts = {kind: Counter(loss.peer for loss in losses if loss.kind == kind and loss.peer) for kind in KINDS}
    checked = Counter(check.peer for check in checks)
    claimed = _claimed(live)
    known = claimed.keys() | checked.keys() | counts["lost"].keys() | counts["rejected"].keys()
    newcomers = sorted(known - by_peer.keys())[:NEWCOMERS_MAX]
    rows = [
        replace(
            _row(peer, by_peer.get(peer, ()), counts["lost"][peer], claimed.get(peer, ()), live, now_s=now_s),
            rejected=counts["rejected"][peer],
            checks=checked[peer],
        )
        for peer in [*by_peer, *newcomers]
    ]
    ranked = sorted(rows, key=lambda row: (-row.recent, -row.credit, row.peer))
    return tuple(replace(row, rank=rank) for rank, row in enumerate(ranked, start=1))


def _row(
    peer: PeerId, work: Sequence[Work], lost: int, claimed: Sequence[PathId], live: Live, *, now_s: float
) -> ContributorRow:
    """Its rank is not known yet."""
    times_s = [one.earned.at_s for one in work if one.earned is not None]
    times_s += [live.last_seen_s[peer]] if peer in live.last_seen_s else []
    return ContributorRow(
        peer=peer,
        rank=0,
        credit=math.fsum(one.credit for one in work),
        recent=recent_credit((one.earned for one in work if one.earned is not None), now_s=now_s),
        tokens=_tokens(work),
        contributions=len({one.contribution for one in work}),
        lost=lost,
        versions=len({one.version for one in work}),
        paths=tuple(sorted({one.path for one in work} | set(claimed))),
        last_s=max(times_s, default=None),
        is_alive=peer in live.volunteers,
        doing=live.volunteers.get(peer, ""),
    )


def _tokens(work: Iterable[Work]) -> int:
    """Each round once, though it is in a version of each of its modules."""
    rounds: dict[tuple[str, PathId, int], int] = {}
    for one in work:
        rounds[one.round] = max(one.tokens, rounds.get(one.round, 0))
    return sum(rounds.values())


def _claimed(live: Live) -> Mapping[PeerId, Sequence[PathId]]:
    found: dict[PeerId, list[PathId]] = defaultdict(list)
    for path, peers in live.claims.items():
        for peer in peers:
            found[peer].append(path)
    return found
