"""A swarm of processes on this machine, started through the two command lines as users start them.

Every member has a folder `<work>/<name>` with a log beside it, and keeps them when it starts again. A seed node that is
to be found again after a fault needs a port in its run file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bootstrap.processes import Child, Children, require_alive
from bootstrap.progress import stage
from dipaco_p2p.errors import ConfigError, DipacoError, Interrupted
from dipaco_p2p.program.history import read_history
from dipaco_p2p.swarm.hivemind.daemon import sweep_stale_sockets

from .evidence import Done
from .observer import OBSERVER, observe
from .schedule import SEED_NODE, Action, Verb, volunteers

POLL_S = 0.1
OPEN_S = 300.0
"""Until a seed node is open: imports, and preparing the run."""
START_S, START_EACH_S = 240.0, 30.0
"""Until every volunteer has had its first receipt, and for each one besides."""
START_PAUSE_S = 0.5
"""Between two starts: all at once they would only wait for each other's imports."""
LEAVE_S = 30.0
"""A member that should end has this long before it is killed."""
# Exact: eight compilers at once on two cores would be most of a short run, and only of the first.
OPTIONS = ("--device", "cpu", "--threads", "1", "--engine", "exact", "--listen", "/ip4/127.0.0.1/tcp/0")
SIGNALS = {Verb.KILL: signal.SIGKILL, Verb.TERM: signal.SIGTERM, Verb.FREEZE: signal.SIGSTOP, Verb.THAW: signal.SIGCONT}
STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When the clock of a run began and ended."""

    began_s: float
    ended_s: float
    busy: float
    """Share of the machine's processors that was in use, by any program; at 1.0 times say little."""


