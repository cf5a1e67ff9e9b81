"""What a running volunteer says of itself, as plain JSON values: the same keys always, null for what is not known."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dipaco_p2p import __version__

from ..status import Status

if TYPE_CHECKING:
    from dipaco_p2p.node.node import Member

    from ..tour import Tour

SCHEMA = "dipaco.status/1"


def report(tour: Tour | None, *, home: Path, began_s: float, now_s: float) -> dict[str, Any]:
    """The answer to `status`. `tour` is None while the volunteer is still looking for its run."""
    status = Status() if tour is None or tour.status is None else tour.status
    pauses = {} if tour is None else dict(tour.pauses)
    return {
        "schema": SCHEMA,
        "version": __version__,
        "pid": os.getpid(),
        "home": str(home),
        "running_s": round(now_s - began_s, 1),
        "state": state(tour, pauses),
        "pauses": pauses,
        **_run(None if tour is None else tour.node, status),
        **_work(status),
        **_swarm(None if tour is None else tour.node, status),
    }


def state(tour: Tour | None, pauses: Mapping[str, float | None]) -> str:
    """In one word: `starting`, `running`, `pausing`, `paused`, `finishing` (after this round) or `stopping`."""
    if tour is None or tour.status is None:
        return "starting"
    if tour.is_stopping:
        return "finishing" if tour.is_finishing else "stopping"
    if pauses:
        return "paused" if tour.status.doing == "paused" else "pausing"
    return "running"


def _run(node: Member | None, status: Status) -> dict[str, Any]:
    return {
        "run": status.run or None,
        "run_id": None if node is None else node.run.origin,
        "stage": None if node is None else node.run.manifest.stage,
        "peer": status.peer or None,
        "frozen": None if node is None else node.decrees.state.frozen,
    }


def _work(status: Status) -> dict[str, Any]:
    return {
        "doing": status.doing,
        "waits_for": status.waits_for or None,
        "path": None if status.path is None else str(status.path),
        "round": status.round,
        "rounds": status.rounds,
        "step": status.step,
        "steps": status.steps,
        "is_cut": status.is_cut,
        "loss": status.loss,
        "tokens_per_s": round(status.tokens_per_s, 1),
        "eta_s": None if status.eta_s is None else round(status.eta_s, 1),
        "receipts": status.receipts,
        "last_receipt": status.last_receipt or None,
        "leads": list(map(str, status.leads)),
    }


def _swarm(node: Member | None, status: Status) -> dict[str, Any]:
    """The modules of its path as the swarm has them, and what calls took of the line since the program began."""
    found = None if node is None else node.swarm.statistics()
    modules = [] if node is None or status.path is None else status.path.modules()
    return {
        "modules": [
            {"module": str(module), "version": node.watch.reached(module), "leader": node.watch.leader(module)}
            for module in modules
            if node is not None
        ],
        "peers_alive": status.peers_alive,
        "peers_training": status.peers_training,
        "paths_covered": status.paths_covered,
        "paths": status.paths,
        "bytes_up": 0 if found is None else found.bytes_sent,
        "bytes_down": 0 if found is None else found.bytes_received,
    }
