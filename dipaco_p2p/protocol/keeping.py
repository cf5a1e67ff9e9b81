"""Keepers: volunteers with disk who keep what old versions were made of, so that anybody can still make them again when
the archive has dropped it.

- A **range** is RANGE_VERSIONS versions of one module, one after the other; only final versions count. To keep it is to
  have what makes them again: the parameters and the outer state before the first of them, and of each the payloads of
  its contributions, what judges said, and the parameters that a rollback goes back to.
- Every peer has a **lot** in every range: 64 bits of SHA-256 of `run|module|range|peer`. Its heartbeat says of which
  share of its lots it takes the range, in thousandths: the greatest ones. The **keepers** of a range are the KEEPERS
  greatest lots of peers that take it, have worked, and are not barred. So everybody computes them alike, and a peer
  whose disk is full gives up those ranges that others are the likeliest to keep.
- What a peer offers is its own word, so nothing rests on it: keepers are **challenged** at random, and who fails
  FAILURES_MAX times in a row is barred and loses its proofs.
- A challenge names a part of a blob and a nonce. The answer is a digest over the nonce, the *answering peer's id* and
  the part: nobody can pass on the answer of another keeper.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from ..config import KEEPERS as KEEPERS
from ..strict import bounded
from ..topology import ModuleId
from .signing import VALUES_MAX, PeerId, require_digest

RANGE_VERSIONS = 8
SHARES = 1000
"""What a heartbeat counts the share of lots in."""
PROOF_BYTES_MAX = 64 * 1024
"""Of one challenge: it costs a keeper less than a range of the blob would."""
NONCE_CHARS = 32
FAILURES_MAX = 2
"""In a row: one answer may be lost with a connection."""
COUNTS_MAX = 1024
"""Keepers of one count. With about 150 bytes each it fits a document."""

# In lifetimes of a heartbeat, of which one is 15 s unless the run says otherwise.
GONE_LIVES = 20
"""A keeper that was not seen for so long is replaced: most who go away come back soon, and a copy costs traffic."""
LATE_LIVES = 80
"""How long after it was given a range a keeper may lack parts of it."""
BARRED_LIVES = 960
"""How long who failed is no keeper."""

_DOMAIN = b"dipaco-p2p/1/proof\0"


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Versions of one module that are kept together."""

    module: ModuleId
    number: int
    """From 0 on."""

    @property
    def first(self) -> int:
        """Its first version."""
        return self.number * RANGE_VERSIONS + 1

    def versions(self, head: int) -> range:
        """Those that there are, while `head` is the newest."""
        return range(self.first, min(self.first + RANGE_VERSIONS, head + 1))

    def __str__(self) -> str:
        return f"{self.module} {self.first}-{self.first + RANGE_VERSIONS - 1}"


def range_of(module: ModuleId, version: int) -> Range:
    """The range of a version; of version 0, which needs nothing, the first."""
    return Range(module, max(version - 1, 0) // RANGE_VERSIONS)


def ranges_up_to(module: ModuleId, version: int) -> Iterator[Range]:
    """All that begin up to `version`."""
    return (Range(module, number) for number in range(-(-version // RANGE_VERSIONS)))


def lot(run: str, wanted: Range, peer: PeerId) -> int:
    """How likely `peer` is to keep the range: the greater, the likelier."""
    text = f"{run}|{wanted.module}|{wanted.number}|{peer}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def takes(share: int, number: int) -> bool:
    """Whether a peer that offers `share` takes a range in which it has this lot."""
    return number * SHARES >> 64 >= SHARES - share


def share_without(number: int) -> int:
    """The greatest share that leaves this lot out."""
    return SHARES - 1 - (number * SHARES >> 64)


def keepers(run: str, wanted: Range, offers: Mapping[PeerId, int]) -> list[PeerId]:
    """Who should keep a range, by the share that each offers; the likeliest first."""
    lots = {peer: lot(run, wanted, peer) for peer in offers}
    taking = (peer for peer, share in offers.items() if takes(share, lots[peer]))
    return sorted(taking, key=lambda peer: (-lots[peer], peer))[:KEEPERS]


def proof(nonce: str, peer: PeerId, part: bytes) -> str:
    """What `peer` answers to a challenge with this nonce, having this part of a blob."""
    return hashlib.sha256(_DOMAIN + nonce.encode() + peer.encode() + b"\0" + part).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """What one asker's challenges of a keeper came to."""

    proofs: int = 0
    """Since it was barred last."""
    failures: int = 0
    """In a row."""
    barred_until_s: float = 0.0

    def passed(self) -> Conduct:
        """It answered right."""
        return replace(self, proofs=self.proofs + 1, failures=0)

    def failed(self, *, now_s: float, barred_s: float) -> Conduct:
        """It answered wrong, or nothing."""
        if self.failures + 1 < FAILURES_MAX:
            return replace(self, failures=self.failures + 1)
        return Conduct(barred_until_s=now_s + barred_s)

    def is_barred(self, now_s: float) -> bool:
        """Whether it is no keeper now."""
        return now_s < self.barred_until_s


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperCount:
    """One keeper, as the coordinator's challenges found it."""

    peer: PeerId
    proofs: int = bounded(low=0, high=VALUES_MAX)
    """Challenges that it answered right since it was barred last: its credit for keeping."""
    barred_until_s: float = bounded(low=0.0, high=float(VALUES_MAX))
    """Unix time; past for who is not barred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepersCount:
    """What the coordinator's challenges came to so far: who earned what, and who is barred. A later number replaces an
    earlier one."""

    KIND: ClassVar[str] = "keepers"
    run: str
    number: int = bounded(low=1, high=VALUES_MAX)
    keepers: tuple[KeeperCount, ...] = bounded(items=COUNTS_MAX)
    author: PeerId

    def __post_init__(self) -> None:
        require_digest(self.run)

    def barred(self, now_s: float) -> frozenset[PeerId]:
        """Who is no keeper now."""
        return frozenset(one.peer for one in self.keepers if now_s < one.barred_until_s)


def counts_of(tested: Mapping[PeerId, Conduct]) -> tuple[KeeperCount, ...]:
    """The same for a document, with the barred first where there are too many."""
    order = sorted(tested, key=lambda peer: (-tested[peer].barred_until_s, -tested[peer].proofs, peer))
    found = (
        KeeperCount(peer=peer, proofs=tested[peer].proofs, barred_until_s=tested[peer].barred_until_s) for peer in order
    )
    return tuple(found)[:COUNTS_MAX]