@dataclass(slots=True)
class LocalSwarm:
    """The members of one run, by name; `end` leaves none behind, frozen ones included."""

    work: Path
    run_file: Path
    address: str = ""
    members: dict[str, Child] = field(default_factory=dict)
    """The newest process of each member."""
    options: tuple[str, ...] = OPTIONS
    """Of volunteers that are started without others."""
    pause_s: float = START_PAUSE_S
    """Between two starts."""
    done: list[Done] = field(default_factory=list)
    _children: Children = field(default_factory=lambda: Children(threads=1))

    @property
    def folder(self) -> Path:
        """The seed's."""
        return self.work / SEED_NODE

    @property
    def volunteers(self) -> list[str]:
        return [name for name in self.members if name != SEED_NODE]

    def home(self, name: str) -> Path:
        return self.work / name

    async def live(
        self,
        peers: int,
        schedule: Sequence[Action],
        *,
        duration_s: float,
        title: str,
        on_done: Callable[[Done], None] = lambda done: None,
        on_tick: Callable[[], None] = lambda: None,
    ) -> Span:
        """The whole life of a run with `peers` volunteers under an observer's eyes. Its clock begins when each of them
        has had a receipt. Raises DipacoError; all programs have ended by then."""
        try:
            await self.open()
            async with observe(self.address, self.work / OBSERVER):
                await self.begin(volunteers(peers))
                began_s, before = time.time(), _ticks()
                with stage(title, total=round(duration_s)) as advance:

                    def tick() -> None:
                        on_tick()
                        advance(round(time.time() - began_s))

                    await self.play(schedule, duration_s=duration_s, on_done=on_done, on_tick=tick)
                busy, total = (now - then for now, then in zip(_ticks(), before, strict=True))
                return Span(began_s=began_s, ended_s=time.time(), busy=busy / total if total else 0.0)
        finally:
            await self.end()

    async def open(self) -> None:
        """Start the seed node and wait until it is open. Raises DipacoError."""
        (self.folder / "address.json").unlink(missing_ok=True)
        await self.start(SEED_NODE)
        deadline_s = time.monotonic() + OPEN_S
        while not (self.folder / "address.json").exists():
            require_alive(self.members[SEED_NODE], "opening the run")
            if time.monotonic() > deadline_s:
                raise DipacoError(f"the seed node was not open within {OPEN_S:.0f} s", hint=f"see {self.work}")
            await asyncio.sleep(POLL_S)
        self.address = json.loads((self.folder / "address.json").read_text())["address"]

    async def begin(self, names: Sequence[str]) -> None:
        """Start these volunteers, and wait for each one's first receipt. Raises DipacoError."""
        for name in names:
            await self.start(name)
            await asyncio.sleep(self.pause_s)
        limit_s = START_S + START_EACH_S * len(names)
        deadline_s = time.monotonic() + limit_s
        with stage(f"Starting {len(names)} volunteers in {self.work.name}"):
            while missing := [name for name in names if not _has_receipt(self.home(name))]:
                self.require_up()
                if time.monotonic() > deadline_s:
                    message = f"no receipt within {limit_s:.0f} s for {', '.join(missing)}"
                    raise DipacoError(message, hint=f"see the logs in {self.work}")
                await asyncio.sleep(POLL_S)

    async def play(
        self,
        schedule: Sequence[Action],
        *,
        duration_s: float,
        on_done: Callable[[Done], None] = lambda done: None,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Do every action at its second, or as soon as the one before it is done, and return after `duration_s`.
        Raises DipacoError when a member that has had no fault ends."""
        began_s, waiting = time.monotonic(), list(schedule)
        while (elapsed_s := time.monotonic() - began_s) < duration_s or waiting:
            while waiting and waiting[0].at_s <= elapsed_s:
                action = waiting.pop(0)
                on_done(await self.act(action.verb, action.name))
            self.require_up()
            on_tick()
            await asyncio.sleep(POLL_S)

    async def start(self, name: str, *options: str) -> None:
        """Start a member, for the first time or again, with what is on its disk; `options` are a volunteer's."""
        if name == SEED_NODE:
            program, arguments = "bootstrap.cli", ["start", str(self.run_file), "--dir", str(self.folder)]
        else:
            arguments = ["join", self.address, "--home", str(self.home(name)), *(options or self.options)]
            program = "peers.cli"
        self.members[name] = await self._children.start(name, program, *arguments, log=self.work / f"{name}.log")

    async def act(self, verb: Verb, name: str) -> Done:
        """Do this to a member now. Before a start, wait for a process of it that is still ending in good order."""
        if verb is Verb.START:
            if name in self.members:
                await self._gone(self.members[name])
            await self.start(name)
        elif self.members[name].is_alive:
            self.members[name].process.send_signal(SIGNALS[verb])
        self.done.append(Done(t_s=time.time(), verb=verb, name=name))
        return self.done[-1]

    async def end(self) -> None:
        """SIGTERM for all, volunteers first; SIGKILL for what does not go."""
        for child in self.members.values():
            if child.is_alive:
                child.process.send_signal(signal.SIGCONT)
        await asyncio.gather(*(self.members[name].end() for name in self.volunteers))
        await self._children.end_all()
        sweep_stale_sockets()  # a killed program cannot remove its own

    def require_up(self) -> None:
        """Raise DipacoError if a member ended that nothing was done to."""
        touched = {done.name for done in self.done}
        for name, child in self.members.items():
            if name not in touched and child.process.returncode not in (None, 0):
                require_alive(child, "taking part")

    async def _gone(self, child: Child) -> None:
        try:
            await asyncio.wait_for(child.process.wait(), LEAVE_S)
        except TimeoutError:
            child.kill()
            await child.process.wait()


def require_new(out: Path) -> None:
    """Raise ConfigError for a folder with something in it: results of two runs would mix."""
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"`{out}` is not empty", hint="name a new folder for --out")


def copy_prepared(source: Path, target: Path) -> None:
    """Copy the folder of a member of a run that has not begun."""
    shutil.copytree(
        source, target, ignore=shutil.ignore_patterns("address.json", "history.jsonl", "*.tmp", "control.*")
    )


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Turns the cancellation by Ctrl-C or SIGTERM into words; the block has ended all its programs by then."""
    try:
        yield
    except asyncio.CancelledError:
        raise Interrupted("stopped; all programs have ended", hint="name a new folder for --out next time") from None


def _has_receipt(home: Path) -> bool:
    return any(row["ev"] == "receipt" for path in home.glob("runs/*/history.jsonl") for row in read_history(path))


def _ticks() -> tuple[int, int]:
    """Ticks of all processors since boot: in use, and in all (Linux, proc(5)). Zeros without that file."""
    if not STAT.exists():
        return 0, 0
    counters = [int(word) for word in STAT.read_text().split("\n", 1)[0].split()[1:9]]
    idle, waiting_for_disk = counters[3:5]
    return sum(counters) - idle - waiting_for_disk, sum(counters)
