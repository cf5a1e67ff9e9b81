"""Child processes of the demo and of a coordinator: started through the public commands, and surely ended."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

from dipaco_p2p.errors import DipacoError

END_TIMEOUT_S = 40.0
PR_SET_PDEATHSIG = 1


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
    ) -> Child:
        """Start `program` (a module with a `main`), its streams going to `log`; `output=PIPE` keeps stdout for us. What
        is not quiet says on our own error stream what goes wrong, or how far it is."""
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", f"from {program} import main; main()", *arguments]
        with log.open("ab") as file:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file if output is None else output,
                stderr=file if is_quiet else None,
                # What the user wishes of volunteers of their own, such as a schedule, is not for these.
                env=os.environ | {"OMP_NUM_THREADS": str(self.threads), "DIPACO_CONFIG": os.devnull},
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
