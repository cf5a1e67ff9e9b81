"""What documents name instead of containing it: a blob by its digest, a path's shard, a module's genesis, one module's
part of a round of inner steps, and what it takes to repeat them."""

from __future__ import annotations

from dataclasses import dataclass

from ..canonical import digest
from ..errors import ConfigError
from ..strict import added, bounded
from ..topology import ModuleId, PathId
from .signing import VALUES_MAX, require_digest

REPLICAS_MAX = 4096


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
class ShardRef:
    """The shard of one path, as a blob of token ids."""

    path: PathId
    blob: BlobRef
    sequences: int = bounded(low=1, high=VALUES_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenesisRef:
    """Version 0 of one module."""

    module: ModuleId
    blob: BlobRef
    state: BlobRef | None = added(None)
    """Its outer state, in a stage that grew: its parent's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One module's part of a round of inner steps: where they began, and the outer gradient that they came to."""

    base_digest: str
    payload: BlobRef

    def __post_init__(self) -> None:
        require_digest(self.base_digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What else it takes to repeat the inner steps of one round: with the parts of its work, its shard and the state
    that it left behind, anybody gets the same outer gradients, as far as machines compute alike."""

    round: int = bounded(low=0, high=VALUES_MAX)
    """Of the run's schedule."""
    place: int = bounded(low=0, high=REPLICAS_MAX - 1)
    """Which part of the shard, of as many as the path has replicas."""
    replicas: int = bounded(low=1, high=REPLICAS_MAX)
    start: BlobRef | None = None
    """The path's inner state before these steps; None for that of the stage's start."""
    since: int = bounded(0, low=0, high=VALUES_MAX)
    """A version that counts `start` follows this one: a state that no chain names proves nothing."""

    def __post_init__(self) -> None:
        if self.place >= self.replicas:
            raise ConfigError(f"there is no part {self.place} of {self.replicas}")
