"""One peer of one run, as the parts of a program see it: what it needs to look, to read, and to take part.

- An `Observer` looks: who lives, who leads, what the coordinator decreed.
- A `Reader` also fetches blobs, and keeps them in a store.
- A `Member` also says what it does, takes uploads, and keeps a history: a volunteer, or a seed node.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from ..clock import Clock
from ..program.history import History
from ..program.tasks import SingleFlight
from ..protocol.liveness import Heartbeat
from ..protocol.signing import PeerId
from ..swarm.api import Swarm
from .authority import Decrees, Mandates
from .run import Run
from .store import Store, Uploads
from .watch import Presence, Watch

CALL_TIMEOUT_S = 20.0
"""A frozen peer answers nothing and refuses nothing, so every call needs an end of its own."""
CONTROL_TIMEOUT_S = 5.0
"""For answers that need no work and carry no tensors: who waits for one cannot go on, and asks again."""


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
    """Blobs on their way to us, by digest: a trainer and a mirror of one module want the same ones at the same time."""


@dataclass(frozen=True, kw_only=True)
class Member(Reader):
    """A peer that takes part."""

    presence: Presence
    history: History
    uploads: Uploads
    admitting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a contribution is decoded to be judged: many may come at once, and each takes memory."""
    averaging: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a version is made or made again: of all modules here one at a time, for the same reason."""


def open_observer(run: Run, swarm: Swarm, clock: Clock) -> Observer:
    """A look at `run` through `swarm`, its stage's own; what it learns is forgotten with it."""
    return Observer(run=run, swarm=swarm, clock=clock, **_authority(run, swarm, clock, None, None))


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
    return Member(
        run=run,
        swarm=swarm,
        clock=clock,
        store=store,
        presence=Presence(run, swarm, clock, Heartbeat(owns=False) if heartbeat is None else heartbeat),
        history=History(None, clock) if history is None else history,
        uploads=Uploads(swarm, store, clock, size_max=upload_bytes_max),
        **_authority(run, swarm, clock, store, decrees),
    )


def _authority(run: Run, swarm: Swarm, clock: Clock, store: Store | None, decrees: Decrees | None) -> dict[str, Any]:
    decrees = Decrees(run, store) if decrees is None else decrees
    mandates = Mandates(run, store, is_banned=decrees.is_banned)
    return {"decrees": decrees, "mandates": mandates, "watch": Watch(run, swarm, clock, mandates, decrees)}
