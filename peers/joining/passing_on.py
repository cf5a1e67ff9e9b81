"""The ticket that a volunteer passes on: of the run that it joined last, with whom it met there since."""

from __future__ import annotations

import json
from pathlib import Path

from dipaco_p2p.errors import ConfigError, IntegrityError
from dipaco_p2p.node.doorplate import VOLUNTEERS_MAX, make_ticket, told_address
from dipaco_p2p.node.run import Run, open_run

from .arrival import KnownPeers
from .choice import Choice

HINT = "join the run once, or pass on the ticket that you were given"


def ticket_of(choice: Choice, home: Path) -> str:
    """That of the run of `choice`, as this home knows it; nothing is asked. A volunteer that others can dial names
    itself, the seeds and volunteers that have worked; one that nobody can dial, whom it met. Raises ConfigError for a
    run that this home has not joined."""
    entry = choice.entry()
    origin, met = KnownPeers(home).of(entry.key)
    origin = origin or choice.run or entry.run
    plate = told_address(home)
    if plate is not None and plate.run == origin:
        return plate.ticket
    run = next((stage for stage in _stages(home) if stage.origin == origin), None)
    if run is None:
        raise ConfigError(f"the volunteer in `{home}` has not joined {choice.name}", hint=HINT)
    return make_ticket(run, entry.addresses[:1], more=[*entry.addresses[1:], *met[:VOLUNTEERS_MAX]])


def _stages(home: Path) -> list[Run]:
    """Those that this home has taken part in; a damaged one is left out, and fetched again at the next start."""
    found = []
    for path in sorted((home / "runs").glob("*/documents/manifest.json")):
        try:
            found.append(open_run(json.loads(path.read_bytes())))
        except (OSError, ValueError, IntegrityError):
            continue
    return found
