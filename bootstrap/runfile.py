"""The run file: one TOML file that describes a run, and the commented template that `init` writes.

    [run]       name, seed               \\
    [model]     and [[model.levels]]      |  `RunConfig`: shared by all participants, part of the fingerprint
    [warmup] [routing] [inner] [outer]    |
    [rounds] [liveness]                  /
    [corpus]    where the text comes from   only this machine's business
    [node]      where the coordinator listens, and how much of its line blobs may take
    [leaderboard]  whether and where its public page is served

Every key may be left out and then has the default that `template` shows.
"""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dipaco_p2p import strict
from dipaco_p2p.config import (
    CompressionConfig,
    InnerConfig,
    LivenessConfig,
    ModelConfig,
    OuterConfig,
    RoundsConfig,
    RoutingConfig,
    RunConfig,
    WarmupConfig,
)
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.strict import bounded
from dipaco_p2p.swarm.blobs.bandwidth import Line
from leaderboard.places import DEFAULT_PORT as DEFAULT_PAGE_PORT
from leaderboard.places import check_base

from .control.metrics_page import read_place

DEFAULT_PORT = 31337


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusConfig:
    """Which text to train on, and how it is split."""

    source: str = "found"
    """`found`, a file or folder (.txt, .jsonl, .jsonl.gz, .parquet), or a hub name `org/name` or `org/name:subset`."""
    text_field: str = "text"
    """The field of a JSONL or Parquet record that holds the text."""
    documents_max: int = bounded(0, low=0)
    """Take at most this many documents; 0 is no limit."""
    bytes_max: int = bounded(12_000_000, low=1)
    """Take at most this much text (UTF-8), whatever the source."""
    validation_share: float = bounded(0.06, low=0.001, high=0.5)
    holdout_share: float = bounded(0.02, low=0.001, high=0.5)
    """Share of the documents that early stopping looks at."""
    router_share: float = bounded(0.04, low=0.001, high=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Where the coordinator listens, what its line may carry, and where it keeps its files."""

    host: str = "127.0.0.1"
    port: int = bounded(DEFAULT_PORT, low=0, high=65_535)
    """0 takes any free port."""
    up_mbit: float = bounded(0.0, low=0.0)
    down_mbit: float = bounded(0.0, low=0.0)
    """What blobs may take of the line, in Mbit/s; 0 is all of it."""
    metrics: str = ""
    """Where Prometheus finds its metrics: a port of this machine alone, or host:port; empty: nowhere."""
    directory: str = ""
    """Empty: the platform's folder for program data."""

    def line(self) -> Line:
        """Raises ConfigError for a limit that is too low."""
        return Line(up_mbit=self.up_mbit or None, down_mbit=self.down_mbit or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderboardConfig:
    """The public page of the run, in a process of its own that has no key of the coordinator's."""

    serve: bool = True
    host: str = "127.0.0.1"
    """0.0.0.0 shows it to everybody."""
    port: int = bounded(DEFAULT_PAGE_PORT, low=0, high=65_535)
    """0 takes any free port."""
    base: str = ""
    """The path that a proxy puts it under, as /board; empty: none."""

    def __post_init__(self) -> None:
        check_base(self.base)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """All that a run file says."""

    run: RunConfig = field(default_factory=RunConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    node: NodeConfig = field(default_factory=NodeConfig)
    leaderboard: LeaderboardConfig = field(default_factory=LeaderboardConfig)


def _same(name: str) -> Any:
    """A field with the default and bounds that `RunConfig` gives it."""
    known = RunConfig.__dataclass_fields__[name]
    return field(default=known.default, metadata=known.metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunTable:
    name: str = _same("name")
    seed: int = _same("seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The tables of the file, in the order of the template."""

    run: _RunTable = field(default_factory=_RunTable)
    model: ModelConfig = field(default_factory=ModelConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    inner: InnerConfig = field(default_factory=InnerConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    node: NodeConfig = field(default_factory=NodeConfig)
    leaderboard: LeaderboardConfig = field(default_factory=LeaderboardConfig)


def load_run_file(path: Path) -> RunFile:
    """Read and check a run file; a relative corpus path counts from the run file's folder if it exists there.

    Raises ConfigError, with the file's name in its message, for anything that is not exactly right.
    """
    try:
        mapping = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        hint = "`dipaco-bootstrap init` writes a commented one"
        raise ConfigError(f"run file `{path}` cannot be read: {error.strerror}", hint=hint) from None
    except UnicodeDecodeError:
        raise ConfigError(f"run file `{path}` is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"`{path}` is no TOML: {error}", hint="texts need quotes, tables look like `[model]`"
        ) from None
    return _beside(_run_file(mapping, where=path.name), path.parent)


def _run_file(mapping: object, *, where: str) -> RunFile:
    try:
        layout = strict.load(_Layout, mapping, where=where)
        corpus = layout.corpus
        if corpus.validation_share + corpus.holdout_share + corpus.router_share > 0.5:
            raise ConfigError("validation, holdout and router shares leave less than half of the text for training")
        layout.node.line()
        read_place(layout.node.metrics)
        run = _run_config(layout)
    except ConfigError as error:
        message = str(error) if where in str(error) else f"{where}: {error}"
        raise ConfigError(message, hint=error.hint) from None
    return RunFile(run=run, corpus=layout.corpus, node=layout.node, leaderboard=layout.leaderboard)


def _run_config(layout: _Layout) -> RunConfig:
    """`RunConfig` has the keys of [run] and, beside them, the tables that are shared."""
    values = {known.name: getattr(layout.run, known.name) for known in dataclasses.fields(_RunTable)}
    shared = {known.name for known in dataclasses.fields(RunConfig)} - set(values)
    return RunConfig(**values, **{name: getattr(layout, name) for name in shared})


def _beside(file: RunFile, folder: Path) -> RunFile:
    beside = folder / file.corpus.source
    if file.corpus.source == "found" or Path(file.corpus.source).is_absolute() or not beside.exists():
        return file
    return dataclasses.replace(file, corpus=dataclasses.replace(file.corpus, source=str(beside)))


def template(name: str) -> str:
    """A commented run file for a run called `name`; it says every key with its default."""
    RunConfig(name=name)  # refuses a name that the file could not be loaded with
    return TEMPLATE.replace("@name@", name)


TEMPLATE = """\
# A run of dipaco-p2p. Every key may be left out; the values below are the defaults.

[run]
name = "@name@"            # letters, digits, - and _
seed = 0                # decides initial weights, shards and the order of batches

[model]                 # a path: a Llama-style decoder, cut into levels
vocab_size = 2048       # size of the tokenizer that is trained on the corpus
width = 64              # numbers that a token is to the model
heads = 2               # width / heads must be even
ffn_width = 192         # inner width of a block's feed-forward part
context = 256           # tokens in a training sequence
rope_theta = 10000.0    # base of the rotary positions
norm_eps = 1e-5         # what keeps RMSNorm from dividing by zero
paths = 0               # how many, if every level is private; otherwise the levels say it
tied = true             # the output head is the embedding; then one level holds both

[[model.levels]]        # one table per level; a path takes one module of each
modules = 1             # 1: shared by all paths
private = false         # true: one module for each path, which no other path trains
blocks = 0              # decoder blocks in each module
embedding = true        # exactly one level has the token embedding
head = true             # exactly one level has the final norm and output head

[[model.levels]]
modules = 2
blocks = 2

[[model.levels]]
modules = 2
blocks = 2

[warmup]                # all train one path together, which is then forked into the grid
rounds = 7              # 0: no warm-up

[warmup.outer]          # the outer step of the warm-up, as in [outer]
lr = 1.0                # the whole way to the average
momentum = 0.0          # plain averaging
norm_rule = "mean"      # replicas of one path agree

[routing]               # which sequences each path trains on
first = "kmeans"        # by the first 32 tokens; product: one k-means per level; tiny: a unigram model per path
reshard_rounds = []     # before these rounds the paths say which of them is best at what; `rounds`: for serving
balance = "equal"       # after re-sharding; match: as often as each path was best
overlap = 1             # each sequence is trained on by this many of its best paths

[inner]                 # AdamW of a volunteer on its path's shard
steps = 30              # inner steps per round
batch = 8               # sequences per step
lr = 3e-3               # the highest learning rate
lr_min_ratio = 0.1      # the cosine over the whole run ends at this share of lr
warmup_steps = 20       # from the start of the run, its warm-up included
beta1 = 0.9             # how slowly the mean of the gradients forgets
beta2 = 0.95            # how slowly the mean of their squares forgets
weight_decay = 0.1      # how strongly weights are drawn to zero
clip = 1.0              # largest norm of a step's gradient

[outer]                 # Nesterov on a module's averaged outer gradients
lr = 0.7                # how far an outer step goes
momentum = 0.9          # share of the last outer steps that goes on
norm_rule = "sqrt"      # sqrt: mean times sqrt(number of paths); rda: mean of norms, mean of directions; mean

[compression]
uplink = "int4"         # of outer gradients: int4, int8, or top128: far smaller, for 100 short rounds and more
downlink = "int4"       # of the updates of modules: int4 or int8
error_decay = 1.0       # share of what a round could not send that is tried again

[rounds]
rounds = 16             # outer steps of every module
min_paths = 1           # paths that must be claimed before the first round starts
quorum = 0.5            # share of a module's claimed paths that a deadline needs to close its round
deadline_s = 120.0      # the most that a round waits for a missing path
grace_s = 5.0           # how long a round at its deadline still waits for the slowest
staleness = 1           # how many versions behind a contribution may be
owners = 3              # peers that own a module together: a leader, and mirrors that go on where it stops
overlap = false         # true: train on from an estimate of the next versions while pushes and pulls are on their way

[liveness]
heartbeat_ttl_s = 15.0  # a peer silent for this long has lost its claims
settle_s = 1.0          # wait before a claim counts, in which others may object

[corpus]                # only the coordinator reads this part and the next
source = "found"        # text of installed packages; or a file, a folder, or a hub name "org/name"
text_field = "text"     # the field with the text in JSONL and Parquet
documents_max = 0       # 0: no limit
bytes_max = 12000000    # take at most this much text
validation_share = 0.06 # of the documents, for measuring
holdout_share = 0.02    # of the documents, for early stopping
router_share = 0.04     # of the documents, which paths score for a better router

[node]
host = "127.0.0.1"      # the address others reach; "0.0.0.0" listens everywhere
port = 31337            # 0: any free port
up_mbit = 0.0           # the most that blobs may take of the uplink, in Mbit/s; 0: no limit
down_mbit = 0.0         # the same of the downlink
metrics = ""            # where Prometheus finds metrics: a port of this machine alone, or "host:port"; empty: nowhere
directory = ""          # where the run is kept; empty: the platform's folder for program data

[leaderboard]           # the run's public page
serve = true            # false: no page
host = "127.0.0.1"      # "0.0.0.0" shows it to everybody
port = 31380            # 0: any free port
base = ""               # the path that a proxy puts it under, as "/board"; empty: none
"""


def write_template(path: Path, name: str) -> None:
    """Write `template(name)` to `path`; raises ConfigError rather than replace a file."""
    text = template(name)
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"`{path}` is there already", hint="name another file, or remove that one") from None
    except OSError as error:
        raise ConfigError(f"cannot write `{path}`: {error.strerror}") from None


def run_folder(file: RunFile) -> Path:
    """Where a run is kept unless the user says otherwise."""
    if file.node.directory:
        return Path(file.node.directory).expanduser()
    return runs_folder() / file.run.name


def runs_folder() -> Path:
    """Where the runs of this user are, each in a folder with its name."""
    import platformdirs

    return platformdirs.user_data_path("dipaco-p2p") / "coordinator"
