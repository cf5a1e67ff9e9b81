"""Child processes of the demo and of a coordinator: started through the public commands, and surely ended.

The leaderboard is one: it has none of the coordinator's keys and asks the swarm as anybody would. When it fails the run
goes on, and it is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dipaco_p2p.errors import DipacoError
from dipaco_p2p.node.doorplate import Doorplate
from leaderboard.places import IN_RUN_FOLDER, SAID

from .runfile import LeaderboardConfig

END_TIMEOUT_S = 40.0
PR_SET_PDEATHSIG = 1


def command_of(program: str, *arguments: str) -> list[str]:
    """What runs `program`, a module with a `main`."""
    return [sys.executable, "-c", f"from {program} import main; main()", *arguments]


@dataclass(slots=True)
class Child:
    """One program in a process of its own."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    @property
    def is_alive(self) -> bool:
        return self.process.returncode is None

    def kill(self) -> None:
        """SIGKILL: nothing is said, nothing is handed over."""
        self.process.send_signal(signal.SIGKILL)

    async def end(self) -> int:
        """SIGTERM, and SIGKILL for what does not go; its exit code."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.process.wait(), END_TIMEOUT_S)
        except TimeoutError:
            self.kill()
            return await self.process.wait()

    def last_words(self) -> str:
        """The end of its log, for an error message."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return " / ".join(text.strip().splitlines()[-3:])


@dataclass(slots=True)
class Children:
    """All processes of one program; `end_all` leaves none behind."""

    threads: int
    children: list[Child] = field(default_factory=list)

    async def start(
        self,
        name: str,
        program: str,
        *arguments: str,
        log: Path,
        output: int | None = None,
        is_quiet: bool = True,
        settings: Mapping[str, str] | None = None,
    ) -> Child:
        """Start `program` (a module with a `main`), its streams going to `log`; `output=PIPE` keeps stdout for us. What
        is not quiet says on our own error stream what goes wrong, or how far it is. `settings` go into its
        environment."""
        log.parent.mkdir(parents=True, exist_ok=True)
        command = command_of(program, *arguments)
        with log.open("ab") as file:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file if output is None else output,
                stderr=file if is_quiet else None,
                # What the user wishes of volunteers of their own, such as a schedule, is not for these.
                env=os.environ
                | {"OMP_NUM_THREADS": str(self.threads), "DIPACO_CONFIG": os.devnull}
                | dict(settings or {}),
                start_new_session=True,  # a Ctrl-C in the terminal is ours to pass on
                preexec_fn=_end_with_parent,
            )
        child = Child(name, process, log)
        self.children.append(child)
        return child

    async def end_all(self) -> None:
        """End volunteers before the coordinator, which they hand over to."""
        volunteers, rest = self.children[1:], self.children[:1]
        await asyncio.gather(*(child.end() for child in volunteers))
        await asyncio.gather(*(child.end() for child in rest))


def _end_with_parent() -> None:
    """Ask Linux to send this process SIGTERM when we die, even by SIGKILL; elsewhere there is no such wish."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def require_alive(child: Child, doing: str) -> None:
    """Raise DipacoError with the child's last words if it ended before its time."""
    if not child.is_alive:
        words = child.last_words() or "it said nothing"
        raise DipacoError(f"{child.name} ended while {doing}: {words}", hint=f"see {child.log}")


AGAIN_S = 10.0
ERRORS = "errors.log"
"""What the process says on its error stream; its own log, `leaderboard.log`, is beside."""
ERRORS_BYTES_MAX = 1024 * 1024
GIVES_UP = {2, 5, 6, 8}
"""Exit codes of what another try does not change: a wrong value, a taken port, another run, damaged tables."""


class PublicPage:
    """The process, from `begin` to `end`."""

    def __init__(self, config: LeaderboardConfig, folder: Path, *, verbose: bool = False) -> None:
        """`folder` is the run's; `verbose` is for the leaderboard's own log."""
        self._config = config
        self._verbose = verbose
        self._folder = folder
        self._children = Children(threads=1)
        self._work: asyncio.Task[None] | None = None

    def begin(self, plate: Doorplate) -> None:
        """Serve the run from now on, if that is wanted."""
        if self._config.serve:
            self._work = asyncio.create_task(self._keep(plate))

    async def end(self) -> None:
        """End it, and what it has started."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
        await self._children.end_all()

    async def _keep(self, plate: Doorplate) -> None:
        while True:
            child = await self._start(plate)
            await pass_on(child.process.stdout, lambda text: text.startswith(SAID))
            if await child.process.wait() in GIVES_UP:
                print(f"the leaderboard does not run: {child.last_words()}", flush=True)
                return
            await asyncio.sleep(AGAIN_S)

    async def _start(self, plate: Doorplate) -> Child:
        place = ("--host", self._config.host, "--port", str(self._config.port))
        folder = self._folder / IN_RUN_FOLDER
        run = ("--run", plate.run, "--join", plate.line, "--dir", str(folder), "--base", self._config.base)
        arguments = (*place, *run, *(["--verbose"] if self._verbose else []))
        errors = folder / ERRORS
        _keep_short(errors)
        command = ("bootstrap.cli", "leaderboard", "serve", plate.address, *arguments)
        return await self._children.start("the leaderboard", *command, log=errors, output=asyncio.subprocess.PIPE)


def _keep_short(errors: Path) -> None:
    """Each start appends to it; beyond a size it begins anew, and the one before is kept."""
    with contextlib.suppress(FileNotFoundError):
        if errors.stat().st_size > ERRORS_BYTES_MAX:
            errors.replace(errors.with_suffix(".1.log"))


async def pass_on(stream: asyncio.StreamReader | None, is_told: Callable[[str], bool]) -> None:
    """Print the lines of a child that are for whoever looks at us. All are read: a full pipe would stop it one day."""
    assert stream is not None
    async for line in stream:
        text = line.decode(errors="replace").rstrip()
        if is_told(text):
            print(text, flush=True)
