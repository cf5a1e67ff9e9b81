"""One peer of one run, as the parts of a program see it: what it needs to look, to read, and to take part.

- An `Observer` looks: who lives, who leads, what the coordinator decreed.
- A `Reader` also fetches blobs, and keeps them in a store.
- A `Member` also says what it does, takes uploads, and keeps a history: a volunteer, or a seed node.

`ask` calls another peer, and `fetch`, `send` and `serve_store` move blobs between this peer's store and others'.
`fetch_in_time` is for what one stranger may have alone: it ends, whatever that peer does. `fetch_given` ends as well
when that peer gives next to nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from ..clock import Clock
from ..config import RoundsConfig
from ..errors import BlobMissing, IntegrityError, Unreachable
from ..program.history import History
from ..program.tasks import SingleFlight, as_long_as, in_time
from ..protocol.documents import BlobRef
from ..protocol.liveness import Heartbeat
from ..protocol.signing import PeerId
from ..swarm.api import Swarm
from ..swarm.blobs.blobs import send_blob, serve_blobs
from ..swarm.blobs.fetch import Ranges, fetch_blob
from ..swarm.calls import Request
from ..swarm.frames import THIN_BYTES_S
from .authority import Decrees, Mandates
from .invitations import Invitations
from .neighbourhood import Neighbourhood
from .presence import Presence
from .run import Run
from .store import Store
from .uploads import SLOW_BYTES_S, Uploads
from .watch import Watch

log = logging.getLogger(__name__)

R = TypeVar("R")

CALL_TIMEOUT_S = 20.0
"""A frozen peer answers nothing and refuses nothing, so every call needs an end of its own."""
CONTROL_TIMEOUT_S = 5.0
"""For answers that need no work and carry no tensors: a peer that waits for one cannot go on, and asks again."""
WAIT_S, LEAST_BYTES_S = 10.0, THIN_BYTES_S
"""A blob is waited for so long, and as long as this rate takes besides. The rate is a quarter of a home line of 1
Mbit/s: its author may be pushing to leaders, and giving the same blob to two judges and an auditor. The first seconds
are less than a call may take, so that whoever asked us for something small still hears that it is not to be had."""
SILENT_S = 60.0
"""So long one peer may give next to nothing of a blob that may take hours: three calls. On a thin line the first ranges
are too long to come in the time of a call, and the next ones are shorter."""


@dataclass(frozen=True, kw_only=True)
class Observer:
    """A peer that looks at a run."""

    run: Run
    swarm: Swarm
    clock: Clock
    mandates: Mandates
    decrees: Decrees
    watch: Watch

    @property
    def peer(self) -> PeerId:
        return self.swarm.peer


@dataclass(frozen=True, kw_only=True)
class Reader(Observer):
    """A peer that reads what others publish."""

    store: Store
    fetching: SingleFlight[bytes] = field(default_factory=SingleFlight)
    """Blobs on their way to us, by name, size and holders: what runs here side by side often wants the same ones."""


@dataclass(frozen=True, kw_only=True)
class Member(Reader):
    """A peer that takes part."""

    presence: Presence
    history: History
    uploads: Uploads
    invitations: Invitations
    admitting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a contribution is decoded to be judged: many may come at once, and each takes memory."""
    averaging: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a version is made or made again: of all modules here one at a time, for the same reason."""


def open_observer(run: Run, swarm: Swarm, clock: Clock, decrees: Decrees | None = None) -> Observer:
    """A look at `run` through `swarm`, its stage's own; what it learns is forgotten with it, but for `decrees`."""
    return Observer(run=run, swarm=swarm, clock=clock, **_authority(run, swarm, clock, None, decrees))


def open_reader(run: Run, swarm: Swarm, clock: Clock, store: Store) -> Reader:
    """The same, with mandates and decrees that are kept in `store`, as what is fetched is."""
    return Reader(run=run, swarm=swarm, clock=clock, store=store, **_authority(run, swarm, clock, store, None))


def open_member(
    run: Run,
    swarm: Swarm,
    clock: Clock,
    store: Store,
    *,
    heartbeat: Heartbeat | None = None,
    history: History | None = None,
    upload_bytes_max: int = 0,
    decrees: Decrees | None = None,
) -> Member:
    """One that takes part: `heartbeat` is what it says of itself once its presence runs, and others may upload blobs of
    `upload_bytes_max` bytes each; 0: none. `decrees` are those of the whole run; without, those that `store` keeps."""
    decrees = Decrees(run, store) if decrees is None else decrees
    parts = _authority(run, swarm, clock, store, decrees)
    heartbeat = Heartbeat(owns=False) if heartbeat is None else heartbeat
    return Member(
        run=run,
        swarm=swarm,
        clock=clock,
        store=store,
        presence=Presence(run, swarm, clock, heartbeat, parts["watch"].neighbourhood),
        history=History(None, clock) if history is None else history,
        uploads=Uploads(swarm, store, clock, size_max=upload_bytes_max),
        invitations=Invitations(run, decrees),
        **parts,
    )


def _authority(run: Run, swarm: Swarm, clock: Clock, store: Store | None, decrees: Decrees | None) -> dict[str, Any]:
    decrees = Decrees(run, store) if decrees is None else decrees
    decrees.tell(run)
    mandates = Mandates(run, store, is_banned=decrees.is_banned)
    watch = Watch(run, swarm, clock, mandates, decrees, Neighbourhood(run, swarm, clock))
    return {"decrees": decrees, "mandates": mandates, "watch": watch}


