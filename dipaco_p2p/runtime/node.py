"""What every part of a running peer needs, built once by the program and passed down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..clock import Clock
from ..protocol.signing import PeerId
from ..swarm.api import Swarm
from .history import History
from .presence import Presence
from .run import Run
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

    @property
    def peer(self) -> PeerId:
        return self.swarm.peer
