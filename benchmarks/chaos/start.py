"""Brings a swarm to work: starts its volunteers and waits until each has had a receipt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from bootstrap.progress import stage
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.program.history import read_history

from .swarm import POLL_S, LocalSwarm

START_S = 240.0
START_PAUSE_S = 0.5
"""Between two starts: all at once they would only wait for each other's imports."""


async def start_volunteers(swarm: LocalSwarm, names: Sequence[str]) -> None:
    """Start these, and wait for each one's first receipt. Raises DipacoError."""
    for name in names:
        await swarm.start(name)
        await asyncio.sleep(START_PAUSE_S)
    deadline_s = time.monotonic() + START_S
    with stage(f"Starting {len(names)} volunteers in {swarm.work.name}"):
        while missing := [name for name in names if not _has_receipt(swarm.home(name))]:
            swarm.require_up()
            if time.monotonic() > deadline_s:
                message = f"no receipt within {START_S:.0f} s for {', '.join(missing)}"
                raise DipacoError(message, hint=f"see the logs in {swarm.work}")
            await asyncio.sleep(POLL_S)


def _has_receipt(home: Path) -> bool:
    return any(row["ev"] == "receipt" for path in home.glob("runs/*/history.jsonl") for row in read_history(path))
