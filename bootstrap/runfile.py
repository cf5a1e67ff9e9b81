"""The run file: one TOML file that describes a run, and the commented template that `init` writes.

    [run]       name, seed               \\
    [model]     and [[model.levels]]      |  `RunConfig`: shared by all participants, part of the fingerprint
    [warmup] [routing] [inner] [outer]    |
    [rounds] [liveness] [admission]       |
    [judging]                            /
    [corpus]    where the text comes from   only this machine's business
    [node]      where the coordinator listens, and how much of its line blobs may take
    [archive]      how much of the run the coordinator keeps
    [leaderboard]  whether and where its public page is served

Every key may be left out and then has the default that `template` shows.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import re
import textwrap
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dipaco_p2p import strict
from dipaco_p2p.config import (
    KEEPERS,
    AdmissionConfig,
    CompressionConfig,
    InnerConfig,
    JudgingConfig,
    LivenessConfig,
    ModelConfig,
    OuterConfig,
    RoundsConfig,
    RoutingConfig,
    RunConfig,
    WarmupConfig,
)
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.program.curves import read_targets
from dipaco_p2p.strict import bounded
from dipaco_p2p.swarm.blobs.bandwidth import Line
from dipaco_p2p.swarm.relay_slots import RelayLimits
from leaderboard.places import DEFAULT_PORT as DEFAULT_PAGE_PORT
from leaderboard.places import check_base
from leaderboard.words import check_words

DEFAULT_PORT = 31337
LEVELS = "model.levels"
"""The one list of tables."""
COMMENT_COLUMNS = 100
LOOPBACK = "127.0.0.1"
METRICS_HINT = "a port, as 9464, or a host and a port, as 0.0.0.0:9464 or [::]:9464"


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
    """Share of the documents that every round is measured on."""
    holdout_share: float = bounded(0.02, low=0.001, high=0.5)
    """Share of the documents that early stopping looks at."""
    router_share: float = bounded(0.04, low=0.001, high=0.5)
    """Share of the documents that paths score, for a better router."""


class Place(NamedTuple):
    """Where to listen."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_place(text: str) -> Place | None:
    """`9464` is on this machine only; nothing is nowhere. Raises ConfigError."""
    if not text:
        return None
    found = re.fullmatch(r"(?:(?:\[([0-9a-fA-F:.]{1,45})\]|([A-Za-z0-9._-]{1,253})):)?([0-9]{1,5})", text)
    if found is None or int(found[3]) > 65_535:
        raise ConfigError(f"`{text[:80]}` is not an address for metrics", hint=METRICS_HINT)
    return Place(found[1] or found[2] or LOOPBACK, int(found[3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Where the coordinator listens, what its line may carry, and where it keeps its files."""

    host: str = "127.0.0.1"
    """The address to listen at, IPv4 or IPv6; `0.0.0.0` means all addresses of both kinds."""
    port: int = bounded(DEFAULT_PORT, low=0, high=65_535)
    """0 takes any free port."""
    announce: tuple[str, ...] = ()
    """Addresses outside, if a router forwards a port: /ip4/203.0.113.5/tcp/443, or /dns4/run.example.org/tcp/443."""
    up_mbit: float = bounded(0.0, low=0.0)
    """The most to upload, in Mbit/s, without calls and heartbeats, which are small; 0: no limit."""
    down_mbit: float = bounded(0.0, low=0.0)
    """The most to download, in Mbit/s, counted likewise; 0: no limit."""
    relay: bool = True
    """Whether volunteers behind routers are dialled through the seed node, and can so lead modules."""
    relay_mbit: float = bounded(0.0, low=0.0)
    """The most that relaying may take of the line each way, in Mbit/s; 0: no limit."""
    metrics: str = ""
    """Where to serve metrics for Prometheus: a port, for this machine alone, or host:port; empty: nowhere."""
    log: tuple[str, ...] = ()
    """Where curves of the rounds are written: tensorboard:DIR, wandb, wandb:PROJECT or csv:FILE."""
    directory: str = ""
    """The folder of the run; empty: one in the platform's folder for program data."""

    def relay_limits(self) -> RelayLimits | None:
        """What the seed node relays; None: nothing."""
        return RelayLimits(mbit=self.relay_mbit or None) if self.relay else None

    @property
    def listen(self) -> str:
        """The multiaddr to listen at."""
        return f"/{'ip6' if ':' in self.host else 'ip4'}/{self.host}/tcp/{self.port}"

    def line(self) -> Line:
        """Raises ConfigError for a limit that is too low."""
        return Line(up_mbit=self.up_mbit or None, down_mbit=self.down_mbit or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveConfig:
    """How much of the run the coordinator keeps on its disk. Signed documents always stay, so who did what is known."""

    rounds: int = bounded(2, low=0)
    """Of how many last rounds everything is kept, so that `verify` can recompute their versions; 0: of all rounds."""
    snapshots: int = bounded(50, low=0)
    """The parameters of every N-th round are kept for good, to go back to or to export; 0: of none. Rounds that are
    served, or at which text is sharded, are kept in any case."""
    keepers: int = bounded(0, low=0, high=KEEPERS)
    """How many volunteers must have proved that they keep a version of the grid before the coordinator drops it.
    0: it drops versions even if nobody else has them."""
    remade: float = bounded(1.0, low=0.0, high=1.0)
    """The share of versions that the coordinator recomputes before it signs them. It signs the others once a quorum of
    their owners has recomputed them, so their contributions do not come to its line and its disk."""
    measured: float = bounded(1.0, low=0.0, high=1.0)
    """The share of the paths' held-out losses that the coordinator measures itself after each round. With less than 1,
    volunteers measure the others, and parameters come to its line only where it needs them."""

    def __post_init__(self) -> None:
        if self.rounds == 0 and self.measured < 1:
            message = f"`rounds = 0` and `measured = {self.measured:g}` in [archive]"
            hint = "leave `measured` out, or say `rounds = 2`"
            raise ConfigError(f"{message}: an archive that keeps all rounds has their parameters", hint=hint)
        if self.remade == 1 and self.measured < 1:
            hint = "leave `measured` out, or say `remade = 0`"
            message = f"`remade = 1` and `measured = {self.measured:g}` in [archive]"
            raise ConfigError(f"{message}: a coordinator that recomputes every version has its parameters", hint=hint)
        if self.keepers and self.remade < 1:
            hint = "leave `keepers` out, or say `remade = 1`"
            message = f"`keepers = {self.keepers}` and `remade = {self.remade:g}` in [archive]"
            raise ConfigError(f"{message}: keepers fetch from a coordinator that has all contributions", hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderboardConfig:
    """The public page of the run, in a process of its own that has no key of the coordinator's."""

    serve: bool = True
    """Whether there is a page."""
    host: str = "127.0.0.1"
    """The address to listen at; 0.0.0.0 shows the page to everybody."""
    port: int = bounded(DEFAULT_PAGE_PORT, low=0, high=65_535)
    """0 takes any free port."""
    base: str = ""
    """The path below which a proxy puts the page, such as /board; empty: none."""
    about: str = ""
    """What the run is for, in a sentence of at most 300 characters, for strangers."""
    prompts: tuple[str, ...] = ("The first thing to do is",)
    """The texts that the model continues on the page; at most 4. Empty: the page shows no text."""

    def __post_init__(self) -> None:
        check_base(self.base)
        check_words(self.about, self.prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """All that a run file says."""

    run: RunConfig = field(default_factory=partial(RunConfig, judging=JudgingConfig()))
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    node: NodeConfig = field(default_factory=NodeConfig)
    archive: ArchiveConfig = field(default_factory=ArchiveConfig)
    leaderboard: LeaderboardConfig = field(default_factory=LeaderboardConfig)
    checkpoint: str = ""
    """The folder that the run begins from; empty: random weights."""


def _same(name: str) -> Any:
    """A field with the default and bounds that `RunConfig` gives it."""
    known = RunConfig.__dataclass_fields__[name]
    return field(default=known.default, metadata=known.metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunTable:
    """The run's name, and the seed of its random numbers."""

    name: str = _same("name")
    """Letters, digits, - and _."""
    seed: int = _same("seed")
    """Decides initial weights, shards, and the order of batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _WarmupTable(WarmupConfig):
    """The first stage: all volunteers train the one-path model together (DiLoCo), then it is forked into the grid."""

    from_: str = ""
    """The folder of a Llama checkpoint in Hugging Face's format to begin from, with its tokenizer, in place of random
    weights; then `rounds` is 0 unless you set it. Empty: none."""

    def config(self) -> WarmupConfig:
        """What all participants share of it."""
        return WarmupConfig(**{known.name: getattr(self, known.name) for known in dataclasses.fields(WarmupConfig)})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The tables of the file, in the order of the template."""

    run: _RunTable = field(default_factory=_RunTable)
    model: ModelConfig = field(default_factory=ModelConfig)
    warmup: _WarmupTable = field(default_factory=_WarmupTable)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    inner: InnerConfig = field(default_factory=InnerConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    judging: JudgingConfig = field(default_factory=JudgingConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    node: NodeConfig = field(default_factory=NodeConfig)
    archive: ArchiveConfig = field(default_factory=ArchiveConfig)
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
            f"`{path}` is not valid TOML: {error}", hint="put text in quotes, and write tables as `[model]`"
        ) from None
    return _beside(_run_file(mapping, where=path.name), path.parent)


def _require_peers(peers: Sequence[str]) -> None:
    if peers:  # run files without a list are read where signatures cannot be checked
        from dipaco_p2p.protocol.documents import require_peers
        from dipaco_p2p.protocol.signing import PeerId

        require_peers(*map(PeerId, peers))


def _require_places(places: Sequence[str]) -> None:
    if places:  # as above
        from dipaco_p2p.swarm.addresses import read_place as read_multiaddr

        for place in places:
            read_multiaddr(place)


def _run_file(mapping: object, *, where: str) -> RunFile:
    try:
        layout = strict.load(_Layout, _without_warmup(mapping), where=where)
        corpus = layout.corpus
        if corpus.validation_share + corpus.holdout_share + corpus.router_share > 0.5:
            raise ConfigError("validation, holdout and router shares leave less than half of the text for training")
        layout.node.line()
        read_place(layout.node.metrics)
        _require_places(layout.node.announce)
        read_targets(layout.node.log)
        _require_peers(layout.admission.peers)
        run = _run_config(layout)
    except ConfigError as error:
        message = str(error) if where in str(error) else f"{where}: {error}"
        raise ConfigError(message, hint=error.hint) from None
    names = {known.name for known in dataclasses.fields(RunFile)} - {"run", "checkpoint"}
    return RunFile(run=run, checkpoint=layout.warmup.from_, **{name: getattr(layout, name) for name in names})


def _without_warmup(mapping: object) -> object:
    """A checkpoint is trained: it is forked at once, unless the file asks for a warm-up."""
    table = mapping.get("warmup") if isinstance(mapping, dict) else None
    if not isinstance(table, dict) or not table.get("from") or "rounds" in table:
        return mapping
    assert isinstance(mapping, dict)
    return {**mapping, "warmup": {**table, "rounds": 0}}


def _run_config(layout: _Layout) -> RunConfig:
    """`RunConfig` has the keys of [run] and, beside them, the tables that are shared."""
    values = {known.name: getattr(layout.run, known.name) for known in dataclasses.fields(_RunTable)}
    shared = {known.name for known in dataclasses.fields(RunConfig)} - set(values)
    tables = {name: getattr(layout, name) for name in shared}
    return RunConfig(**values, **tables | {"warmup": layout.warmup.config()})


def _beside(file: RunFile, folder: Path) -> RunFile:
    if file.checkpoint:
        file = dataclasses.replace(file, checkpoint=str(folder / Path(file.checkpoint).expanduser()))
    beside = folder / file.corpus.source
    if file.corpus.source == "found" or Path(file.corpus.source).is_absolute() or not beside.exists():
        return file
    return dataclasses.replace(file, corpus=dataclasses.replace(file.corpus, source=str(beside)))


HEAD = """\
# A run of dipaco-p2p. You may leave out any key: the values below are the defaults.
"""


def template(name: str) -> str:
    """A commented run file for a run called `name`; it says every key with its default."""
    RunConfig(name=name)  # refuses a name that the file could not be loaded with
    layout = _Layout(run=_RunTable(name=name))
    return HEAD + "".join(_table(known.name, getattr(layout, known.name)) for known in dataclasses.fields(layout))


def _table(name: str, value: Any, *, is_first: bool = True) -> str:
    """One table and those inside it. What is said of a key in its dataclass stands above the key, in the first table of
    a list alone."""
    inner = {strict.written(known.name): getattr(value, known.name) for known in dataclasses.fields(value)}
    below, lines = "", ["", f"[[{name}]]" if name == LEVELS else f"[{name}]"]
    texts = _texts(type(value)) if is_first else {}
    if is_first:
        lines[1:1] = _comment((inspect.getdoc(value) or "").partition("\n\n")[0])
    for key, each in inner.items():
        if dataclasses.is_dataclass(each):
            below += _table(f"{name}.{key}", each)
        elif f"{name}.{key}" == LEVELS:
            below += "".join(_table(LEVELS, level, is_first=not number) for number, level in enumerate(each))
        else:
            lines += [*_comment(texts.get(key, "")), f"{key} = {_in_toml(each)}"]
    return "\n".join(lines) + "\n" + below


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(" ".join(text.split()), COMMENT_COLUMNS, break_on_hyphens=False)]


def _texts(kind: type) -> dict[str, str]:
    """What stands below each field of a dataclass, and of those that it extends."""
    above = [_texts(base) for base in kind.__bases__ if dataclasses.is_dataclass(base)]
    [tree] = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    return dict(itertools.chain.from_iterable(each.items() for each in above)) | {
        strict.written(field.target.id): text.value.value
        for field, text in itertools.pairwise(tree.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _in_toml(value: object) -> str:
    return json.dumps(value)  # the same, for all that a run file holds


def write_template(path: Path, name: str) -> None:
    """Write `template(name)` to `path`; raises ConfigError rather than replace a file."""
    text = template(name)
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"`{path}` already exists", hint="name another file, or remove this one") from None
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
