"""A contribution, and what a leader says that refuses it; with documents.py, which gives them their signatures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..canonical import digest
from ..errors import ConfigError
from ..strict import bounded
from ..topology import ModuleId, PathId
from .bounds import VALUES_MAX, require_digest
from .signing import PeerId

REASON_CHARS_MAX = 32
"""Of a rejection's reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRef:
    """A blob by the digest of its exact bytes; `size` lets a reader refuse before it allocates."""

    digest: str
    size: int = bounded(low=0, high=VALUES_MAX)

    def __post_init__(self) -> None:
        require_digest(self.digest)

    @classmethod
    def of(cls, *parts: bytes | memoryview) -> BlobRef:
        return cls(digest=digest(*parts), size=sum(map(len, parts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One path's outer gradient for one module: the claim that `payload` came from training on `base`."""

    KIND: ClassVar[str] = "contribution"
    run: str
    module: ModuleId
    path: PathId
    base_version: int = bounded(low=0, high=VALUES_MAX)
    """The version of the module that the training started from."""
    base_digest: str
    sharding: int = bounded(0, low=0, high=VALUES_MAX)
    """The sharding whose shard was trained on; the size of that shard weighs in the average."""
    payload: BlobRef
    """The compressed outer gradient."""
    state: BlobRef | None = None
    """The path's inner state after these steps, which its author holds: who trains the path next goes on from it."""
    steps: int = bounded(low=1, high=VALUES_MAX)
    tokens: int = bounded(low=1, high=VALUES_MAX)
    """Tokens trained to make this; weighs in the average up to a full round's worth."""
    loss: float
    """Mean training loss over the steps, in nats per token; said by the trainer, used for display only."""
    author: PeerId

    def __post_init__(self) -> None:
        require_digest(self.run, self.base_digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A leader's note that it did not take a contribution, or could not count it: its word, and nobody else's. It names
    the whole contribution with its author's signature, so that no leader can invent one."""

    KIND: ClassVar[str] = "rejection"
    contribution: Contribution
    signature: str
    """Of the contribution's author."""
    reason: str
    """As the author was told: one of the reasons of admission, or `payload-lost`."""
    round: int = bounded(low=0, high=VALUES_MAX)
    """The open round; the version it publishes is one greater."""
    term: int = bounded(low=0, high=VALUES_MAX)
    author: PeerId
    """The leader."""

    def __post_init__(self) -> None:
        if len(self.reason) > REASON_CHARS_MAX or not self.reason.isprintable():
            raise ConfigError("a `reason` is one short word")
