"""The leaderboard as a program: follow a run and serve its pages; write them as files; make the tables again.

What is served is the newest snapshot. A run that does not answer is tried again and again: meanwhile the pages show
what the tables hold, and say how old it is.

The tables can be made again from a coordinator's folder alone, so that nobody needs to believe a collector. The folder
holds a store for each stage, `warmup` and `grid`, with the signed documents of the run. They come in through the same
door as what peers tell. What was only ever observed (database.py) is not in them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from dipaco_p2p.clock import SystemClock
from dipaco_p2p.errors import ConfigError, DipacoError, IntegrityError, SwarmError
from dipaco_p2p.node.doorplate import DOORPLATE
from dipaco_p2p.node.entry import bare, is_entry
from dipaco_p2p.node.run import open_run
from dipaco_p2p.node.stages import check_next_stage
from dipaco_p2p.program.console import log_to, on_signals
from dipaco_p2p.program.files import folder_lock
from dipaco_p2p.program.web import listening, serve_app
from dipaco_p2p.protocol.decrees import Decree
from dipaco_p2p.protocol.documents import Contribution, ModuleVersion, Sealed
from dipaco_p2p.protocol.judgement import Check, Judgement
from dipaco_p2p.protocol.manifest import STAGES
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.ticket import WORD
from leaderboard.chains import Refusals

from .collector import collect
from .database import Database
from .ledger import Stage
from .model import Snapshot
from .places import FILE, IN_RUN_FOLDER, LOG, SAID
from .snapshot import Live, take_snapshot
from .web.app import make_app
from .web.export import export_site
from .words import Words, read_words

AGAIN_S = 10.0
SETTLED_S_MAX = 120.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a site is served."""

    host: str
    port: int
    base: str = ""
    """The path that a proxy puts it under; it answers there, and without it."""


async def serve(
    address: str, folder: Path, place: Place, *, expected: str | None, join: str, verbose: bool = False
) -> None:
    """Collect the run at `address` into `folder`, and serve it until a signal says stop. `join` is the line to show, or
    empty. Raises DipacoError: also when nobody answers and there is nothing in the folder to show."""
    join = join or join_line(address)
    stopped = asyncio.Event()
    on_signals(stopped.set)
    refused = f"the leaderboard cannot listen on {place.host} port {place.port}"
    with (
        folder_lock(folder, hint="another leaderboard is at work there; end it, or choose another --dir"),
        listening(
            place.host, place.port, refused=refused, hint="choose another port, or 0 for any free one"
        ) as listener,
        contextlib.closing(Database.open(folder / FILE)) as database,
    ):
        log_to(folder / LOG, verbose=verbose)
        shown = _Shown(folder)
        app = make_app(lambda: shown.newest, clock=SystemClock(), base=place.base)
        following = asyncio.create_task(_follow(address, database, shown, expected=expected, join=join))
        serving = asyncio.create_task(serve_app(app, listener))
        print(f"{SAID}http://{place.host}:{listener.getsockname()[1]}{place.base}/", flush=True)
        stopping = asyncio.create_task(stopped.wait())
        tasks = (following, serving, stopping)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(following, serving, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result


async def export(source: str, to: Path, *, expected: str | None, join: str = "") -> Snapshot:
    """Write the whole site of `source` to the folder `to`: the address of a live run, the folder of a coordinator, or
    that of a leaderboard. `join` as for `serve`. Raises DipacoError."""
    if is_entry(source):
        snapshot = await _collected(source, expected=expected)
    else:
        snapshot = _of_folder(Path(source))
        beside = Path(source) / IN_RUN_FOLDER
        snapshot = replace(snapshot, words=read_words(beside if beside.is_dir() else Path(source)))
    snapshot = replace(snapshot, join=join or join_line(source))
    export_site(snapshot, to, now_s=snapshot.taken_s)
    return snapshot


def join_line(source: str) -> str:
    """What one joins the run of `source` with, if that is a ticket, or a coordinator's folder that says its own. An
    address is not passed on: it may be one of this machine."""
    word = ""
    if is_entry(source):
        word = bare(source)
    else:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            word = json.loads((Path(source) / DOORPLATE).read_bytes())["ticket"]
    return f"dipaco-peer join {word}" if isinstance(word, str) and WORD.fullmatch(word) else ""


def rebuild_tables(folder: Path, to: Path) -> int:
    """Make the tables of a coordinator's `folder` again, into a new database `to`; how many versions there are.
    Raises ConfigError, IntegrityError."""
    if to.exists():
        raise ConfigError(f"`{to}` exists", hint="name a new file: what is there might have been observed, not signed")
    try:
        with contextlib.closing(Database.open(to)) as database:
            stages = rebuild(folder, database)
    except BaseException:
        to.unlink(missing_ok=True)  # half of it would look like all
        raise
    return sum(len(chain.versions) for stage in stages for chain in stage.chains.values())


class _Shown:
    """The snapshot that pages are made of, with what a coordinator says in `folder`."""

    def __init__(self, folder: Path | None = None) -> None:
        self.newest: Snapshot | None = None
        self._folder = folder

    def show(self, snapshot: Snapshot) -> None:
        words = Words() if self._folder is None else read_words(self._folder)
        self.newest = replace(snapshot, words=words)


async def _follow(address: str, database: Database, shown: _Shown, *, expected: str | None, join: str) -> None:
    stages = await asyncio.to_thread(load_stages, database)
    first = await asyncio.to_thread(stored_snapshot, database, stages, now_s=SystemClock().now_s(), join=join)
    if first is not None:
        shown.show(first)
    while True:
        try:
            options = {"on_snapshot": shown.show, "join": join, "stages": stages or None}
            async with collect(address, database, expected=expected, **options):
                await asyncio.Event().wait()
        except SwarmError as error:
            if shown.newest is None:
                raise
            log.warning("the run does not answer, it is tried again: %s", error)
        await asyncio.sleep(AGAIN_S)


async def _collected(address: str, *, expected: str | None) -> Snapshot:
    """Everything that the live run has to tell, as long as that takes no longer than two minutes."""
    shown = _Shown()
    with contextlib.closing(Database.open(None)) as database:
        async with collect(address, database, expected=expected, on_snapshot=shown.show) as collector:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTLED_S_MAX):
                    await collector.wait_caught_up()
            snapshot = await collector.snapshot()
    if snapshot is None:
        raise DipacoError("the run told nothing in two minutes", hint="is it the address of a coordinator?")
    return snapshot


