"""The leaderboard as a program: follow a run and serve its pages; write them as files; make the tables again.

What is served is the newest snapshot. A run that does not answer is tried again and again: meanwhile the pages show
what the tables hold, and say how old it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dipaco_p2p.clock import SystemClock
from dipaco_p2p.errors import ConfigError, DipacoError, SwarmError
from dipaco_p2p.node.entry import is_entry
from dipaco_p2p.program.console import log_to, on_signals
from dipaco_p2p.program.files import folder_lock
from dipaco_p2p.program.web import listening, serve_app

from .collector import collect
from .database import Database
from .model import Snapshot
from .places import FILE, IN_RUN_FOLDER, LOG, SAID
from .rebuild import load_stages, rebuild, stored_snapshot, with_documents
from .web.app import make_app
from .web.export import export_site

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
    """Collect the run at `address` into `folder`, and serve it until a signal says stop. Raises DipacoError: also when
    nobody answers and there is nothing in the folder to show."""
    stopped = asyncio.Event()
    on_signals(stopped.set)
    refused = f"the leaderboard cannot listen on {place.host} port {place.port}"
    with (
        folder_lock(folder, hint="another leaderboard is at work there; end it, or choose another --dir"),
        listening(
            place.host, place.port, refused=refused, hint="choose another port, or 0 for any free one"
        ) as listener,
        _opened(folder / FILE) as database,
    ):
        log_to(folder / LOG, verbose=verbose)
        shown = _Shown()
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


async def export(source: str, to: Path, *, expected: str | None) -> Snapshot:
    """Write the whole site of `source` to the folder `to`: the address of a live run, the folder of a coordinator, or
    that of a leaderboard. Raises DipacoError."""
    if is_entry(source):
        snapshot = await _collected(source, expected=expected)
    else:
        snapshot = _of_folder(Path(source))
    export_site(snapshot, to, now_s=snapshot.taken_s)
    return snapshot


def rebuild_tables(folder: Path, to: Path) -> int:
    """Make the tables of a coordinator's `folder` again, into a new database `to`; how many versions there are.
    Raises ConfigError, IntegrityError."""
    if to.exists():
        raise ConfigError(f"`{to}` exists", hint="name a new file: what is there might have been observed, not signed")
    try:
        with _opened(to) as database:
            stages = rebuild(folder, database)
    except BaseException:
        to.unlink(missing_ok=True)  # half of it would look like all
        raise
    return sum(len(chain.versions) for stage in stages for chain in stage.chains.values())


class _Shown:
    """The snapshot that pages are made of."""

    newest: Snapshot | None = None

    def show(self, snapshot: Snapshot) -> None:
        self.newest = snapshot


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
    with _opened(None) as database:
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
    with _opened(None) as database:
        if file is None:
            rebuild(folder, database)
            snapshot = stored_snapshot(database, load_stages(database), now_s=now_s)
        else:
            with _opened(file) as stored:
                snapshot = with_documents(stored, folder, now_s=now_s)
    assert snapshot is not None
    return replace(snapshot, peers_alive=0, peers_training=0)


@contextlib.contextmanager
def _opened(file: Path | None) -> Iterator[Database]:
    database = Database.open(file)
    try:
        yield database
    finally:
        database.close()
