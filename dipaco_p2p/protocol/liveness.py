"""What live peers say of themselves in the DHT: heartbeats, claims and heads. All of it is a hint and expires.

The bodies of the records of records.py; `read` turns a record's body into one of these, or says what is wrong. A later
version may say more: fields that are not known here are ignored, and the record's own bounds limit how many they are.
What is signed for ever is read strictly instead (documents.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from .. import strict
from ..canonical import is_digest
from ..config import LivenessConfig
from ..errors import ConfigError, IntegrityError
from ..strict import added, bounded
from ..topology import PathId
from .decrees import DECREES_MAX, Decreed
from .documents import MIRRORS_MAX, PROBLEM_CHARS_MAX
from .keeping import SHARES
from .names import clean_name
from .signing import VALUES_MAX, PeerId
from .versions import Branch

ADDRESSES_MAX = 8
ADDRESS_CHARS_MAX = 256
TEXT_MAX = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """I am alive, here is where I answer, and this is what I do."""

    addresses: tuple[str, ...] = ()
    """Full multiaddresses; empty for a peer that cannot be dialled."""
    role: str = bounded("volunteer", choices=("volunteer", "seed"))
    owns: bool = False
    """Whether this peer can lead modules: it can be dialled and has room on disk."""
    doing: str = "starting"
    path: PathId | None = None
    round: int = bounded(0, low=0, high=VALUES_MAX)
    tokens_per_s: float = bounded(0.0, low=0.0)
    decrees: int = bounded(0, low=0, high=DECREES_MAX)
    """How many of the coordinator's decrees this peer has: who has fewer asks it for the others."""
    left: bool = False
    """Said once on leaving. A record cannot be taken back from a DHT, only replaced by a newer one."""
    name: str = added("")
    """What this peer wants to be called; not unique. Readers show it only with the id, and only if it is one line of at
    most 32 visible characters."""
    team: str = added("")
    """Whom it says to work with; likewise."""
    relays: bool = added(False)
    """Whether peers behind a NAT can be dialled through this one."""
    keeps: int = added(0, low=0, high=SHARES)
    """Of which share of its lots this peer keeps the ranges, in thousandths (keeping.py)."""
    light: bool = added(False)
    """Of a seed: its archive takes a version that a quorum has recomputed, without the contributions."""

    @property
    def is_relayed(self) -> bool:
        """Whether this peer is dialled through relays."""
        return bool(self.addresses) and all("/p2p-circuit/" in address for address in self.addresses)

    def __post_init__(self) -> None:
        if len(self.addresses) > ADDRESSES_MAX or any(len(text) > ADDRESS_CHARS_MAX for text in self.addresses):
            raise ConfigError("too many or too long addresses")
        if len(self.doing) > TEXT_MAX or not self.doing.isprintable():
            raise ConfigError("`doing` must be a short printable text")
        if len(self.name) > TEXT_MAX or len(self.team) > TEXT_MAX:  # what is no name besides: names.py
            raise ConfigError("`name` and `team` must be short")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """I train this path. Soft state: two peers may say so at once, and then both count (DiLoCo replicas)."""

    path: PathId
    since_s: float
    """When this peer took the path; the earlier claimant stays."""
    round: int = bounded(0, low=0, high=VALUES_MAX)
    """The round that this peer trains, now or next: earlier ones do not wait for it."""
    released: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """I lead this module in this term, these are my mirrors, and this is its newest version."""

    version: int = bounded(low=0, high=VALUES_MAX)
    digest: str
    final: int = bounded(0, low=0, high=VALUES_MAX)
    """The newest version that the coordinator has signed: it is on every chain that goes on."""
    weight: int = bounded(0, low=0, high=VALUES_MAX**2)
    """What the chain has counted (ModuleVersion)."""
    term: int = bounded(low=0, high=VALUES_MAX)
    mirrors: tuple[PeerId, ...] = ()
    after: int = bounded(0, low=0, high=VALUES_MAX)
    granted_by: PeerId = PeerId("")
    grant: str = ""
    """The signature under the Grant that these fields make; a head without one that counts is not believed."""
    resigned: bool = False
    paths: str = added("")
    """What this leader tells of the paths through the module (summaries.py)."""

    def __post_init__(self) -> None:
        if not is_digest(self.digest):
            raise ConfigError("a head without a digest")
        if len(self.mirrors) > MIRRORS_MAX:
            raise ConfigError(f"a head with {len(self.mirrors)} mirrors")

    @property
    def branch(self) -> Branch:
        """How good the branch is that this head ends; its leader's word."""
        return Branch(final=self.final, version=self.version, weight=self.weight, digest=self.digest)


B = TypeVar("B", Heartbeat, Claim, Head)


def heartbeat_interval_s(config: LivenessConfig) -> float:
    """Three chances before a peer is given up."""
    return config.heartbeat_ttl_s / 3


def read(kind: type[B], body: Mapping[str, Any]) -> B:
    """The body of a record; raises IntegrityError for a known field with a wrong value."""
    known = {field.name: body[field.name] for field in fields(kind) if field.name in body}
    try:
        return strict.load(kind, known, where=f"this {kind.__name__.lower()}")
    except ConfigError as error:
        raise IntegrityError(str(error)[:PROBLEM_CHARS_MAX]) from None


def read_all(kind: type[B], bodies: Mapping[PeerId, Mapping[str, Any]]) -> dict[PeerId, B]:
    """Every body that can be read, by peer; junk is left out, since anyone may write to a key."""
    found = {}
    for peer, body in bodies.items():
        try:
            found[peer] = read(kind, body)
        except IntegrityError:
            continue
    return found


def shown_names(peer: PeerId, beat: Heartbeat, decreed: Decreed) -> tuple[str, str]:
    """The name and the team of `peer` as anybody may show them beside its id; empty for none, and by decree."""
    return ("", "") if decreed.hides(peer) else (clean_name(beat.name), clean_name(beat.team))