def _of_folder(folder: Path) -> Snapshot:
    """What a leaderboard observed there, if there is one, and the documents of the run."""
    file = next((path for path in (folder / FILE, folder / IN_RUN_FOLDER / FILE) if path.exists()), None)
    now_s = SystemClock().now_s()
    with contextlib.closing(Database.open(None)) as database:
        if file is None:
            rebuild(folder, database)
            snapshot = stored_snapshot(database, load_stages(database), now_s=now_s)
        else:
            with contextlib.closing(Database.open(file)) as stored:
                snapshot = with_documents(stored, folder, now_s=now_s)
    assert snapshot is not None
    return replace(snapshot, peers_alive=0, peers_training=0, peers_relayed=0)


DECREES = "decrees"
"""Beside them in the coordinator's folder."""

D = TypeVar("D", Check, Contribution, Decree, Judgement, ModuleVersion)


def rebuild(folder: Path, database: Database) -> list[Stage]:
    """Fill an empty `database` from a coordinator's `folder`; the stages, the first one first.

    Raises ConfigError if the folder holds no run, and IntegrityError for manifests that do not belong together; other
    documents that are damaged are left out, and counted.
    """
    refusals = Refusals()
    runs = [
        open_run(_read(path)) for name in STAGES if (path := folder / name / "documents" / "manifest.json").exists()
    ]
    if not runs:
        raise ConfigError(f"`{folder}` holds no prepared run", hint="give the folder that `start --dir` was given")
    for before, after in zip(runs, runs[1:], strict=False):
        check_next_stage(before, after)
    stages = [Stage(runs[0], refusals)]
    stages += [Stage(run, refusals, stages[0].decrees) for run in runs[1:]]
    for stage in stages:
        take_documents(stage, folder)
        stage.first_seen.clear()  # nobody saw them
        database.write([write for write in stage.drain() if write[0] != "seen"])
    database.write([("refused", (reason, count)) for reason, count in refusals.counts.items()])
    return stages


def take_documents(stage: Stage, folder: Path) -> None:
    """Take in what a coordinator's `folder` holds of the stage; a folder without it changes nothing."""
    refusals, store = stage.refusals, folder / stage.run.manifest.stage
    stage.take_decrees(_sealed(Decree, folder / DECREES, "decree-*.json", refusals))
    for module in stage.run.topology.modules():
        versions = [*_sealed(ModuleVersion, store, f"version-{module}-*.json", refusals)]
        stage.take_versions(module, versions, now_s=0.0)
    stage.take_judgements(_sealed(Judgement, store, "judgement-*.json", refusals))
    counted = set(stage.missing())
    found = _sealed(Contribution, store, "contribution-*.json", refusals)
    stage.take_contributions([sealed for sealed in found if sealed.id in counted])
    stage.take_checks(_sealed(Check, store, "check-*.json", refusals))  # as far as this coordinator kept them


def _sealed(kind: type[D], store: Path, pattern: str, refusals: Refusals) -> Iterator[Any]:
    """The documents of a kind, in the order of their names."""
    for path in sorted(store.glob(f"documents/{pattern}")):
        try:
            value = _read(path)
        except IntegrityError:
            value = None
        sealed: Sealed[D] | None = refusals.read(kind, value)
        if sealed is not None:
            yield sealed


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise IntegrityError(f"{path.name} was damaged on disk: {error}") from None


# -- a snapshot, when no collector is at work


def load_stages(database: Database) -> list[Stage]:
    """What `database` holds, every signature checked again, and what it remembers to have refused. Raises as
    `Database.load`."""
    return database.load(Refusals(dict(database.observed().refused)))


def with_documents(database: Database, folder: Path, *, now_s: float) -> Snapshot | None:
    """The same, and what a coordinator's `folder` has besides: a collector that was ended may lack the end of a run.
    The database is not changed."""
    stages = load_stages(database)
    for stage in stages:
        take_documents(stage, folder)
    return stored_snapshot(database, stages, now_s=now_s)


def stored_snapshot(database: Database, stages: list[Stage], *, now_s: float, join: str = "") -> Snapshot | None:
    """Of what was loaded from `database`; None if that is nothing."""
    if not stages:
        return None
    observed = database.observed()
    judged_s = [sealed.document.at_s for stage in stages for sealed in stage.judgements.values()]
    heard_s = max([*judged_s, *([observed.heard_s] if observed.heard_s is not None else [])], default=None)
    live = Live(last_seen_s={PeerId(peer): at_s for peer, at_s in observed.last_seen_s.items()}, heard_s=heard_s)
    return take_snapshot(stages, now_s=now_s, live=live, refused=observed.refused, join=join)
