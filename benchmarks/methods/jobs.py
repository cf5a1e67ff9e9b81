"""What one training run of the experiment is. A job is a value: its fields decide its result, and name it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from dipaco_p2p.config import ADAMW, InnerConfig, LevelConfig, ModelConfig
from dipaco_p2p.strict import plain

VOCAB_SIZE = 1024
CONTEXT = 256
WARMUP_STEPS = 200
"""Inner steps of the one-path model that every method starts from, optimizer state included."""
WIDTH = 32
"""Small, so that one path has not room for all of the text: else there is nothing to specialise in."""
STEPS = 720
"""Inner steps per path after that, for every method."""
ROUND_STEPS = 40

_LATER: Mapping[str, object] = {
    **{"inner_lr": 1.0, "batch": InnerConfig().batch, "goes_on": True, "size": "small"},
    **{"late": 0.0, "untrained": False, "zero": False, "coasts": False, "estimate": "", "points": 3},
    **{"dense_first": 0, "dense_last": 0, "by_tensor": False, "codecs": (), "down_of": "step"},
    **{"forged": 0.0, "repair": ""},
    "optimizer": ADAMW,
}
"""Fields that came later with their defaults: finished experiments find their results by keys without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What paths are made of, beside their grid and width."""

    vocab_size: int = VOCAB_SIZE
    context: int = CONTEXT
    heads: int = 2
    blocks: int = 1
    """Times those of the grid."""
    warmup_batch: int = InnerConfig().batch


SIZES: Mapping[str, Size] = {
    "tiny": Size(context=64, warmup_batch=2),
    "short": Size(context=128),
    "small": Size(),
    "2M": Size(vocab_size=12_288, context=512, warmup_batch=128),
    "20M": Size(vocab_size=12_288, context=512, heads=6, blocks=2, warmup_batch=128),
}
"""`tiny` is for trying, `short` for comparisons, `small` for the experiment; the others are for a GPU, at widths of 96
and 384, and read the same sequences."""

_TRUNK = LevelConfig(embedding=True, head=True)
_PRIVATE_BLOCK = LevelConfig(private=True, blocks=1)
_PRIVATE_FIRST = LevelConfig(private=True, blocks=1, embedding=True, head=True)
_ALL_PRIVATE = (LevelConfig(private=True, blocks=4, embedding=True, head=True),)


def _halves(modules: int) -> tuple[LevelConfig, ...]:
    return (LevelConfig(modules=modules, blocks=2, embedding=True, head=True), LevelConfig(modules=modules, blocks=2))


def _with_private_ends(modules: int) -> tuple[LevelConfig, ...]:
    shared = LevelConfig(modules=modules, blocks=1)
    return (_PRIVATE_FIRST, shared, shared, _PRIVATE_BLOCK)


GRIDS: Mapping[str, tuple[LevelConfig, ...]] = {
    "1": (_TRUNK, LevelConfig(blocks=4)),
    "2x2": _halves(2),
    "2x4": (_halves(2)[0], _halves(4)[1]),
    "4x4": _halves(4),
    "2x2 private ends": _with_private_ends(2),
    "4x4 private ends": _with_private_ends(4),
    "2x2 shared embedding": (_TRUNK, LevelConfig(modules=2, blocks=2), LevelConfig(modules=2, blocks=2)),
    "2x2 shared trunk": (LevelConfig(blocks=2, embedding=True, head=True), *[LevelConfig(modules=2, blocks=1)] * 2),
    "flat 4": _ALL_PRIVATE,
    "flat 16": _ALL_PRIVATE,
}
"""Always four blocks in a path. The tied embedding and head are part of the first level's modules, as the sizes that
the paper reports suggest; or in a trunk that all paths share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training run. Everything but `method`, which names it in tables, decides the result."""

    method: str
    seed: int
    grid: str = "2x2"
    routing: str = "arranged"
    """random; arranged: k-means, similar clusters where paths share modules; kmeans: numbered by the lot; unbalanced:
    arranged without balance; product; tiny: unigram models, as in a run file; tiny whole: such as read ahead, a bound.
    Of no effect on a grid of one path."""
    lr: float = 0.7
    """Of the outer step."""
    momentum: float = 0.9
    rule: str = "sqrt"
    """Norm of the averaged outer gradient: sqrt or rda, as in a run file, or mean, which rescales nothing."""
    outer: str = "all"
    """all; none: parameters are what AdamW left (dense without outer step); shared: so for private modules only;
    single: every contribution alone, as it arrives (asynchronous without a buffer); every step: no outer step, paths
    average their gradients at every inner step (every_step.py)."""
    weighted: bool = True
    """Contributions weigh as much as their shard has text; else all the same."""
    replicas: int = 1
    """Workers per path, on disjoint parts of its shard."""
    width: int = WIDTH
    steps: int = STEPS
    round_steps: int = ROUND_STEPS
    codec: str = "int8"
    """Of the outer gradients: as in a run file; top3 (the largest 3 %); or fp32."""
    codecs: tuple[str, ...] = ()
    """Those of each level, if not the same."""
    feedback: bool = True
    """Whether what the codec lost is added to the next outer gradient."""
    decay: float = 1.0
    """The share of it that is."""
    by_tensor: bool = False
    """A sparse codec chooses its places in each tensor alone, and norms go as int8."""
    dense_first: int = 0
    """In so many first rounds outer gradients are sent as int4, whatever the codec."""
    dense_last: int = 0
    """And in so many last ones, when what is still owed is sent."""
    goes_on: bool = True
    """Inner steps with top128 begin where the path is, as in the swarm; else at the versions."""
    down: str = "int8"
    """Of the updates. Not with fp32, where modules are stepped as they are."""
    down_of: str = "step"
    """What an update says: the outer step, or the averaged gradient, of which everybody makes the step."""
    reshard: tuple[int, ...] = ()
    """Before these rounds all paths score the router split, and a router fitted on who was best cuts new shards."""
    balance: str = "equal"
    overlap: int = 1
    """Each sequence is in the shards of so many paths."""
    early_stop: bool = False
    """Evaluate each path as it was when it did best on a held-out part of its shard."""
    drop: float = 0.0
    """Share of the contributions that do not arrive in time."""
    late: float = 0.0
    """They come with the next round's, with this share of the weight they would have had; 0: they never come."""
    untrained: bool = False
    """One path is never trained; which one depends on the seed."""
    zero: bool = False
    """What is missing counts as an outer gradient of zeros, with its weight; else it is left out."""
    coasts: bool = False
    """A module for which nothing came takes a step of its momentum; else it stays as it is."""
    estimate: str = ""
    """What paths begin a round from instead of the version itself, one of comparisons.ESTIMATES."""
    points: int = 3
    """How often the loss is taken on the way."""
    attack: bool = False
    """Path 0 sends ten times the negative of its outer gradients."""
    clip: bool = False
    """Contributions longer than twice the median of their module's are scaled down to that."""
    forged: float = 0.0
    """In some rounds path 0 sends so many times the negative of its outer gradients (repair.py)."""
    repair: str = ""
    """What is done about these when they are found."""
    train_share: float = 1.0
    """Share of the training text that is used at all."""
    inner_lr: float = 1.0
    """Of the usual inner learning rate."""
    optimizer: str = ADAMW
    """Of the inner steps, as in a run file; the warm-up's is AdamW."""
    batch: int = InnerConfig().batch
    """Sequences of an inner step of one worker; the warm-up has the usual number."""
    size: str = "small"
    """Of the paths, one of `SIZES`."""

    @property
    def key(self) -> str:
        """Names the job's files and its result; the same settings under another `method` have the same key."""
        values = {name: value for name, value in asdict(self).items() if name != "method"}
        for name, default in _LATER.items():
            if values[name] == default:
                del values[name]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def model(self) -> ModelConfig:
        paths = int(self.grid.split()[1]) if self.grid.startswith("flat") else 0
        return path_model(self.width, levels=GRIDS[self.grid], paths=paths, size=SIZES[self.size])

    @property
    def one_path(self) -> ModelConfig:
        """The warm-up's."""
        return path_model(self.width, size=SIZES[self.size])

    @property
    def inner(self) -> InnerConfig:
        lr = InnerConfig().lr * self.inner_lr
        return InnerConfig(batch=self.batch, steps=self.round_steps, lr=lr, optimizer=self.optimizer)

    @property
    def rounds(self) -> int:
        return self.steps // self.round_steps

    @property
    def path_steps(self) -> int:
        """Inner steps of all workers: what the job costs."""
        return self.rounds * self.round_steps * self.model.path_count * self.replicas

    def to_dict(self) -> dict[str, object]:
        """As JSON has it; defaults are left out."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {name: plain(value) for name, value in changed.items()}


def path_model(
    width: int, *, levels: tuple[LevelConfig, ...] = GRIDS["1"], paths: int = 0, size: Size = SIZES["small"]
) -> ModelConfig:
    """A path of four blocks, or so many times four; feed-forward layers are three times as wide as the rest."""
    return ModelConfig(
        vocab_size=size.vocab_size,
        width=width,
        heads=size.heads,
        ffn_width=3 * width,
        context=size.context,
        levels=tuple(replace(level, blocks=size.blocks * level.blocks) for level in levels),
        paths=paths,
    )
