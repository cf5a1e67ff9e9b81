"""What the commands may ask of a running volunteer, what it does then, and what it answers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dipaco_p2p import __version__
from dipaco_p2p.clock import Clock
from dipaco_p2p.errors import Unreachable
from dipaco_p2p.program.control.messages import Program
from dipaco_p2p.protocol.liveness import shown_names
from dipaco_p2p.strict import bounded, plain
from dipaco_p2p.swarm.addresses import is_circuit
from dipaco_p2p.swarm.api import SwarmStatistics

from ..config import PeerConfig
from ..status import Status

if TYPE_CHECKING:
    from dipaco_p2p.node.node import Member

    from ..stages import StageRunner

SCHEMA = "dipaco.control/1"
PAUSE_S_MAX = 366 * 86_400.0
VOLUNTEER = Program(
    noun="volunteer",
    schema=SCHEMA,
    start_hint="start it with `dipaco-peer join`, or name its folder with --home",
    upgrade_hint="the running volunteer has another version than this command: stop it with Ctrl-C and join again",
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


STATUS_SCHEMA = "dipaco.status/1"


def report(runner: StageRunner | None, *, home: Path, began_s: float, now_s: float) -> dict[str, Any]:
    """The answer to `status`. `runner` is None while the volunteer is still looking for its run."""
    status = Status() if runner is None or runner.status is None else runner.status
    pauses = {} if runner is None else dict(runner.pauses)
    return {
        "schema": STATUS_SCHEMA,
        "version": __version__,
        "pid": os.getpid(),
        "home": str(home),
        "running_s": round(now_s - began_s, 1),
        "state": state(runner, pauses),
        "pauses": pauses,
        **_run(None if runner is None else runner.node, status),
        **status.figures(),
        **_swarm(None if runner is None else runner.node, status),
    }


def state(runner: StageRunner | None, pauses: Mapping[str, float | None]) -> str:
    """In one word: `starting`, `running`, `pausing`, `paused`, `finishing` (after this round) or `stopping`."""
    if runner is None or runner.status is None:
        return "starting"
    if runner.is_stopping:
        return "finishing" if runner.is_finishing else "stopping"
    if pauses:
        return "paused" if runner.status.doing == "paused" else "pausing"
    return "running"


def _run(node: Member | None, status: Status) -> dict[str, Any]:
    return {
        "run": status.run or None,
        "run_id": None if node is None else node.run.origin,
        "stage": None if node is None else node.run.manifest.stage,
        "peer": status.peer or None,
        "frozen": None if node is None else node.decrees.state.frozen,
        **_names(node),
    }


def _names(node: Member | None) -> dict[str, Any]:
    """What others show beside our id, and why they do not, if the coordinator has decreed that."""
    if node is None:
        return {"name": "", "team": "", "name_hidden": None}
    name, team = shown_names(node.peer, node.presence.heartbeat, node.decrees.state)
    return {"name": name, "team": team, "name_hidden": node.decrees.state.nameless.get(node.peer)}


COUNTED = (
    "peers_direct",
    "peers_relayed",
    "relay_slots",
    "relay_bytes",
    "keys_read",
    "records_read",
    "records_put",
    "calls_made",
    "calls_served",
)
"""Of `SwarmStatistics`, told under the same names."""


def _swarm(node: Member | None, status: Status) -> dict[str, Any]:
    """The modules of its path as the swarm has them, and what calls took of the line since the program began."""
    found = SwarmStatistics() if node is None else node.swarm.statistics()
    modules = [] if node is None or status.path is None else status.path.modules()
    return {
        "modules": [
            {"module": str(module), "version": node.watch.reached(module), "leader": node.watch.leader(module)}
            for module in modules
            if node is not None
        ],
        "bytes_up": found.bytes_sent,
        "bytes_down": found.bytes_received,
        "bytes_relayed": found.bytes_relayed,
        "reached": None if node is None else _reached(node.swarm.addresses),
        **{name: getattr(found, name) for name in COUNTED},
    }


def _reached(addresses: Sequence[str]) -> str:
    """How others dial us: `directly`, through a `relay`, or not at all (`none`)."""
    if not addresses:
        return "none"
    return "relay" if all(map(is_circuit, addresses)) else "directly"


USER = "user"
"""The reason of a pause that a command asked for."""
ANSWER_S = 0.1
"""For the answer to be on its way before the program leaves at once."""
CONFIG_SCHEMA = "dipaco.config/1"


class Control:
    """Of one running program; `runner` is there as soon as its run is found."""

    def __init__(self, config: PeerConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._began_s = clock.now_s()
        self.runner: StageRunner | None = None

    def answer(self, request: Request) -> dict[str, Any]:
        """Do what is asked, and say how it stands then. Raises Unreachable for what can only be done in a run."""
        if request.ask == "config":
            return self._plain_config()
        if request.ask == "stop":
            self._stop(is_now=request.now)
        elif request.ask != "status":
            self._act(request)
        now_s = self._clock.now_s()
        return report(self.runner, home=self._config.home, began_s=self._began_s, now_s=now_s)

    def _act(self, request: Request) -> None:
        if self.runner is None:
            raise Unreachable("the volunteer is still looking for its run", hint="try again in some seconds")
        if request.ask == "pause":
            until_s = None if request.for_s is None else self._clock.now_s() + request.for_s
            self.runner.pause(USER, until_s=until_s)
        elif request.ask == "resume":
            self.runner.resume(USER)
        else:
            self.runner.finish()

    def _stop(self, *, is_now: bool) -> None:
        """As a signal would; at once, as a second one would."""
        if is_now:
            asyncio.get_running_loop().call_later(ANSWER_S, _leave_now)
        elif self.runner is None:
            signal.raise_signal(signal.SIGTERM)
        else:
            self.runner.stop()

    def _plain_config(self) -> dict[str, Any]:
        return {"schema": CONFIG_SCHEMA, **plain(self._config), "home": str(self._config.home)}


def _leave_now() -> None:
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)
