"""How a new version reaches all who train its module while nobody sends it more than twice.

Those whose work the version counts stand in one order, by a hash of the version and the peer. They are cut into
**tiers**. The first fetches from the owners, who have the version without fetching it; each other one fetches from the
two before it, of which the owners are the first. So a tier is as large as those two together (with 3 owners: 3, 6, 9,
15, 24 ...), everybody gives it away twice, and the time grows with the logarithm of the number.

- Everybody who has the signed version finds the same order, so nobody has to be asked, or believed.
- Nobody knows the order before the version is made, so no place in it can be taken.
- Claims are free, so whoever has no work in the version fetches from the last tiers, and nobody asks it.
- Who can be dialled through a relay only stands at the end: its bytes would go over the relay's line twice.

A holder can only waste time: bytes are checked by their digest. How much it can waste, and who is asked then, is in
owner/sources.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from .signing import PeerId

COPIES = 2
"""Of a version that anybody sends, at most; an owner too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one peer stands."""

    tier: int
    """0 for those who fetch from the owners."""
    at: int
    """Where in its tier; any number for who stands behind them all."""
    newer: Sequence[PeerId] = ()
    """The tier before, in the order in which this peer asks it; the owners, for the first tier."""
    older: Sequence[PeerId] = ()
    """The one before that, likewise; the owners, for the second tier."""


def order(version: str, peers: Iterable[PeerId], *, relayed: Collection[PeerId] = ()) -> list[PeerId]:
    """Who comes after whom for a version of this digest."""

    def rank(peer: PeerId) -> tuple[bool, bytes]:
        return peer in relayed, hashlib.sha256(f"{version}|{peer}".encode()).digest()

    return sorted(peers, key=rank)


def tiers(members: Sequence[PeerId], *, owners: int) -> list[Sequence[PeerId]]:
    """The members in their order, cut into tiers; `owners` (at least 1) have the version already."""
    found: list[Sequence[PeerId]] = []
    older, newer, begin = 0, max(1, owners), 0
    while begin < len(members):
        size = older + newer
        found.append(members[begin : begin + size])
        older, newer, begin = newer, size, begin + size
    return found


def place(me: PeerId, members: Sequence[PeerId], *, owners: Sequence[PeerId], version: str) -> Place:
    """Where `me` stands among `members`, which are in their order; behind all of them if it is not one of them."""
    cut = [owners, *tiers(members, owners=len(owners))]
    tier = next((number for number, each in enumerate(cut[1:]) if me in each), len(cut) - 1)
    if me in members:
        at = cut[tier + 1].index(me)
    else:
        at = int.from_bytes(hashlib.sha256(f"{version}|{me}".encode()).digest()[:4], "big")
    older = cut[tier - 1] if tier else ()
    return Place(tier=tier, at=at, newer=_from(cut[tier], at), older=_from(older, at))


def _from(peers: Sequence[PeerId], at: int) -> Sequence[PeerId]:
    """The peers from one place on, and round to it."""
    begin = at % len(peers) if peers else 0
    return [*peers[begin:], *peers[:begin]]
