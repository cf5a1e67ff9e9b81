"""A program's end of the control socket, in a thread: for the tests of the commands that ask it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