async def ask(node: Observer, peer: PeerId, request: Request[R], *, timeout_s: float = CALL_TIMEOUT_S) -> R:
    """Call `peer` at the addresses of its last heartbeat; raises as the call does."""
    return await request.call(node.swarm, peer, timeout_s=timeout_s, addresses=node.watch.addresses(peer))


async def fetch(
    node: Reader,
    ref: BlobRef,
    *,
    holders: Sequence[PeerId],
    keep: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    brought: Counter[PeerId] | None = None,
    wrong: list[Ranges] | None = None,
) -> bytes:
    """The blob, from our store or from `holders`; kept in the store on request. We may be one of these: our own work
    lies in another store that we serve. `brought` counts the bytes of each holder and `wrong` is as for `fetch_blob`,
    unless another caller fetches the same blob already, from these holders: from others it may never come. Raises
    BlobMissing, and IntegrityError."""
    try:
        data = await asyncio.to_thread(node.store.get, ref.digest)
    except IntegrityError as error:  # removed, so that it is fetched again
        log.warning("%s", error)
        data = None
    if data is None:
        if not holders:
            raise BlobMissing(f"nobody alive holds blob {ref.digest[:8]}")
        name = f"{ref.digest}.{ref.size}"
        is_beside = node.fetching.is_doing(name)  # two must not write to one file
        work = partial(
            fetch_blob,
            node.swarm,
            ref.digest,
            size=ref.size,
            holders=[(peer, node.watch.addresses(peer)) for peer in holders],
            partial=None if is_beside else node.store.partial_path(name),
            timeout_s=CALL_TIMEOUT_S,
            on_progress=on_progress,
            brought=brought,
            wrong=wrong,
        )
        data = await node.fetching.do(" ".join([name, *sorted(holders)]), work)
        if keep:
            await asyncio.to_thread(node.store.put, data)
    return data


async def fetch_in_time(
    node: Reader,
    ref: BlobRef,
    *,
    holders: Sequence[PeerId],
    keep: bool = False,
    brought: Counter[PeerId] | None = None,
) -> bytes:
    """As `fetch`, for what perhaps nobody has but the peer that names it. With one range in each call such a peer could
    be at it for ever; raises Unreachable when a thin line would have brought it. What came is kept for the next try."""
    fetching = fetch(node, ref, holders=holders, keep=keep, brought=brought)
    limit_s = WAIT_S + ref.size / LEAST_BYTES_S
    return await in_time(fetching, node.clock, limit_s, what=f"the blob {ref.digest[:8]}")


@dataclass(slots=True)
class Given:
    """What one peer has given of a blob, in the time that it was asked for it: also over several tries."""

    asked_s: float = 0.0
    came_bytes: int = 0

    def is_next_to_nothing(self, rounds: RoundsConfig) -> bool:
        """Whether that is less than any line of a volunteer brings, were it shared by thirty: so it is not the line."""
        return self.asked_s >= silent_s(rounds) and self.came_bytes < SLOW_BYTES_S * self.asked_s


def silent_s(rounds: RoundsConfig) -> float:
    """After what time to look how much came. Where no round waits for long, lines have to bring a path's work sooner,
    and whoever waits for what is said of it could not hear it later."""
    return min(SILENT_S, rounds.deadline_s / 2)


async def fetch_given(node: Reader, ref: BlobRef, given: Given, *, holders: Sequence[PeerId]) -> bytes:
    """As `fetch_in_time`, for what large states and payloads are asked for. On a thin line they would come long after
    everybody has stopped waiting; so whoever trickles one would never be found to have given nothing. Raises
    Unreachable also for that."""
    if node.fetching.is_doing(f"{ref.digest}.{ref.size}"):  # then what comes is counted by somebody else here
        return await fetch_in_time(node, ref, holders=holders)
    began_s, came_bytes, brought = node.clock.now_s() - given.asked_s, given.came_bytes, Counter[PeerId]()

    def note() -> None:
        given.asked_s, given.came_bytes = node.clock.now_s() - began_s, came_bytes + brought.total()

    def check() -> None:
        note()
        if given.is_next_to_nothing(node.run.config.rounds):
            message = f"only {given.came_bytes} bytes of the blob {ref.digest[:8]} came in {given.asked_s:.0f} s"
            raise Unreachable(message)

    try:
        return await as_long_as(check, partial(fetch_in_time, node, ref, holders=holders, brought=brought), node.clock)
    finally:
        note()


async def fetch_kept(node: Reader, ref: BlobRef, *, holders: Sequence[PeerId]) -> bytes:
    """As `fetch_in_time`, from the archives as well, and kept."""
    return await fetch_in_time(node, ref, holders=list(dict.fromkeys([*holders, *node.watch.seeds()])), keep=True)


async def send(
    node: Reader,
    peer: PeerId,
    data: bytes,
    *,
    digest: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Upload a blob to `peer`, from where an earlier try stopped; its `digest`, if that is known, is not taken again.
    Raises Unreachable or Refused."""
    await send_blob(
        node.swarm,
        peer,
        data,
        timeout_s=CALL_TIMEOUT_S,
        addresses=node.watch.addresses(peer),
        digest=digest,
        on_progress=on_progress,
    )


def serve_store(swarm: Swarm, *stores: Store) -> None:
    """Let anyone read our blobs; a blob is looked for in one store after the other."""

    def holding(name: str) -> Store:
        return next((store for store in stores if store.size(name) is not None), stores[0])

    serve_blobs(
        swarm,
        lambda name, *place: holding(name).read_range(name, *place),
        lambda name: holding(name).size(name),
    )
