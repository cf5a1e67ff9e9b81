"""A round's inner steps on one path, once they are done: what they began from, and what came of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from dipaco_p2p.core.inner import InnerResult
from dipaco_p2p.protocol.documents import ModuleVersion
from dipaco_p2p.topology import ModuleId

from .trainer import Flat


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The version of a module that a contribution is based on."""

    module: ModuleId
    version: int
    digest: str

    @classmethod
    def of(cls, version: ModuleVersion) -> Self:
        return cls(module=version.module, version=version.version, digest=version.digest)

    @classmethod
    def parent_of(cls, version: ModuleVersion) -> Self:
        return cls(module=version.module, version=version.version - 1, digest=version.parent)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """The inner steps of one round of a path."""

    round_number: int
    before: Sequence[Flat]
    """What they began from, one flat vector per level: the modules as the path goes on from them, or an estimate."""
    bases: Sequence[Base]
    """The versions that this stands for, in the same order; empty while they are not there yet."""
    result: InnerResult
    sharding: int
    """The number of the sharding whose shard was trained on."""
    is_cut: bool
    """Whether they ended early, for the push to be in time."""
    began_s: float
    """When, by the node's clock."""
    training_s: float
    """How long they took."""
