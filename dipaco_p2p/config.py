"""`RunConfig`: what every participant of a run must share. Its canonical bytes are part of the run's fingerprint.

What only one machine chooses (device, folders, ports, corpus on disk) is not here: see peers/ and bootstrap/.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from . import __version__
from .errors import ConfigError, WrongRun
from .strict import added, bounded
from .topology import ModuleId, Topology

PROTOCOL_VERSION = 20
"""Raised when two versions of the program could misunderstand each other."""
SHARES_MAX = 384
"""Contributions that one version of a module counts at most: each takes up to 500 bytes of its document."""
KEEPERS = 3
"""Volunteers that keep each range of old versions (protocol/keeping.py)."""
PACKAGE = "dipaco-p2p"
NEWER_HINT = f"it is newer; upgrade this program: uv tool upgrade {PACKAGE}, pipx upgrade {PACKAGE}, or git pull"
OLDER_HINT = f"it is older; install the version that its coordinator names, such as: pip install '{PACKAGE}==VERSION'"

PREFIX_TOKENS = 32
"""A document is routed by its first 32 tokens, and these count in no evaluation (DiPaCo section 2.4)."""
COUNT_BUCKETS_MAX = 1024
"""Where routers count tokens, a larger vocabulary shares this many buckets: each costs one weight per path."""
UPLINKS = ("int8", "int4", "int2", "ternary640", "ternary320", "ternary160", "top128")
"""The codecs (core/outer/compress.py) that outer gradients may be sent in."""
DOWNLINKS = ("int8", "int4", "int2")
"""Those for updates: one that leaves most values out would leave the followers behind."""

OPTIMIZERS = ADAMW, MUON = "adamw", "muon"
"""Of the inner steps (core/model/optimizer.py)."""

ADMISSIONS = OPEN, INVITE, LIST = "open", "invite", "list"
"""Whose work a run takes: anybody's; that of the invited; that of those on a list."""
LISTED_MAX = 1024
"""Peers on a run's list: about 55 bytes of the manifest each."""

LEVELS_MAX = 16
"""Keeps a path's name, and with it a key of the DHT, short."""
MODULES_MAX = 4096
"""In one level; also the most paths of a grid with private levels."""


def check_protocol(said: int, *, who: str, ours: int = PROTOCOL_VERSION) -> None:
    """Raise WrongRun unless the protocol that `who` speaks is ours."""
    if said != ours:
        message = f"{who} speaks protocol {said}, this program ({PACKAGE} {__version__}) speaks {ours}"
        raise WrongRun(message, hint=NEWER_HINT if said > ours else OLDER_HINT)


