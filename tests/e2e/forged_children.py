"""The children of a `LocalSwarm`, forked by the forge: three seconds of a processor less for each start."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from e2e_harness import ENTRIES, POLL_S, forge
from forge import Forged

from bootstrap.processes import Child, Children


@dataclass(slots=True)
class Awaited:
    """A forged program; of `asyncio.subprocess.Process` what a `Child` uses."""

    forged: Forged

    @property
    def pid(self) -> int:
        return self.forged.pid

    @property
    def returncode(self) -> int | None:
        return self.forged.poll()

    def send_signal(self, number: int) -> None:
        self.forged.send_signal(number)

    async def wait(self) -> int:
        while (code := self.forged.poll()) is None:
            await asyncio.sleep(POLL_S)
        return code


class ForgedChildren(Children):
    """As `Children`, in the environment of the forge; what ends a child when its parent is gone is the test."""

    async def start(self, name: str, program: str, *arguments: str, log: Path, **streams: Any) -> Child:
        assert not streams, "all that a forged child says goes to its log"
        log.parent.mkdir(parents=True, exist_ok=True)
        [called] = [command for command, entry in ENTRIES.items() if entry == program]
        with log.open("ab") as file:
            forged = forge().start(called, program, arguments, out=file, err=file)
        self.children.append(Child(name, cast(asyncio.subprocess.Process, Awaited(forged)), log))
        return self.children[-1]
