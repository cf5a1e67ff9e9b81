"""`RunConfig`: what every participant of a run must share. Its canonical bytes are part of the run's fingerprint.

What only one machine chooses (device, folders, ports, corpus on disk) is not here: see peers/ and bootstrap/.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .errors import ConfigError
from .strict import bounded
from .topology import Topology

PROTOCOL_VERSION = 1
"""Raised when two versions of the program could misunderstand each other."""

PREFIX_TOKENS = 32
"""A document is routed by its first 32 tokens, and these count in no evaluation (DiPaCo section 2.4)."""


LEVELS_MAX = 16
"""Keeps a path's name, and with it a key of the DHT, short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelConfig:
    """One level of the grid: how many modules stand side by side, and what each of them holds."""

    modules: int = bounded(1, low=1, high=4096)
    blocks: int = bounded(0, low=0, high=1024)
    """Decoder blocks in each module of this level."""
    embedding: bool = False
    """Whether this level's modules hold the token embedding; exactly one level does."""
    head: bool = False
    """Whether this level's modules hold the final norm and the output head; exactly one level does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A path: a Llama-style decoder cut into levels."""

    vocab_size: int = bounded(2048, low=258, high=1_000_000)
    width: int = bounded(64, low=8, high=65_536)
    heads: int = bounded(2, low=1, high=1024)
    ffn_width: int = bounded(192, low=8, high=1_000_000)
    context: int = bounded(256, low=64, high=1_048_576)
    """Tokens in a training sequence."""
    rope_theta: float = bounded(10_000.0, low=1.0)
    norm_eps: float = bounded(1e-5, low=1e-12, high=1e-1)
    tied: bool = True
    """Whether the output head is the transposed embedding; then one level holds both."""
    levels: tuple[LevelConfig, ...] = (
        LevelConfig(modules=1, embedding=True, head=True),
        LevelConfig(modules=2, blocks=2),
        LevelConfig(modules=2, blocks=2),
    )

    def __post_init__(self) -> None:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ConfigError(f"a width of {self.width} cannot be split over {self.heads} heads of even size")
        if not 1 <= len(self.levels) <= LEVELS_MAX:
            raise ConfigError(f"a grid of {len(self.levels)} levels, but it must have from 1 to {LEVELS_MAX}")
        for part in ("embedding", "head"):
            count = sum(getattr(level, part) for level in self.levels)
            if count != 1:
                raise ConfigError(f"{count} levels say `{part} = true`, but exactly one must")
        if self.tied and not any(level.embedding and level.head for level in self.levels):
            message = "`tied = true` needs embedding and head in the same level"
            raise ConfigError(message, hint="set `tied = false`, or move them together")
        for number, level in enumerate(self.levels):
            if not (level.blocks or level.embedding or level.head):
                message = f"level {number} of the grid holds nothing"
                raise ConfigError(message, hint="give it `blocks`, the `embedding` or the `head`")
        if not any(level.blocks for level in self.levels):
            raise ConfigError("no level of the grid has blocks")

    @property
    def topology(self) -> Topology:
        return Topology(tuple(level.modules for level in self.levels))


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerConfig:
    """The inner loop of a path: AdamW on its own shard (DiPaCo sections 2.3 and 4)."""

    steps: int = bounded(30, low=1, high=1_000_000)
    """Inner steps per round: tau."""
    batch: int = bounded(8, low=1, high=65_536)
    """Sequences per step."""
    lr: float = bounded(3e-3, low=0.0, high=1.0)
    lr_min_ratio: float = bounded(0.1, low=0.0, high=1.0)
    """The cosine ends at this share of `lr`."""
    warmup_steps: int = bounded(20, low=0)
    """Steps over which the learning rate rises from 0, at the start of the whole run."""
    beta1: float = bounded(0.9, low=0.0, high=0.999999)
    beta2: float = bounded(0.95, low=0.0, high=0.999999)
    weight_decay: float = bounded(0.1, low=0.0, high=10.0)
    clip: float = bounded(1.0, low=1e-6)
    """Largest norm of a step's gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterConfig:
    """The outer step of a module: Nesterov on the averaged outer gradients (DiLoCo; DiPaCo section 2.7)."""

    lr: float = bounded(0.7, low=0.0, high=10.0)
    momentum: float = bounded(0.9, low=0.0, high=0.999999)
    norm_rule: str = bounded("sqrt", choices=("sqrt", "rda"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsConfig:
    """When a module's round closes, and how many rounds there are."""

    rounds: int = bounded(16, low=1, high=10_000_000)
    min_paths: int = bounded(1, low=1)
    """Paths that must be claimed before the first round starts."""
    quorum: float = bounded(0.5, low=0.0, high=1.0)
    """Share of the claimed paths through a module that must have contributed before a deadline may close its round."""
    deadline_s: float = bounded(120.0, low=0.1)
    """Seconds after a round's first contribution until it may close with a quorum."""
    grace_s: float = bounded(5.0, low=0.0)
    """Seconds that a round which reached its deadline still waits for the slowest."""
    staleness: int = bounded(1, low=0, high=1000)
    """How many versions behind the head a contribution's base may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessConfig:
    """How quickly a peer that went silent is given up."""

    heartbeat_ttl_s: float = bounded(15.0, low=0.5, high=3600.0)
    """A heartbeat and the claims that it renews expire after this long; they are sent three times as often."""
    settle_s: float = bounded(1.0, low=0.0, high=60.0)
    """Wait between writing a claim and reading who else claimed the path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything all participants must share; see docs/protocol.md for the fingerprint made from it."""

    name: str = "run"
    seed: int = bounded(0, low=0, high=2**31 - 1)
    pretrain_steps: int = bounded(200, low=0)
    """Inner steps of the one-path model before it is forked into the grid (the paper spent 27 % of its steps)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    inner: InnerConfig = field(default_factory=InnerConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    liveness: LivenessConfig = field(default_factory=LivenessConfig)

    def __post_init__(self) -> None:
        if not self.name.replace("-", "").replace("_", "").isalnum() or len(self.name) > 64:
            raise ConfigError(f"a run cannot be called `{self.name}`", hint="use up to 64 letters, digits, `-` and `_`")
        if self.model.context <= PREFIX_TOKENS * 2:
            raise ConfigError(
                f"a context of {self.model.context} leaves nothing to learn after the first {PREFIX_TOKENS} tokens"
            )
        min_paths, grid = self.rounds.min_paths, self.model.topology
        if min_paths > grid.path_count:
            raise ConfigError(f"`min_paths` is {min_paths}, but the grid {grid} has {grid.path_count} paths")

    @property
    def topology(self) -> Topology:
        return self.model.topology

    @property
    def total_steps(self) -> int:
        """Inner steps of one path over the whole run, for the learning-rate schedule."""
        return self.pretrain_steps + self.rounds.rounds * self.inner.steps
