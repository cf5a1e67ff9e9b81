"""How a line of our own log looks: for people, or one JSON object a line for programs that collect logs.

    {"time":"2026-03-01T12:00:00.123Z","level":"WARNING","logger":"bootstrap.stage","message":"...","traceback":"..."}

`traceback` is there only for an error that has one.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from enum import StrEnum

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LogFormat(StrEnum):
    """Of the file that a program logs to."""

    TEXT = "text"
    JSON = "json"


def formatter_of(kind: LogFormat) -> logging.Formatter:
    """What writes a line."""
    return JsonLines() if kind is LogFormat.JSON else logging.Formatter(TEXT_FORMAT)


class JsonLines(logging.Formatter):
    """One object a line, in ASCII: line breaks and control characters of a message are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"time": time, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, separators=(",", ":"))
