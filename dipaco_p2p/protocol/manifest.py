"""The manifest of a stage: what the coordinator signs to open it.

A run has its stages one after the other: `warmup`, where all train the one-path model; `grid`, where the paths are
apart; and a `grid-2`, `grid-3` and so on after each growth (growth.py), which has more modules than the one before.
Each names the run's first stage as its `origin`, and begins where the stage before it ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .. import strict
from ..config import ADMISSIONS, RunConfig
from ..errors import ConfigError
from ..strict import bounded
from .references import BlobRef, GenesisRef, ShardRef
from .signing import VALUES_MAX, PeerId, require_digest, require_peers

STAGES = WARMUP, GRID, *_GROWN = ("warmup", "grid", *(f"grid-{number}" for number in range(2, 10)))
"""The names that stages have, in the order in which a run goes through them."""

WORKERS_MAX = 256
"""Of the stage before that a manifest names: those with the most works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One stage of a run. Its id is the fingerprint, so nothing in it can change without becoming another one."""

    KIND: ClassVar[str] = "manifest"
    protocol: int
    config: RunConfig
    """The whole run's, the same in all stages but for the levels' modules; `stage_config` is what holds in this one."""
    stage: str = bounded(choices=STAGES)
    origin: str = ""
    """Id of the run's first stage; empty for that stage itself."""
    follows: str = strict.added("")
    """Of a stage that grew: the id of the stage that it grew out of."""
    spent: int = strict.added(0, low=0, high=VALUES_MAX)
    """Of a stage that grew: the rounds of all grids before it, of those that the configuration gives the run."""
    admission: str = bounded(choices=ADMISSIONS)
    """The policy, as the configuration has it."""
    tokenizer: BlobRef
    router: BlobRef | None
    """None in the warm-up, where there is nothing to choose."""
    optimizer: BlobRef
    """AdamW's state at the stage's start: what a path starts from on a machine that has not trained it before."""
    shards: tuple[ShardRef, ...]
    validation: BlobRef
    """Held-out sequences, which every figure is about."""
    holdout: BlobRef
    """Held-out sequences that early stopping looks at."""
    router_split: BlobRef
    """Held-out sequences that paths score for a discriminative router."""
    genesis: tuple[GenesisRef, ...]
    workers: tuple[PeerId, ...] = strict.added(())
    """Whose work the last versions of the stage before count, in order, at most WORKERS_MAX: from the first round on
    they measure and repeat others' work, and lead before strangers do."""
    author: PeerId
    """The coordinator: the peer whose signature opens the run."""

    def __post_init__(self) -> None:
        require_digest(*filter(None, [self.origin, self.follows]))
        require_peers(*map(PeerId, self.config.admission.peers), *self.workers)
        if len(self.workers) > WORKERS_MAX or list(self.workers) != sorted(set(self.workers)):
            raise ConfigError(f"`workers` are at most {WORKERS_MAX} peers, in order")
        if self.admission != self.config.admission.policy:
            raise ConfigError(f"`admission` is {self.admission}, but {self.config.admission.policy} in the config")
        if (self.stage == WARMUP) != (self.router is None) or (self.stage == WARMUP and self.origin):
            raise ConfigError("a warm-up has neither router nor origin, and a grid has a router")
        self._check_growth()
        topology = self.stage_config.topology
        if [ref.module for ref in self.genesis] != list(topology.modules()):
            raise ConfigError("the manifest's genesis does not list the grid's modules in order")
        has_all = len(self.shards) == topology.path_count  # which may be half a million, in a small document
        if not has_all or [ref.path for ref in self.shards] != list(topology.paths()):
            raise ConfigError("the manifest's shards do not list the grid's paths in order")

    def _check_growth(self) -> None:
        marks = [bool(self.follows), bool(self.spent), *(ref.state is not None for ref in self.genesis)]
        if marks != [self.is_grown] * len(marks) or (self.is_grown and not self.origin):
            message = "a stage that grew names its origin, what it grew out of, rounds spent and all outer states"
            raise ConfigError(f"{message}, and no other stage does")
        if self.spent >= self.config.rounds.rounds:
            raise ConfigError(f"{self.spent} rounds are spent of {self.config.rounds.rounds}: the run is over")

    @property
    def is_grown(self) -> bool:
        """Whether this stage came of a growth."""
        return self.stage in _GROWN

    @property
    def before(self) -> str:
        """Id of the stage before this one; empty for the first."""
        return self.follows or self.origin

    @property
    def stage_config(self) -> RunConfig:
        """The configuration as this stage follows it."""
        return self.config.for_warmup() if self.stage == WARMUP else self.config.after(self.spent)

    @property
    def first_step(self) -> int:
        """Inner steps that a path has behind it when this stage begins, for the learning-rate schedule."""
        return 0 if self.stage == WARMUP else self.config.warmup_steps + self.spent * self.config.inner.steps
