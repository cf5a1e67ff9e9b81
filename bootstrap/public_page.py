"""The leaderboard beside a coordinator: a process of its own, with none of the coordinator's keys, that asks the swarm
as anybody would. When it fails the run goes on, and it is started again."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from dipaco_p2p.node.stages import Doorplate
from leaderboard.places import IN_RUN_FOLDER, SAID

from .processes import Child, Children
from .runfile import LeaderboardConfig

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
            await _pass_on(child)
            if await child.process.wait() in GIVES_UP:
                print(f"no leaderboard: {child.last_words()}", flush=True)
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


async def _pass_on(child: Child) -> None:
    """Print where it is, for whoever looks at the coordinator."""
    assert child.process.stdout is not None
    async for line in child.process.stdout:
        text = line.decode(errors="replace").rstrip()
        if text.startswith(SAID):
            print(text, flush=True)
