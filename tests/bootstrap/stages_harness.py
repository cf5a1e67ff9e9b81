"""A whole run from its corpus on, in one process and in virtual time: a coordinator that can die, and volunteers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiny_run import SEED_NUMBER, signer
from virtual_time import VirtualClock, end, eventually, play

from bootstrap.coordinator.seed import Seed
from bootstrap.genesis.prepare import prepare
from bootstrap.runfile import ArchiveConfig, CorpusConfig, RunFile
from dipaco_p2p.config import (
    INVITE,
    InnerConfig,
    LevelConfig,
    LivenessConfig,
    ModelConfig,
    RoundsConfig,
    RoutingConfig,
    RunConfig,
    WarmupConfig,
)
from dipaco_p2p.node.invitations import Chain, invite
from dipaco_p2p.node.ledger import Ledger
from dipaco_p2p.node.stages import fetch_stages
from dipaco_p2p.program.curves import Curves
from dipaco_p2p.swarm.memory import MemoryNetwork
from dipaco_p2p.use.folder import GRID, RunFolder
from peers.config import PeerConfig
from peers.stages import Entrance, Parts, StageRunner

MODEL = ModelConfig(
    vocab_size=300,
    width=16,
    heads=2,
    ffn_width=16,
    context=72,
    levels=(LevelConfig(embedding=True, head=True), LevelConfig(modules=2, blocks=1)),
)


RESHARDED_ONCE = RoutingConfig(reshard_rounds=(1,))


def run_file(corpus: Path, **changes: Any) -> RunFile:
    """Two paths of a tiny model: two rounds of warm-up, three of the grid, re-sharded after the first and the last."""
    config = RunConfig(
        name="tiny",
        model=MODEL,
        warmup=WarmupConfig(rounds=2),
        routing=RoutingConfig(reshard_rounds=(1, 3)),
        inner=InnerConfig(steps=2, batch=2, warmup_steps=1),
        rounds=RoundsConfig(rounds=3, min_paths=2, deadline_s=20.0, grace_s=1.0),
        liveness=LivenessConfig(heartbeat_ttl_s=6.0, settle_s=0.5),
    )
    everything = ArchiveConfig(rounds=0)
    return RunFile(run=replace(config, **changes), corpus=CorpusConfig(source=str(corpus)), archive=everything)


class Home:
    """A coordinator that can die, and volunteers that live through it."""

    def __init__(self, folder: Path, file: RunFile, *, curves: Callable[[str], Curves] = lambda name: Curves()) -> None:
        """`curves` are those of the coordinator or of `volunteer-1`, by name."""
        self.curves = curves
        self.seed: Seed | None = None
        self.file = file
        self.folder = folder / "run"
        self.homes = folder
        self.clock = VirtualClock()
        self.network = MemoryNetwork(7, self.clock)
        self._task: asyncio.Task[None] | None = None
        self._tours: list[asyncio.Task[None]] = []

    @property
    def coordinator(self) -> Any:
        return signer(SEED_NUMBER).peer

    def start(self) -> None:
        """As `dipaco-bootstrap start` does, also after a death."""
        swarm = self.network.join(signer(SEED_NUMBER))
        folder = RunFolder(self.folder)
        self.folder.mkdir(exist_ok=True)
        run = prepare(self.file, folder, swarm.signer)
        self.seed = Seed(self.file, folder, swarm, clock=self.clock, curves=self.curves("coordinator"))
        self._task = asyncio.create_task(self.seed.run(run))

    async def seed_done(self) -> None:
        """Until the coordinator ends by itself; raises what it ends with."""
        assert self._task is not None
        await self._task

    async def die(self) -> None:
        """As SIGKILL would."""
        self.network.kill(self.coordinator)
        await end(self._task)

    async def join(self, *numbers: int, **settings: Any) -> None:
        for number in numbers:
            swarm = self.network.join(signer(number))
            stages = await fetch_stages(swarm, self.coordinator, expected=None)
            config = PeerConfig(home=self.homes / f"volunteer-{number}", **settings)
            invitations: Chain = ()
            if stages[0].config.admission.policy == INVITE:  # as the coordinator would, when it was asked
                invitations = invite(signer(SEED_NUMBER), stages[0].origin, swarm.peer, at_s=self.clock.now_s())
            entrance = Entrance(host=self.coordinator, invitations=invitations)
            parts = Parts(curves=self.curves(f"volunteer-{number}"))
            tour = StageRunner(swarm, config, self.clock, entrance=entrance, device="cpu", parts=parts)
            self._tours.append(asyncio.create_task(tour.take_part(stages)))

    async def volunteers_done(self) -> None:
        await asyncio.gather(*self._tours)

    async def close(self) -> None:
        for task in self._tours:
            await end(task)
        if self._task is not None:
            await self.die()

    def heads(self, stage: str) -> dict[str, int]:
        folder = RunFolder(self.folder)
        run = folder.open(stage)
        if run is None:
            return {}
        store = folder.store(stage)
        return {str(module): Ledger(run, store, module).head.version for module in run.topology.modules()}

    def is_over(self) -> bool:
        return (self.folder / GRID / "finished.json").exists()


def play_whole(home: Home, *, volunteers: int = 2) -> None:
    """Some volunteers take part, from the corpus to the end of the run."""

    async def scenario() -> None:
        home.start()
        await home.join(*range(1, volunteers + 1))
        await home.volunteers_done()
        await eventually(home.is_over)
        await home.close()

    play(scenario)
