"""The peers met last time, by what was typed then: a way back into a run whose seed nodes are all away.

    acquaintances.json     {run of the ticket, or typed address: {"run": id of its first stage, "addresses": [...]}}

The run is remembered with them, and only it is joined through them: trust begins at what was typed once. A ticket
finds those, too, who were met when the same run was joined by an address, or by an older ticket.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from dipaco_p2p.errors import ConfigError, EnvironmentUnfit
from dipaco_p2p.program.files import write_atomically
from dipaco_p2p.swarm.addresses import read_address

log = logging.getLogger(__name__)

RUNS_MAX = 8
ADDRESSES_MAX = 16


class Acquaintances:
    """What one home remembers; a damaged file is forgotten."""

    def __init__(self, home: Path) -> None:
        self._path = home / "acquaintances.json"

    def of(self, key: str) -> tuple[str | None, list[str]]:
        """The run that was joined by `key`, an address or a run, and who else was there; None and nobody at first."""
        known = self._read()
        entry = known.get(key) or next((one for one in known.values() if _run_of(one) == key), None)
        if not isinstance(entry, dict) or not isinstance(entry.get("run"), str):
            return None, []
        found = entry.get("addresses")
        others = [text for text in found if _is_address(text)] if isinstance(found, list) else []
        return entry["run"], others[:ADDRESSES_MAX]

    def remember(self, key: str, *, run: str, addresses: Sequence[str]) -> None:
        """Who is there now; the runs that were joined longest ago make room."""
        before = self._read()
        known = dict([item for item in before.items() if item[0] != key][-(RUNS_MAX - 1) :])
        entry = {"run": run, "addresses": list(addresses[:ADDRESSES_MAX])}
        if before.get(key) == entry:
            return
        try:
            write_atomically(self._path, json.dumps({**known, key: entry}).encode())
        except EnvironmentUnfit as error:
            log.warning("who is in the run was not noted: %s", error)

    def _read(self) -> dict[str, object]:
        try:
            value = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}


def _run_of(entry: object) -> object:
    return entry.get("run") if isinstance(entry, dict) else None


def _is_address(text: object) -> bool:
    try:
        read_address(str(text))
    except ConfigError:
        return False
    return True
