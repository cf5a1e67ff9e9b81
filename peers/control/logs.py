"""What happened, as `dipaco-peer logs` tells it: rounds, receipts and the rest of the history in the words of the
screen, and the program's own log between them, in the order of time.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dipaco_p2p.program.history import HISTORY_NAME

from ..display import words_for
from .home import BLOCK_BYTES, LOG_NAME, clean, last_lines, newest_log

LOOK_S = 0.5
"""Between two looks for more."""
EVENTS_PER_LINE = 4
"""So many events are read for each line that is wanted: most have words, but not all."""
TEXT_TIME = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) ")


@dataclass(frozen=True, slots=True)
class Line:
    """One line as it may go to a terminal, and when it was written."""

    at_s: float
    text: str


def last_told(home: Path, count: int) -> tuple[list[str], list[Tail]]:
    """The last `count` lines of the newest stage, and what to `follow` it with; raises ConfigError without a log."""
    folder = newest_log(home).parent
    tails = [Tail(folder / name) for name in (HISTORY_NAME, LOG_NAME)]
    told = sorted((line for tail in tails for line in tail.last(count)), key=lambda line: line.at_s)
    return [line.text for line in (told[-count:] if count else [])], tails


def follow(home: Path, tails: list[Tail], *, sleep: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """Lines as they come, without an end; a new stage is gone over to, and a file that was cut is begun anew."""
    while True:
        more = [line for tail in tails for line in tail.more()]
        yield from (line.text for line in sorted(more, key=lambda line: line.at_s))
        if more:
            continue
        folder = newest_log(home).parent
        if folder != tails[0].path.parent:
            tails = [Tail(folder / tail.path.name) for tail in tails]
            continue
        sleep(LOOK_S)


class Tail:
    """The end of one file, from the place up to which it was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = _event if path.name == HISTORY_NAME else _logged
        self._place = 0
        self._rest = b""
        self._at_s = 0.0

    def last(self, count: int) -> list[Line]:
        """What its last whole lines tell; go on after them."""
        if not self.path.exists():
            return []
        lines, self._place = last_lines(self.path, count * (EVENTS_PER_LINE if self.path.name == HISTORY_NAME else 1))
        return self._told(lines)

    def more(self) -> list[Line]:
        """What has come since: of at most a block, unless that tells nothing. Empty at the end of the file alone."""
        told: list[Line] = []
        while not told and (data := self._block()):
            *whole, self._rest = (self._rest + data).split(b"\n")
            told = self._told([line.decode(errors="replace") for line in whole])
        return told

    def _block(self) -> bytes:
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < self._place:
            self._place, self._rest = 0, b""
        if size == self._place:
            return b""
        with self.path.open("rb") as file:
            file.seek(self._place)
            data = file.read(BLOCK_BYTES)
        self._place += len(data)
        return data

    def _told(self, lines: list[str]) -> list[Line]:
        found = []
        for line in lines:
            if (read := self._read(line, self._at_s)) is not None:
                self._at_s = read.at_s
                found.append(Line(read.at_s, clean(read.text)))
        return found


def _event(line: str, before_s: float) -> Line | None:
    """An event of the history, if the screen has words for it."""
    try:
        event = json.loads(line)
        at_s, words = float(event["t"]), words_for(event)
    except (ValueError, TypeError, KeyError, AttributeError):  # cut short by a crash, or of another version
        return None
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
    return Line(at_s, f"{at} {words}") if words else None


def _logged(line: str, before_s: float) -> Line:
    """A line of the log; one without a time, as of a traceback, belongs to the line before it."""
    if found := TEXT_TIME.match(line):
        at = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S")  # local, as logging writes it
        return Line(at.timestamp() + int(found[2]) / 1000, line)
    try:
        written: dict[str, Any] = json.loads(line)
        return Line(datetime.fromisoformat(written["time"]).timestamp(), line)
    except (ValueError, TypeError, KeyError):
        return Line(before_s, line)
