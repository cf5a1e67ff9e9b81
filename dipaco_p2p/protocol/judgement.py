"""The coordinator's word on a round: the losses of all modules and paths on held-out text, as one signed document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..strict import bounded
from ..topology import ModuleId, PathId
from .bounds import VALUES_MAX, require_digest
from .signing import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLoss:
    """How well the paths through one module predict, at one round."""

    module: ModuleId
    digest: str
    """Of its version."""
    loss: float
    """Nats per token, on the validation sequences whose path goes through it."""
    tokens: int = bounded(low=1, high=VALUES_MAX)

    def __post_init__(self) -> None:
        require_digest(self.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathLoss:
    """How well one path predicts, at one round, what is routed to it; None where nothing is."""

    path: PathId
    loss: float | None
    holdout_loss: float | None
    """On what early stopping looks at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The losses of one round on held-out text, every sequence routed once. What the author measured: anybody can
    measure it again, from the versions that it names and the blobs that the manifest names."""

    KIND: ClassVar[str] = "judgement"
    run: str
    version: int = bounded(low=0, high=VALUES_MAX)
    """Of every module."""
    sharding: int = bounded(low=0, high=VALUES_MAX)
    """Whose router sent the sequences to their paths."""
    loss: float
    """Nats per token, of all of them."""
    tokens: int = bounded(low=1, high=VALUES_MAX)
    modules: tuple[ModuleLoss, ...]
    paths: tuple[PathLoss, ...]
    at_s: float = bounded(low=0.0, high=float(VALUES_MAX))
    """Unix time on the author's clock; for display and recent averages only."""
    author: PeerId

    def __post_init__(self) -> None:
        require_digest(self.run)
