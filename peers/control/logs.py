"""The log that a volunteer leaves in its home: its last lines, and those that come."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dipaco_p2p.errors import ConfigError
from dipaco_p2p.program.text import printable

LOG_NAME = "peer.log"
BLOCK_BYTES = 65_536
TAIL_BYTES_MAX = 8 * 1024 * 1024
"""Further back nothing is looked for, however many lines are wanted."""
LOOK_S = 0.5
"""Between two looks for more."""


def newest_log(home: Path) -> Path:
    """The log that was written to last; raises ConfigError if there is none."""
    found = sorted(home.glob(f"runs/*/{LOG_NAME}"), key=_written_s)
    if not found:
        raise ConfigError(f"no volunteer has left a log in `{home}`", hint="name its folder with --home")
    return found[-1]


def last_lines(path: Path, count: int) -> tuple[list[str], int]:
    """The last `count` whole lines, and the place in the file after them."""
    with path.open("rb") as file:
        end = start = file.seek(0, os.SEEK_END)
        data = b""
        while start and data.count(b"\n") <= count and end - start < TAIL_BYTES_MAX:
            step = min(BLOCK_BYTES, start)
            start = file.seek(start - step)
            data = file.read(step) + data
    whole = data[: data.rfind(b"\n") + 1]
    lines = whole.decode(errors="replace").splitlines()
    return (lines[-count:] if count else []), start + len(whole)


def follow(home: Path, path: Path, place: int, *, sleep: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """Lines as they come, without an end; the log of a new stage is gone over to, and a cut one is begun anew."""
    rest = b""
    while True:
        size = path.stat().st_size if path.exists() else 0
        if size < place:
            place, rest = 0, b""
        if size > place:
            with path.open("rb") as file:
                file.seek(place)
                data = file.read(BLOCK_BYTES)
            place += len(data)
            *whole, rest = (rest + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
            continue
        newest = newest_log(home)
        if newest != path:
            path, place, rest = newest, 0, b""
            continue
        sleep(LOOK_S)


def clean(line: str) -> str:
    """A line as it may go to a terminal."""
    return printable(line.replace("\t", "    "))


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
