"""The owner's process: a seed node of the program that leads every module, without text to evaluate versions on.

python -m benchmarks.transfer.owner FOLDER CONFIG HOST       CONFIG is the run's, as JSON
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

from benchmarks.processes import Handler, Values, serve
from bootstrap.coordinator.stage import SeedStage
from bootstrap.folder import GRID
from dipaco_p2p import strict
from dipaco_p2p.clock import SystemClock
from dipaco_p2p.config import RunConfig
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.stages import Stages
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.program import faults
from dipaco_p2p.program.history import read_history
from dipaco_p2p.swarm.addresses import best_address
from dipaco_p2p.swarm.hivemind.libp2p import open_libp2p
from peers.joining.arrival import TTL_MAX_S

from .runs import make_run

HISTORY = "history.jsonl"
POLL_S = 0.1
POINTS = "owner: "
"""What the names of the points begin with that a leader passes (program/faults.py)."""


class NoEvaluator:
    """Judges nothing: there is no text. Takes the place of `bootstrap.archives.evaluator.Evaluator`."""

    def __init__(self, run: Run, store: Store, archive: SeedArchive) -> None:
        pass

    def complete_version(self) -> int:
        """None ever."""
        return -1


class Leader:
    """Notes when the leader of the modules passed which point, since it was last asked."""

    def __init__(self, history: Path) -> None:
        self._history = history
        self._passed: list[tuple[str, float]] = []
        self._since_s = time.time()

    def passed(self, name: str) -> None:
        if name.startswith(POINTS):
            self._passed.append((name.removeprefix(POINTS), time.time()))

    def tell(self) -> Values:
        """When each point was passed, and the versions that were made; and forget them."""
        passed, self._passed = self._passed, []
        since_s, self._since_s = self._since_s, time.time()
        events = [event for event in read_history(self._history) if event["t"] >= since_s]
        versions = [
            {"module": event["module"], "at_s": event["t"], "contributions": len(event["contributions"])}
            for event in events
            if event["ev"] == "version"
        ]
        return {"passed": passed, "versions": versions}


@contextlib.asynccontextmanager
async def opened(folder: Path, config: RunConfig, host: str) -> AsyncIterator[Handler]:
    """A run is made and served while the block runs."""
    clock, grid = SystemClock(), folder / GRID
    store = Store(grid)
    swarm = await open_libp2p(folder / "identity.key", listen=f"/ip4/{host}/tcp/0", ttl_max_s=TTL_MAX_S, clock=clock)
    try:
        run = await asyncio.to_thread(make_run, store, config, swarm.signer)
        Stages(swarm).add(run)
        stage = SeedStage(run, swarm, store, sequences=_no_text, clock=clock, make_evaluator=cast(Any, NoEvaluator))
        stage.begin()
        history = grid / HISTORY
        await _all_led(history, len(run.manifest.genesis))
        leader = Leader(history)

        async def handle(values: Values) -> Values:
            return {"address": best_address(swarm.addresses)} if values["do"] == "open" else leader.tell()

        with faults.listening(leader.passed):
            yield handle
        stage.cancel()
    finally:
        await swarm.close()


async def _all_led(history: Path, modules: int) -> None:
    """Wait until this owner leads all modules."""
    while sum(event["ev"] == "leads" for event in read_history(history)) < modules:
        await asyncio.sleep(POLL_S)


def _no_text() -> Any:
    raise AssertionError("a run of a benchmark is never sharded anew")


if __name__ == "__main__":
    place, text, address = sys.argv[1:]
    loaded = strict.load(RunConfig, json.loads(text), where="the benchmark's run")
    serve(lambda: opened(Path(place), loaded, address))
