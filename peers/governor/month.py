"""What was sent and received in this calendar month, kept in the home folder: {"month": "2026-11", "bytes": 123}.

Counted are calls with their headers, as the swarm counts them: blobs, modules, receipts, questions. What the DHT, TCP
and IP add is not seen here. Written whole or not at all, whenever a MB has moved; a crash loses less than what
moves between two looks. A later month begins at zero; a clock that was set back does not.
"""

from __future__ import annotations

import json
import logging
from datetime import datetime, tzinfo
from pathlib import Path

from dipaco_p2p.errors import EnvironmentUnfit
from dipaco_p2p.program.files import write_atomically

log = logging.getLogger(__name__)

FILE_NAME = "month.json"
SAVE_BYTES = 10**6


class MonthAccount:
    """The account of one home."""

    def __init__(self, home: Path, *, now_s: float, zone: tzinfo | None = None) -> None:
        self._path = home / FILE_NAME
        self._zone = zone
        self._month, self._bytes = self._load()
        self._counter = 0
        """What the swarm had counted at the last look."""
        self._saved_bytes = self._bytes
        self._turn(now_s)

    @property
    def used_bytes(self) -> int:
        return self._bytes

    def count(self, total_bytes: int, *, now_s: float) -> None:
        """The swarm has moved `total_bytes` since it was opened."""
        self._turn(now_s)
        self._bytes += max(0, total_bytes - self._counter)
        self._counter = total_bytes
        if self._bytes - self._saved_bytes >= SAVE_BYTES:
            self.save()

    def save(self) -> None:
        """Write it down; a disk that will not is said in the log."""
        try:
            write_atomically(self._path, json.dumps({"month": self._month, "bytes": self._bytes}).encode())
            self._saved_bytes = self._bytes
        except EnvironmentUnfit as error:
            log.warning("this month's traffic was not noted: %s", error)

    def _turn(self, now_s: float) -> None:
        month = f"{datetime.fromtimestamp(now_s, self._zone):%Y-%m}"
        if month > self._month:
            self._month, self._bytes, self._saved_bytes = month, 0, 0

    def _load(self) -> tuple[str, int]:
        try:
            value = json.loads(self._path.read_bytes())
            month, count = str(value["month"]), int(value["bytes"])
            datetime.strptime(month, "%Y-%m")
            return month, max(0, count)
        except FileNotFoundError:
            return "", 0
        except (OSError, ValueError, TypeError, KeyError):
            log.warning("%s is damaged: this month's traffic counts from now on", self._path)
            return "", 0
