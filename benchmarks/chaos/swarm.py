"""A swarm of processes on this machine, started through the two command lines as users do, ended by their pids.

Every member has a folder `<work>/<name>` and a log beside it; a member that starts again has the same ones. A seed node
that is to be found again after a fault needs a port in its run file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bootstrap.processes import Child, Children, require_alive
from dipaco_p2p.errors import ConfigError, DipacoError, Interrupted
from dipaco_p2p.swarm.hivemind.daemon import sweep_stale_sockets

from .evidence import Done
from .schedule import SEED_NODE, Verb

POLL_S = 0.1
OPEN_S = 120.0
"""Until a seed node is open: imports, and preparing the run."""
LEAVE_S = 30.0
"""A member that is told to end has this long before it is killed."""
NUMBERS = {Verb.KILL: signal.SIGKILL, Verb.TERM: signal.SIGTERM, Verb.FREEZE: signal.SIGSTOP, Verb.THAW: signal.SIGCONT}


@dataclass(slots=True)
class LocalSwarm:
    """The members of one run, by name; `end` leaves none behind, frozen ones included."""

    work: Path
    run_file: Path
    address: str = ""
    members: dict[str, Child] = field(default_factory=dict)
    """The newest process of each member."""
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

    async def open(self) -> str:
        """Start the seed node and wait until it is open; the address to join with. Raises DipacoError."""
        (self.folder / "address.json").unlink(missing_ok=True)
        await self.start(SEED_NODE)
        deadline_s = time.monotonic() + OPEN_S
        while not (self.folder / "address.json").exists():
            require_alive(self.members[SEED_NODE], "opening the run")
            if time.monotonic() > deadline_s:
                raise DipacoError(f"the seed node was not open within {OPEN_S:.0f} s", hint=f"see {self.work}")
            await asyncio.sleep(POLL_S)
        self.address = json.loads((self.folder / "address.json").read_text())["address"]
        return self.address

    async def start(self, name: str) -> None:
        """Start a member, for the first time or again, with what is on its disk."""
        if name == SEED_NODE:
            program, arguments = "bootstrap.cli", ["start", str(self.run_file), "--dir", str(self.folder)]
        else:
            listen = ("--listen", "/ip4/127.0.0.1/tcp/0")
            # Exact: eight compilers at once on two cores would be most of a short run, and only of the first.
            engine = ["--device", "cpu", "--threads", "1", "--engine", "exact"]
            arguments = ["join", self.address, "--home", str(self.home(name)), *engine]
            program, arguments = "peers.cli", [*arguments, *listen]
        log = self.work / f"{name}.log"
        self.members[name] = await self._children.start(name, program, *arguments, log=log)

    async def act(self, verb: Verb, name: str) -> Done:
        """Do this to a member now. One that should start while it still ends in good order is waited for."""
        if verb is Verb.START:
            if name in self.members:
                await self._gone(self.members[name])
            await self.start(name)
        elif self.members[name].is_alive:
            self.members[name].process.send_signal(NUMBERS[verb])
        self.done.append(Done(t_s=time.time(), verb=verb, name=name))
        return self.done[-1]

    def wipe(self, name: str) -> None:
        """Delete the disk of a member that does not run."""
        assert not self.members[name].is_alive, name
        shutil.rmtree(self.home(name))

    async def kill_all(self) -> None:
        """A total outage: SIGKILL for everybody at once."""
        for name, child in self.members.items():
            if child.is_alive:
                await self.act(Verb.KILL, name)
        await asyncio.gather(*(child.process.wait() for child in self.members.values()))

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


@contextlib.contextmanager
def told_when_stopped() -> Iterator[None]:
    """Turns the cancellation by Ctrl-C or SIGTERM into words; the block has ended all its programs by then."""
    try:
        yield
    except asyncio.CancelledError:
        raise Interrupted("stopped; all programs have ended", hint="name a new folder for --out next time") from None
