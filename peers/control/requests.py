"""What a running volunteer may be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dipaco_p2p.program.control.messages import Program
from dipaco_p2p.strict import bounded

SCHEMA = "dipaco.control/1"
PAUSE_S_MAX = 366 * 86_400.0
VOLUNTEER = Program(
    noun="volunteer",
    schema=SCHEMA,
    start_hint="start it with `dipaco-peer join`, or name its folder with --home",
    upgrade_hint="the running volunteer is of another version than this command: stop it with Ctrl-C and join again",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One thing that a running volunteer is asked for."""

    program: ClassVar[Program] = VOLUNTEER

    schema: str = SCHEMA
    ask: str = bounded(choices=("status", "config", "pause", "resume", "finish", "stop"))
    for_s: float | None = bounded(None, low=0.0, high=PAUSE_S_MAX)
    """Of `pause`: for how long; None is until `resume`."""
    now: bool = False
    """Of `stop`: without handing in what was trained."""
