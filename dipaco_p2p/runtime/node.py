"""What every part of a running peer needs, built once by the program and passed down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..clock import Clock
from ..protocol.signing import PeerId
from ..swarm.api import Swarm
from .history import History
from .presence import Presence
from .run import Run
from .shared import Shared
from .store import Store
from .watch import Watch

CALL_TIMEOUT_S = 20.0
"""A frozen peer answers nothing and refuses nothing, so every call needs an end of its own."""
CONTROL_TIMEOUT_S = 5.0
"""For answers that need no work and carry no tensors: who waits for one cannot go on, and asks again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One peer of one run."""

    run: Run
    swarm: Swarm
    store: Store
    clock: Clock
    watch: Watch
    presence: Presence
    history: History
    keep_upload: Callable[[str], None] = lambda digest: None
    """Tells that a contribution or version names this blob, so that an upload of it stays: `Uploads.claim`."""
    uploads_s: Mapping[PeerId, float] = field(default_factory=dict)
    """When bytes of an unfinished upload to us last came, by sender: `Uploads.progress_s`."""
    admitting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a contribution is decoded to be judged: many may come at once, and each takes memory."""
    averaging: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a version is made or made again: of all modules here one at a time, for the same reason."""

    fetching: Shared[bytes] = field(default_factory=Shared)
    """Blobs on their way to us, by digest: a trainer and a mirror of one module want the same ones at the same time."""

    @property
    def peer(self) -> PeerId:
        return self.swarm.peer