def count_buckets(vocab_size: int) -> int:
    """Buckets in which a router counts the tokens of a vocabulary."""
    return min(vocab_size, COUNT_BUCKETS_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelConfig:
    """One level of the grid: how many modules stand side by side, and what each of them holds."""

    modules: int = bounded(1, low=1, high=MODULES_MAX)
    """How many modules stand side by side; 1 is shared by all paths, and a path takes one module of each level."""
    private: bool = False
    """One module for each path, in place of `modules` (DiPaCo's path-specific modules)."""
    blocks: int = bounded(0, low=0, high=1024)
    """Decoder blocks in each module of this level."""
    embedding: bool = False
    """Whether this level's modules hold the token embedding; exactly one level does."""
    head: bool = False
    """Whether this level's modules hold the final norm and the output head; exactly one level does."""

    def __post_init__(self) -> None:
        if self.private and self.modules != 1:
            message = f"a private level with `modules = {self.modules}`: it has one module for each path"
            raise ConfigError(message, hint="leave `modules` out, or take `private` away")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A path: a Llama-style decoder cut into levels."""

    vocab_size: int = bounded(2048, low=258, high=1_000_000)
    """Size of the tokenizer that is trained on the corpus."""
    width: int = bounded(64, low=8, high=65_536)
    """Size of the hidden state: numbers per token."""
    heads: int = bounded(2, low=1, high=1024)
    """Attention heads; `width` divided by `heads` must be even."""
    ffn_width: int = bounded(192, low=8, high=1_000_000)
    """Inner width of a block's feed-forward part."""
    context: int = bounded(256, low=64, high=1_048_576)
    """Tokens in a training sequence."""
    rope_theta: float = bounded(10_000.0, low=1.0)
    """Base of the rotary positions."""
    norm_eps: float = bounded(1e-5, low=1e-12, high=1e-1)
    """Keeps RMSNorm from dividing by zero."""
    paths: int = bounded(0, low=0, high=MODULES_MAX)
    """How many paths there are, if every level is private (the flat mixture); otherwise it follows from the levels."""
    tied: bool = True
    """Whether the output head is the transposed embedding; then one level holds both."""
    levels: tuple[LevelConfig, ...] = (
        LevelConfig(modules=1, embedding=True, head=True),
        LevelConfig(modules=2, blocks=2),
        LevelConfig(modules=2, blocks=2),
    )

    def __post_init__(self) -> None:
        if self.width % self.heads or (self.width // self.heads) % 2:
            message = f"a width of {self.width} cannot be split over {self.heads} heads of even size"
            raise ConfigError(message, hint=f"make `width` a multiple of {2 * self.heads}, or change `heads`")
        if not 1 <= len(self.levels) <= LEVELS_MAX:
            raise ConfigError(f"a grid of {len(self.levels)} levels, but it must have from 1 to {LEVELS_MAX}")
        for part in ("embedding", "head"):
            count = sum(getattr(level, part) for level in self.levels)
            if count != 1:
                raise ConfigError(f"{count} levels have `{part} = true`, but exactly one must")
        if self.tied and not any(level.embedding and level.head for level in self.levels):
            message = "`tied = true` needs embedding and head in the same level"
            raise ConfigError(message, hint="set `tied = false`, or move them together")
        for number, level in enumerate(self.levels):
            if not (level.blocks or level.embedding or level.head):
                message = f"level {number} of the grid holds nothing"
                raise ConfigError(message, hint="give it `blocks`, the `embedding` or the `head`")
        if not any(level.blocks for level in self.levels):
            raise ConfigError("no level of the grid has blocks", hint="give at least one level `blocks`")
        self._check_paths()

    @property
    def path_count(self) -> int:
        shared = [level.modules for level in self.levels if not level.private]
        return math.prod(shared) if shared else self.paths

    @property
    def topology(self) -> Topology:
        private = tuple(level.private for level in self.levels)
        widths = tuple(self.path_count if level.private else level.modules for level in self.levels)
        return Topology(widths, private if any(private) else ())

    def one_path(self) -> ModelConfig:
        """The same path without a grid around it: every level has one module."""
        levels = tuple(replace(level, modules=1, private=False) for level in self.levels)
        return replace(self, levels=levels, paths=0)

    def _check_paths(self) -> None:
        private = [level.private for level in self.levels]
        if all(private) and not self.paths:
            message = "every level is private, so nothing says how many paths there are"
            raise ConfigError(message, hint="set it in [model], as in `paths = 4`")
        if self.paths and not all(private):
            raise ConfigError(f"`paths = {self.paths}`, but the levels make {self.path_count}", hint="leave it out")
        if any(private) and self.path_count > MODULES_MAX:
            raise ConfigError(f"a private level of {self.path_count} modules; at most {MODULES_MAX} are possible")


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerConfig:
    """The inner loop of a path on its own shard (DiPaCo sections 2.3 and 4)."""

    steps: int = bounded(30, low=1, high=1_000_000)
    """Inner steps per round: tau."""
    batch: int = bounded(8, low=1, high=65_536)
    """Sequences per step."""
    lr: float = bounded(3e-3, low=0.0, high=1.0)
    """The highest learning rate."""
    lr_min_ratio: float = bounded(0.1, low=0.0, high=1.0)
    """The cosine ends at this share of `lr`."""
    warmup_steps: int = bounded(20, low=0)
    """Steps over which the learning rate rises from 0, at the start of the whole run."""
    beta1: float = bounded(0.9, low=0.0, high=0.999999)
    """AdamW's decay of the mean gradient."""
    beta2: float = bounded(0.95, low=0.0, high=0.999999)
    """AdamW's decay of the mean squared gradient."""
    weight_decay: float = bounded(0.1, low=0.0, high=10.0)
    """Decoupled weight decay, times the learning rate in each step."""
    clip: float = bounded(1.0, low=1e-6)
    """Largest norm of a step's gradient."""
    optimizer: str = added(ADAMW, choices=OPTIMIZERS)
    """`adamw`; or `muon`, torch's own from 2.9 on, for the matrices inside the blocks, and AdamW for the rest; `lr` and
    `weight_decay` are those of both, `beta1` and `beta2` AdamW's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterConfig:
    """The outer step of a module: Nesterov on the averaged outer gradients (DiLoCo; DiPaCo section 2.7)."""

    lr: float = bounded(0.7, low=0.0, high=10.0)
    """How far an outer step goes; 1 is the whole way to the average."""
    momentum: float = bounded(0.9, low=0.0, high=0.999999)
    """Nesterov momentum of the outer steps."""
    norm_rule: str = bounded("sqrt", choices=("sqrt", "rda", "mean"))
    """`sqrt`: the mean times sqrt(number of paths); `rda`: mean of norms times mean of directions; or `mean`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionConfig:
    """How outer gradients and updates are compressed; docs/performance.md says what each codec costs."""

    uplink: str = bounded("int4", choices=UPLINKS)
    """Codec of outer gradients: `int8`, `int4` or `int2`, so many bits a value; or of each 4096 values the largest 640,
    320 or 160 by their signs, `ternary640` and so on, or 128 in 2 bits, `top128`."""
    downlink: str = bounded("int4", choices=DOWNLINKS)
    """Codec of the updates from one version of a module to the next: `int8`, `int4` or `int2`."""
    error_decay: float = bounded(1.0, low=0.0, high=1.0)
    """Share of what a round could not send that the next one tries to send again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupConfig:
    """The first stage: all volunteers train the one-path model together (DiLoCo), then it is forked into the grid."""

    rounds: int = bounded(7, low=0, high=10_000_000)
    """0: no warm-up, the grid starts from random weights (the paper spent 27 % of its steps on the warm-up)."""
    outer: OuterConfig = OuterConfig(lr=1.0, momentum=0.0, norm_rule="mean")
    """Plain averaging. Replicas draw from the same text, so their outer gradients agree, and `sqrt` would make too long
    a step of them; so does momentum, while the weights are still near random and every round is few steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """Which sequences each path trains on (DiPaCo section 2.4)."""

    first: str = bounded("kmeans", choices=("kmeans", "product", "tiny"))
    """The first sharding, by features alone; `product`: one k-means per level, each on its own part of them; `tiny`:
    by a unigram language model per path (core/routing/unigram.py). Routers then look at the first tokens, too."""
    reshard_rounds: tuple[int, ...] = bounded((), low=1, high=10_000_000)
    """Before these rounds all paths score the router split, a router is fitted on who was best, and the text is
    sharded again. One equal to `rounds` gives the routers that the finished run is served with."""
    balance: str = bounded("equal", choices=("equal", "match"))
    """Shards after a re-sharding: of `equal` size, or `match`: in proportion to how often each path was best."""
    overlap: int = bounded(1, low=1, high=64)
    """Each sequence is trained on by this many of its best paths; evaluated by the best one only."""

    @property
    def has_counts(self) -> bool:
        """Whether a document's features tell how often each token is among its first ones."""
        return self.first == "tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsConfig:
    """When a module's round closes, and how many rounds there are."""

    rounds: int = bounded(16, low=1, high=10_000_000)
    """Outer steps of every module."""
    min_paths: int = bounded(1, low=1)
    """Paths that must be claimed before the first round starts."""
    quorum: float = bounded(0.5, low=0.0, high=1.0)
    """Share of the claimed paths through a module that must have contributed before a deadline may close its round."""
    deadline_s: float = bounded(120.0, low=0.1)
    """Seconds after the last path that came until a round may close with a quorum: at the most, and at first. Leaders
    learn from earlier rounds how long volunteers take, and wait about twice that (protocol/rounds.py)."""
    grace_s: float = bounded(5.0, low=0.0)
    """Seconds that a round which reached its deadline still waits for the slowest; longer while bytes of an upload
    arrive, at most one more deadline."""
    staleness: int = bounded(1, low=0, high=1000)
    """How many versions behind the head a contribution's base may be."""
    owners: int = bounded(3, low=1, high=9)
    """Peers that own a module together: a leader, and mirrors that can go on where it stops."""
    overlap: bool = False
    """Whether a path's next inner steps begin while its outer gradients and the next versions are on their way, from an
    estimate of these (core/outer/outer_step.py)."""
    contributions_max: int = added(SHARES_MAX, low=1, high=SHARES_MAX)
    """How many contributions a version counts at most: each comes over the line of every owner of the module."""

    @property
    def versions_kept(self) -> int:
        """Of how many of a module's newest versions its owners keep the parameters."""
        return self.staleness + 2

    @property
    def unsigned_usual(self) -> int:
        """How many versions of a module may wait for the coordinator's signature while it is there."""
        return self.staleness + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessConfig:
    """How quickly a peer that went silent is given up."""

    heartbeat_ttl_s: float = bounded(15.0, low=0.5, high=3600.0)
    """A heartbeat and the claims that it renews expire after this long; they are sent three times as often."""
    settle_s: float = bounded(1.0, low=0.0, high=60.0)
    """Wait between writing a claim and reading who else claimed the path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """Whose work the run takes. In any case, all who have the ticket can read and watch the run."""

    policy: str = bounded(OPEN, choices=ADMISSIONS)
    """`open`: anybody's; `invite`: of those whom the coordinator invited, or a volunteer in good standing did; `list`:
    of `peers`."""
    peers: tuple[str, ...] = bounded((), items=LISTED_MAX)
    """With `list`: the peer ids of the volunteers, as `dipaco-peer identity show` prints them."""

    def __post_init__(self) -> None:
        if (self.policy == LIST) != bool(self.peers):
            hint = "name them in `peers`" if self.policy == LIST else 'leave `peers` out, or say `policy = "list"`'
            message = f"a policy of `{self.policy}` with {len(self.peers) or 'no'} peers on the list of [admission]"
            raise ConfigError(message, hint=hint)
        if len(set(self.peers)) < len(self.peers):
            raise ConfigError("a peer is on the list of [admission] twice", hint="name each peer once")


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgingConfig:
    """Whether other peers measure work before it counts (the loss gate)."""

    judges: int = bounded(2, low=0, high=8)
    """How many peers measure each work; where they differ, so does the coordinator's seed node. 0: nobody does."""
    sequences: int = bounded(32, low=8, high=256)
    """Sequences of the path's shard that a judge measures it on."""
    audited: int = bounded(10, low=0, high=1000)
    """How many of an author's first works another peer repeats before they count; later ones are repeated with a chance
    that falls to 2 %. 0: no work is; nor with `overlap`, whose steps begin from an estimate that no other peer has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything all participants must share; see docs/protocol.md for the fingerprint made from it."""

    name: str = "run"
    """Letters, digits, - and _."""
    seed: int = bounded(0, low=0, high=2**31 - 1)
    """Decides initial weights, shards, and the order of batches."""
    model: ModelConfig = field(default_factory=ModelConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    inner: InnerConfig = field(default_factory=InnerConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    admission: AdmissionConfig = added(AdmissionConfig())
    judging: JudgingConfig = added(JudgingConfig(judges=0))

    def __post_init__(self) -> None:
        bare = self.name.replace("-", "").replace("_", "")
        if not (bare.isascii() and bare.isalnum()) or len(self.name) > 64:  # a ticket holds only ASCII
            hint = "use up to 64 of the letters a to z and A to Z, digits, `-` and `_`"
            raise ConfigError(f"a run cannot be called `{self.name}`", hint=hint)
        if self.model.context <= PREFIX_TOKENS * 2:
            raise ConfigError(
                f"a context of {self.model.context} leaves nothing to learn after the first {PREFIX_TOKENS} tokens"
            )
        min_paths, grid = self.rounds.min_paths, self.model.topology
        if min_paths > grid.path_count:
            raise ConfigError(f"`min_paths` is {min_paths}, but the grid {grid} has {grid.path_count} paths")
        shared = grid.path_count // min(grid.widths)
        if shared > self.rounds.contributions_max:
            hint = "give that level more modules, or the grid fewer paths"
            hint += "" if self.rounds.contributions_max == SHARES_MAX else ", or raise `contributions_max` in [rounds]"
            raise ConfigError(f"{shared} paths go through one module, limit {self.rounds.contributions_max}", hint=hint)
        self._check_routing()

    @property
    def topology(self) -> Topology:
        return self.model.topology

    def places(self, module: ModuleId) -> int:
        """How many contributions of one path a version of `module` counts at most."""
        return self.rounds.contributions_max // (self.topology.path_count // self.topology.widths[module.level])

    @property
    def places_min(self) -> int:
        """Of the modules of any path, the least: each has one of each level."""
        return min(self.places(ModuleId(level, 0)) for level in range(len(self.topology.widths)))

    @property
    def audited(self) -> int:
        """How many first works of each author are repeated in this run; 0: audits are off."""
        return self.judging.audited if self.judging.judges and not self.rounds.overlap else 0

    @property
    def feature_width(self) -> int:
        """Of the features that a router of documents takes."""
        return self.model.width + (count_buckets(self.model.vocab_size) if self.routing.has_counts else 0)

    @property
    def total_steps(self) -> int:
        """Inner steps of one path over the whole run, for the learning-rate schedule."""
        return self.warmup_steps + self.rounds.rounds * self.inner.steps

    @property
    def warmup_steps(self) -> int:
        """Inner steps of the warm-up."""
        return self.warmup.rounds * self.inner.steps

    def for_warmup(self) -> RunConfig:
        """What holds during the warm-up: one path, its own number of rounds, its own outer step."""
        return replace(
            self,
            model=self.model.one_path(),
            outer=self.warmup.outer,
            rounds=replace(self.rounds, rounds=max(self.warmup.rounds, 1), min_paths=1),
            routing=RoutingConfig(),
        )

    def after(self, rounds: int) -> RunConfig:
        """What holds in a grid that begins when the run has gone through this many rounds."""
        if not rounds:
            return self
        marks = tuple(mark - rounds for mark in self.routing.reshard_rounds if mark > rounds)
        return replace(
            self,
            rounds=replace(self.rounds, rounds=self.rounds.rounds - rounds),
            routing=replace(self.routing, reshard_rounds=marks),
        )

    def grown(self, widths: Sequence[int]) -> RunConfig:
        """The same with so many modules in each level; raises ConfigError unless the grid grows so."""
        now = self.topology
        if any(level.private for level in self.model.levels):
            raise ConfigError("a grid with private levels cannot grow", hint="begin another run, from a checkpoint")
        if len(widths) != len(now.widths):
            hint = f"name all of them, as in {','.join(map(str, now.widths))}: levels are never added"
            raise ConfigError(f"{len(widths)} levels, but the run has {len(now.widths)}", hint=hint)
        for level, (width, found) in enumerate(zip(widths, now.widths, strict=True)):
            if not found <= width <= MODULES_MAX:
                hint = f"no level loses a module, and none has more than {MODULES_MAX}"
                raise ConfigError(f"level {level} has {found} modules, and cannot have {width}", hint=hint)
        if tuple(widths) == now.widths:
            raise ConfigError(f"the grid is {now} already", hint="give at least one level more modules")
        levels = (replace(level, modules=width) for level, width in zip(self.model.levels, widths, strict=True))
        return replace(self, model=replace(self.model, levels=tuple(levels)))

    def _check_routing(self) -> None:
        rounds, paths = self.routing.reshard_rounds, self.model.path_count
        if list(rounds) != sorted(set(rounds)):
            raise ConfigError(f"`reshard_rounds` is {list(rounds)}, but must rise")
        if rounds and rounds[-1] > self.rounds.rounds:
            message = f"`reshard_rounds` ends with {rounds[-1]}, but the run ends after round {self.rounds.rounds}"
            raise ConfigError(message)
        if self.routing.overlap > paths:
            raise ConfigError(f"`overlap` is {self.routing.overlap}, but there are {paths} paths")
