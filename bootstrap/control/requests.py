"""What a running coordinator may be asked for: verbs with a name (control.py knows them), and what they are about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dipaco_p2p.program.control.messages import Program
from dipaco_p2p.strict import bounded

SCHEMA = "dipaco.coordinator/1"
COORDINATOR = Program(
    noun="coordinator",
    schema=SCHEMA,
    start_hint="start it with `dipaco-bootstrap start`, or name the folder of its run",
    upgrade_hint="what runs there is no coordinator, or one of another version than this command: restart it",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One thing that a running coordinator is asked for."""

    program: ClassVar[Program] = COORDINATOR

    schema: str = SCHEMA
    ask: str = bounded()
    """The verb."""
    reason: str = ""
    """Of a decree, as what follows (decreeing.py)."""
    peer: str = ""
    module: str = ""
    version: int = 0
