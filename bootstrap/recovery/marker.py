"""What says that a folder came out of a backup, and whether its coordinator may sign again.

    <dir>/restored.json     {"schema": ..., "made_s": when the backup was made, "is_caught_up": whether it may sign}

It is there from `restore` on, until the coordinator knows what it signed after the backup, and its archive is whole.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from dipaco_p2p.errors import EnvironmentUnfit, IntegrityError
from dipaco_p2p.program.files import write_atomically

NAME = "restored.json"
SCHEMA = "dipaco.restored/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """Of a folder."""

    made_s: float
    is_caught_up: bool = False


def read_marker(root: Path) -> Marker | None:
    """None for a folder that never came out of a backup, or has long caught up; raises IntegrityError."""
    try:
        value = json.loads((root / NAME).read_bytes())
        return Marker(made_s=float(value["made_s"]), is_caught_up=value["is_caught_up"] is True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        message = f"{root / NAME} cannot be read: {error}"
        raise IntegrityError(message, hint="restore the backup once more, into another folder") from None


def require_caught_up(root: Path) -> None:
    """Raise EnvironmentUnfit while this coordinator may have forgotten what it has signed."""
    marker = read_marker(root)
    if marker is not None and not marker.is_caught_up:
        message = f"`{root}` came out of a backup, and does not know yet what was signed after it"
        raise EnvironmentUnfit(message, hint="let `dipaco-bootstrap start` catch up with the swarm first")


def write_marker(root: Path, marker: Marker) -> None:
    write_atomically(root / NAME, json.dumps({"schema": SCHEMA, **asdict(marker)}).encode())


def drop_marker(root: Path) -> None:
    (root / NAME).unlink(missing_ok=True)
