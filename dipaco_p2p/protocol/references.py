"""What documents name instead of containing it: a blob by its digest, a path's shard, a module's genesis, and one
module's part of a training step."""

from __future__ import annotations

from dataclasses import dataclass

from ..canonical import digest
from ..strict import bounded
from ..topology import ModuleId, PathId
from .signing import VALUES_MAX, require_digest


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One module's part of a round of inner steps: where they began, and the outer gradient that they came to."""

    base_digest: str
    payload: BlobRef

    def __post_init__(self) -> None:
        require_digest(self.base_digest)
