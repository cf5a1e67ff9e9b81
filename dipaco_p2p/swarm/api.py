"""What the programs see of the network: one small protocol with records, calls and addresses.

Two swarms keep it: `memory.MemorySwarm` (one process, seeded faults) and `libp2p.Libp2pSwarm` (the real one). One
contract test suite runs on both. The remote peer of a call is authenticated by the transport.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..protocol.records import Record
from ..protocol.signing import PeerId, Signer
from .blobs.bandwidth import Line

HEADER_BYTES_MAX = 256 * 1024
BODY_BYTES_MAX = 4 * 1024 * 1024
OPEN_CALLS_PER_PEER_MAX = 96
OPEN_CALLS_MAX = 1024
"""Streams, from before anything is read. Of all these: the fuller it is, the less each peer may have (frames.py)."""
INBOUND_CALLS_PER_PEER_MAX = 16
INBOUND_CALLS_MAX = 256
"""Calls whose header is being read or that are being answered, but for bulk."""
BULK_CALLS_PER_PEER_MAX = 64
BULK_CALLS_MAX = 512
"""Calls that move blobs, with those that wait for their turn: they are counted apart, so that they keep nobody from
being heard."""
BULK_AT_ONCE_PER_PEER = 4
BULK_AT_ONCE = 16
CONTROL_BODY_BYTES_MAX = 64 * 1024
"""A request with a longer body is bulk, whatever it asks for."""
FRAME_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a call: a header of plain JSON values, and bytes."""

    header: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""


Handler = Callable[[PeerId, dict[str, Any], bytes], Awaitable[Reply]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmStatistics:
    """What a swarm did since it was opened; bytes are those of calls, with their headers."""

    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_relayed: int = 0
    """Of both, those of calls that went through a relay."""
    peers_direct: int = 0
    peers_relayed: int = 0
    """Those who called us or were called lately, by the way of the last call."""
    relay_slots: int = 0
    """Of us as a relay: slots that are held now."""
    relay_circuits: int = 0
    """Open now."""
    relay_bytes: int = 0
    """Passed on for others."""
    calls_made: int = 0
    calls_failed: int = 0
    calls_served: int = 0
    calls_refused: int = 0
    calls_broken: int = 0
    records_put: int = 0
    keys_read: int = 0
    """How often a key of the DHT was read."""
    records_read: int = 0
    """Live ones, of all these reads together."""
    records_refused: int = 0


class Swarm(Protocol):
    """One peer's place in the network."""

    @property
    def peer(self) -> PeerId:
        """Who we are."""

    @property
    def signer(self) -> Signer:
        """The key behind `peer`."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs, with /p2p/ID, at which others can dial us; empty if we do not listen."""

    @property
    def line(self) -> Line:
        """What blobs may take of this machine's line: of all that is moved over this swarm together."""

    def host(self, peer: PeerId) -> str:
        """Where a call that `peer` has open now comes from, as limits see it (frames.py): an address, or the network
        that is as cheap as one, of a relayed call the relay's. Empty for this machine, and without such a call."""

    @property
    def offers_relay(self) -> bool:
        """Whether peers behind a NAT can be dialled through us."""

    def note_peers(
        self,
        *,
        members: Collection[PeerId],
        known: Collection[PeerId],
        banned: Collection[PeerId],
        relays: Mapping[PeerId, Sequence[str]],
    ) -> Collection[PeerId]:
        """Tell the swarm who is who. A relay serves `members`; `known` peers (they have worked, or owned a module) are
        not counted with strangers at their address; `banned` peers may not take part; peers behind a NAT are dialled
        through `relays`, peer to addresses, first choice first. Returns the peers that are dialled through us; the
        caller should know whether they are members."""

    async def put(self, key: str, body: dict[str, Any], *, ttl_s: float) -> bool:
        """Sign `body` and keep it under `key`, in our name, for `ttl_s`; whether at least one node stored it."""

    async def get(self, key: str) -> dict[PeerId, Record]:
        """All live valid records under `key`, the newest of each owner; junk is ignored and counted.

        What was seen once is kept until its own signed expiry, even if the network lost it sooner.
        """

    async def call(
        self,
        peer: PeerId,
        method: str,
        header: dict[str, Any],
        body: bytes = b"",
        *,
        timeout_s: float,
        addresses: Sequence[str] = (),
    ) -> Reply:
        """Ask `peer` and wait for its reply; after a failed dial, connect to `addresses` and try once more.

        Raises Unreachable (no answer, or not in time), Refused (with the peer's reason), IntegrityError (malformed).
        After Unreachable the peer may or may not have done what was asked: handlers must be idempotent.
        """

    def serve(self, method: str, handler: Handler) -> None:
        """Answer calls of `method`. A handler may raise Refused; any other exception is logged and reaches the
        caller as Refused with the reason "internal"."""

    async def connect(self, address: str, *, timeout_s: float) -> PeerId:
        """Dial a full multiaddr; raises ConfigError if it is malformed and Unreachable if nobody answers."""

    async def close(self) -> None:
        """Leave, and let go of everything; a second close does nothing."""

    def statistics(self) -> SwarmStatistics:
        """The figures so far."""
