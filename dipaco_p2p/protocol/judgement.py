"""The losses of a round on held-out text: the coordinator's judgement, and volunteers' checks of it.

- A check says what was measured, never whether the coordinator says the same: its reader compares.
- Two machines that add floats in another order agree within `TOLERANCE_NATS`; greater differences are shown.
- An evaluator is independent of a path's loss if it is not the coordinator and no version of the path's modules counts
  a contribution of this path by it. Whether it has an owner of its own, nobody knows: ids cost nothing
  (docs/security.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..strict import bounded
from ..topology import ModuleId, PathId
from .signing import VALUES_MAX, PeerId, require_digest


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


TOLERANCE_NATS = 2e-3
"""Of a path's loss in nats per token. The order of float32 sums moves it by less than 1e-5, bfloat16 parts of a GPU's
float32 (TF32) by some 1e-4; a document between two paths that another machine routes the other way by up to 1e-3."""

OF_PATH_MAX = 16
"""Checks of one path at one round that a seed node keeps."""
OF_STRANGERS_MAX = 4
"""Of those, by peers of whose work no version counts anything: such a peer costs nobody anything."""
IN_ALL_MAX = 100_000
"""Checks of one stage that a seed node or a leaderboard keeps; of strangers half of that."""
OF_AUTHOR_MAX = 16
"""Checks of one round by one peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """How well one path predicts, at one round, as a peer other than the coordinator has measured it."""

    KIND: ClassVar[str] = "check"
    run: str
    version: int = bounded(low=0, high=VALUES_MAX)
    """Of every module of the path."""
    path: PathId
    modules: tuple[str, ...]
    """Digests of the versions that were composed, from the first level on."""
    sharding: int = bounded(low=0, high=VALUES_MAX)
    """Whose router chose the sequences."""
    validation: str
    """Digest of the held-out sequences."""
    nats: float = bounded(low=0.0, high=float(VALUES_MAX))
    """Of all tokens together."""
    tokens: int = bounded(low=1, high=VALUES_MAX)
    at_s: float = bounded(low=0.0, high=float(VALUES_MAX))
    """Unix time on the author's clock; for display only."""
    author: PeerId

    def __post_init__(self) -> None:
        require_digest(self.run, self.validation, *self.modules)

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens


def agrees(ours: float, theirs: float) -> bool:
    """Whether two losses, in nats per token, can be of one measurement made twice."""
    return abs(ours - theirs) <= TOLERANCE_NATS


def is_about(check: Check, judgement: Judgement, *, validation: str) -> bool:
    """Whether a check measured what the judgement of its round is about: these versions, on this text, routed alike."""
    digests = {found.module: found.digest for found in judgement.modules}
    modules = check.path.modules()
    return (
        (check.run, check.version, check.validation) == (judgement.run, judgement.version, validation)
        and check.sharding == judgement.sharding
        and len(check.modules) == len(modules)
        and all(digests.get(module) == digest for module, digest in zip(modules, check.modules, strict=True))
        and check.tokens <= judgement.tokens
    )
