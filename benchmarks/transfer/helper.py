"""Helper processes of a benchmark: asked in JSON lines through their standard streams, and surely ended.

A helper ends when its standard input does, so also when the benchmark is killed. What is left of its process group is
killed then: hivemind's processes outlive those that started them.
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
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

from dipaco_p2p.errors import DipacoError

REPO = Path(__file__).parents[2]
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
            raise DipacoError(f"{self.name} ended when it was to {do}", hint=self._last_words())
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
            preexec_fn=_end_with_parent,
        )
    return Helper(name, process, log)


def _end_with_parent() -> None:
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def serve(opened: Callable[[], AbstractAsyncContextManager[Handler]]) -> None:
    """The helper's side: open, then answer one request after the other until the benchmark closes the pipe."""
    asyncio.run(_serve(opened, _answers()))


async def _serve(opened: Callable[[], AbstractAsyncContextManager[Handler]], answers: TextIO) -> None:
    async with opened() as handle:
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                answer = await handle(json.loads(line))
            except DipacoError as error:
                answer = _error(error)
            print(json.dumps(answer), file=answers, flush=True)


def serve_plainly(opened: Callable[[], AbstractContextManager[Callable[[Values], Values]]]) -> None:
    """As `serve`, without an event loop: for what forks."""
    answers = _answers()
    with opened() as handle:
        while line := sys.stdin.readline():
            try:
                answer = handle(json.loads(line))
            except DipacoError as error:
                answer = _error(error)
            print(json.dumps(answer), file=answers, flush=True)


def _answers() -> TextIO:
    """Our standard output; whatever a library prints from now on goes to the error stream, since it is no answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _error(error: DipacoError) -> Values:
    traceback.print_exc()
    return {"error": str(error)}
