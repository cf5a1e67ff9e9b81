"""A program's end of the control socket, in a thread, and what the commands print that ask it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from dipaco_p2p.program.control.server import listening


@contextmanager
def answered(folder: Path, kind: Any, answer: Any) -> Iterator[None]:
    """Requests of `kind` for `folder` are answered by `answer` while the block runs."""
    loop, ready, leave = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def live() -> None:
        async with listening(folder, kind, answer):
            ready.set()
            await leave.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=[live()])
    thread.start()
    assert ready.wait(20)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(leave.set)
        thread.join()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def printed(app: typer.Typer, *words: str | Path, code: int = 0) -> str:
    """What a command of `app` prints, errors too."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output
