"""What a peer did, as JSON lines: for people, for the demo's table, and for an offline checker.

One event a line, `{"ev": "...", "t": seconds, ...}`. Bounded: beyond a size the file is rotated once.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..clock import Clock

log = logging.getLogger(__name__)

HISTORY_NAME = "history.jsonl"
"""In the folder of a stage."""
HISTORY_BYTES_MAX = 32 * 1024 * 1024


class History:
    """Appends events to a file and tells them to listeners (a display, a test)."""

    def __init__(self, path: Path | None, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._listeners: list[Callable[[dict[str, Any]], None]] = []

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> None:
        self._listeners.append(listener)

    def add(self, ev: str, **values: Any) -> None:
        """Note an event; `values` are plain JSON values."""
        event = {"ev": ev, "t": self._clock.now_s(), **values}
        for listener in self._listeners:
            listener(event)
        if self._path is not None:
            self._append(json.dumps(event, separators=(",", ":")) + "\n")

    def _append(self, line: str) -> None:
        assert self._path is not None
        try:
            self._write(self._path, line)
        except OSError as error:  # a full disk or a lost folder must not keep a peer from stopping in good order
            log.error("an event was not written to %s: %s", self._path, error)

    def _write(self, path: Path, line: str) -> None:
        if path.exists() and path.stat().st_size > HISTORY_BYTES_MAX:
            path.replace(path.with_suffix(".1.jsonl"))
        with path.open("ab+") as file:
            file.write((b"" if self._ends_whole(file) else b"\n") + line.encode())

    @staticmethod
    def _ends_whole(file: BinaryIO) -> bool:
        """Whether the last line has its end: a crash may have cut it short, and must not take the next one along."""
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def read_history(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a history file; a line that a crash cut short, or the disk damaged, is left out."""
    for part in (path.with_suffix(".1.jsonl"), path):
        if part.exists():
            for line in part.read_text(errors="replace").splitlines():
                try:
                    yield json.loads(line)
                except ValueError:
                    continue
