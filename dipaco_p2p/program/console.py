"""How a program ends: `error: ...` and `hint: ...` on the error stream, and the exit code of errors.py."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import platform
import signal
import sys
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from enum import StrEnum
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, NoReturn

from .. import __version__
from ..errors import EXIT_SECOND_INTERRUPT, DipacoError, EnvironmentUnfit, Interrupted
from ..words import printable, printable_line
from .files import OPEN_FILES_ERRORS, allow_open_files, too_many_files

log = logging.getLogger(__name__)

SHOW_CURSOR = "\x1b[?25h"
"""Progress bars and panels hide it."""
LOGGED = ("dipaco_p2p", "peers", "bootstrap", "leaderboard", "asyncio")
"""Whose messages go into the log. asyncio complains of searches that hivemind leaves unfinished, which is not for the
user's screen."""
LOG_BYTES_MAX = 16 * 1024 * 1024
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


class LogFormat(StrEnum):
    """Of the file that a program logs to."""

    TEXT = "text"
    JSON = "json"


def run_program(main: Callable[[], Coroutine[Any, Any, int | None]]) -> int:
    """Run `main` to its end; the exit code, which `main` may return. Errors of the tree become one line and a hint,
    without a traceback.

    SIGINT and SIGTERM cancel `main` until it has a way of its own to stop, see `on_signals`.
    """
    try:
        _require_linux()
        allow_open_files()
        return asyncio.run(_stoppable(main)) or 0
    except DipacoError as error:
        print_error(error)
        return error.exit_code
    except OSError as error:  # a full disk can be met at any write: of a history, a log, a cache
        unfit = _unfit(error)
        if unfit is None:
            raise
        print_error(unfit)
        return unfit.exit_code
    except KeyboardInterrupt:
        return EXIT_SECOND_INTERRUPT


def _unfit(error: OSError) -> EnvironmentUnfit | None:
    """What to tell of it if this machine is the cause; None if it may be a mistake of ours."""
    if error.errno in OPEN_FILES_ERRORS:
        return too_many_files(error.filename or "a connection")
    if error.errno not in DISK_ERRORS:
        return None
    where = f" for {error.filename}" if error.filename else ""
    problem = (error.strerror or str(error)).lower()
    return EnvironmentUnfit(f"{problem}{where}", hint="free some space, or choose another folder")


def run_command(work: Callable[[], int | None]) -> int:
    """The exit code of `work`, which asks and prints, and needs no event loop: what it raises is said as above."""
    code = None
    try:
        code = work()
        sys.stdout.flush()
    except DipacoError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_SECOND_INTERRUPT
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code or 0


def _require_linux() -> None:
    """Which user is behind a socket, which cores are ours, who else uses the machine: all this is asked of Linux."""
    if sys.platform != "linux":
        hint = "take WSL2 on Windows, and a virtual machine elsewhere: docs/join.md says what was tried"
        raise EnvironmentUnfit(f"this program runs on Linux, and this is {sys.platform}", hint=hint)


async def _stoppable(main: Callable[[], Coroutine[Any, Any, int | None]]) -> int | None:
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await main()
    except asyncio.CancelledError:  # what was open is closed, its daemon too
        interrupted = Interrupted("stopped before it was ready", hint="the same command starts again")
        print_error(interrupted)
        _leave_now(interrupted.exit_code)  # a thread that prepares a run takes minutes, and cannot be cancelled


def _leave_now(code: int) -> NoReturn:
    """End the process without waiting for its threads, and give the terminal its cursor back."""
    if sys.stderr.isatty():
        sys.stderr.write(SHOW_CURSOR)
    sys.stderr.flush()
    os._exit(code)


def print_error(error: DipacoError) -> None:
    """`error: what, with which value`, its notes, then `hint: what to do`, a line each: some words are other peers'."""
    print(f"error: {printable_line(str(error))}", file=sys.stderr)
    for note in error.notes:
        print(f"  {printable_line(note)}", file=sys.stderr)
    if error.hint:
        print(f"hint: {printable_line(error.hint)}", file=sys.stderr)


def on_signals(stop: Callable[[], None]) -> None:
    """The first SIGINT or SIGTERM calls `stop`; the second leaves at once."""
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def handle(number: int) -> None:
        if seen:
            _leave_now(EXIT_SECOND_INTERRUPT)  # the libp2p daemon ends by itself within a second of its parent
        seen.append(number)
        stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle, number)


def log_to(path: Path, *, verbose: bool, kind: LogFormat = LogFormat.TEXT) -> None:
    """Our own log goes to a file, after what is there; beyond a size that file becomes `<name>.1`, in place of an
    earlier one. It begins with what runs, so that no log of a program that ran is empty. What the user must see is
    printed by the program itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.raiseExceptions = False  # on a full disk the log is the least loss, and says nothing new
    handler = RotatingFileHandler(path, maxBytes=LOG_BYTES_MAX, backupCount=1)
    handler.setFormatter(_formatter_of(kind))
    for name in LOGGED:
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG if verbose else logging.INFO)
        logger.propagate = False
    log.info("dipaco-p2p %s, Python %s on %s", __version__, platform.python_version(), platform.platform())


def _formatter_of(kind: LogFormat) -> logging.Formatter:
    """What writes a line."""
    return JsonLines() if kind is LogFormat.JSON else TextLines(TEXT_FORMAT)


class TextLines(logging.Formatter):
    """A line for each message, whatever is in it. A traceback has its lines, and no other control characters."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(printable, super().formatException(ei).split("\n")))


class JsonLines(logging.Formatter):
    """One object a line, in ASCII: line breaks and control characters of a message are escaped.

        {"time":"2026-03-01T12:00:00.123Z","level":"WARNING","logger":"bootstrap.coordinator.stage","message":"...","traceback":"..."}

    `traceback` is there only for an error that has one.
    """

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"time": time, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, separators=(",", ":"))
