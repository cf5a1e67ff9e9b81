"""Helper processes of a benchmark, which answer JSON lines on their standard streams, and what processes use.

A helper ends when its standard input does, so also when the benchmark is killed. What is left of its process group is
killed then: hivemind's processes outlive those that started them. Figures of processes are Linux's, see proc(5).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from dipaco_p2p.errors import DipacoError
from peers.governor.machine import KIB, PROC, RESET_PEAK, cpu_of, descendants

REPO = Path(__file__).parents[1]
ASK_S = 600.0
END_S = 20.0
POLL_S = 0.05
LINE_BYTES_MAX = 1 << 20
LAST_LINES = 4
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # looked up before any fork
Values = dict[str, Any]
Handler = Callable[[Values], Awaitable[Values]]
"""Answers one request: what to do under `do`, and its arguments."""


class Helper:
    """One helper, from `start_helper` to `end`."""

    def __init__(self, name: str, process: Process, log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, do: str, **values: Any) -> Values:
        """What it answers; raises DipacoError if it cannot, or not in time."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **values}).encode() + b"\n")
            await self._process.stdin.drain()
            line = await asyncio.wait_for(self._process.stdout.readline(), ASK_S)
        except TimeoutError:
            raise DipacoError(f"{self.name} did not {do} within {ASK_S:.0f} s", hint=self._last_words()) from None
        except ConnectionError:
            line = b""
        if not line:
            raise DipacoError(f"{self.name} ended before it could {do}", hint=self._last_words())
        answer: Values = json.loads(line)
        if "error" in answer:
            raise DipacoError(f"{self.name} could not {do}: {answer['error']}", hint=self._last_words())
        return answer

    async def end(self) -> None:
        """Let it end in good order, and kill what is left after a while."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        until_s = time.monotonic() + END_S
        # Not `wait`: that also waits for the pipes, which its orphans may hold.
        while self._process.returncode is None and time.monotonic() < until_s:
            await asyncio.sleep(POLL_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        return " / ".join(lines[-LAST_LINES:])


async def start_helper(module: str, *arguments: str, name: str, log: Path, inside: Sequence[str] = ()) -> Helper:
    """Run `module` as a helper in a process group of its own; `inside` goes before its command."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            *(*inside, sys.executable, "-m", module, *arguments),
            stdin=PIPE,
            stdout=PIPE,
            stderr=file,
            cwd=REPO,
            limit=LINE_BYTES_MAX,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    return Helper(name, process, log)


def end_with_parent() -> None:
    """Let this process get SIGTERM when its parent dies, even by SIGKILL (Linux)."""
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def serve(opened: Callable[[], AbstractAsyncContextManager[Handler]]) -> None:
    """The helper's side: open, then answer one request after the other until the benchmark closes the pipe."""
    # Whatever a library prints from now on goes to the error stream: it is not an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asyncio.run(_serve(opened, answers))


async def _serve(opened: Callable[[], AbstractAsyncContextManager[Handler]], answers: TextIO) -> None:
    async with opened() as handle:
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                answer = await handle(json.loads(line))
            except DipacoError as error:
                traceback.print_exception(error)
                answer = {"error": str(error)}
            print(json.dumps(answer), file=answers, flush=True)


DAEMON = "p2pd"
"""The program that carries what libp2p's peers say."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of all cores together."""

    programs_s: float
    daemons_s: float

    def since(self, before: Spent) -> Spent:
        """What was spent after `before`."""
        return Spent(self.programs_s - before.programs_s, self.daemons_s - before.daemons_s)


def spent(*pids: int) -> Spent:
    """By these processes and all that descend from them, as far as they live."""
    programs_s = daemons_s = 0.0
    for pid in {one for root in pids for one in (root, *descendants(root))}:
        if _name(pid) == DAEMON:
            daemons_s += cpu_of(pid)
        else:
            programs_s += cpu_of(pid)
    return Spent(programs_s, daemons_s)


def _name(pid: int) -> str:
    try:
        return (PROC / str(pid) / "comm").read_text().strip()
    except OSError:  # it ended meanwhile
        return ""


def memory_bytes(pid: int, name: str, *, file: str = "status") -> int:
    """A figure of a process in memory, such as `VmRSS` or `VmHWM`; 0 for a process that has ended."""
    with contextlib.suppress(OSError):
        for line in (PROC / str(pid) / file).read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * KIB
    return 0


def forget_peak(pid: int) -> None:
    """Let a process's VmHWM begin anew from what it holds now."""
    (PROC / str(pid) / "clear_refs").write_text(RESET_PEAK, encoding="utf-8")
