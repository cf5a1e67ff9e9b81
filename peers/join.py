"""From an address to a running volunteer: the composition of all parts, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.clock import Clock, SystemClock
from dipaco_p2p.errors import DipacoError, IntegrityError, SwarmError, Unreachable, WrongRun
from dipaco_p2p.protocol.liveness import Heartbeat, heartbeat_interval_s
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.runtime.console import log_to, on_signals
from dipaco_p2p.runtime.granting import Electing
from dipaco_p2p.runtime.history import History
from dipaco_p2p.runtime.join import Stages, check_next_stage, fetch_stages, tell_address
from dipaco_p2p.runtime.mandates import Mandates
from dipaco_p2p.runtime.mirror import Mirror
from dipaco_p2p.runtime.node import Node
from dipaco_p2p.runtime.ownership import Ownership
from dipaco_p2p.runtime.presence import Presence
from dipaco_p2p.runtime.run import Run
from dipaco_p2p.runtime.store import Store, folder_lock
from dipaco_p2p.runtime.transfer import Uploads, serve_store
from dipaco_p2p.runtime.watch import Watch
from dipaco_p2p.swarm.addresses import best_address, read_address
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.libp2p import open_libp2p
from dipaco_p2p.swarm.scope import ScopedSwarm

from .acquaintances import Acquaintances
from .config import PeerConfig, torch_device
from .display import show
from .status import Status
from .trainer import PathTrainer
from .volunteer import Volunteer

TTL_MAX_S = 3600.0
"""Longest life of a record that this node keeps for others, before it knows the run's own."""
CONNECT_TIMEOUT_S = 15.0
NEXT_STAGE_S = 1.0
"""Between two looks whether the next stage is open."""
DAMAGED_HINT = "its holders' data is damaged or forged, not yours: tell whoever runs the coordinator, then join again"
LOCKED_HINT = "one identity cannot be in two places: give this volunteer another --home, or end the other one"

Dial = Callable[[], Awaitable[None]]
Meet = Callable[[Run, Sequence[str]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a simulation of many volunteers in one process puts its own in place of."""

    make_trainer: Callable[..., PathTrainer] = PathTrainer
    show: Callable[[Status, History], AbstractAsyncContextManager[None]] = show
    log_to: Callable[..., None] = log_to


PARTS = Parts()


async def join(address: str, config: PeerConfig, *, expected_run: str | None, verbose: bool) -> None:
    """Take part in the run at `address` until it is complete or a signal says stop. Raises DipacoError."""
    import torch

    device = torch_device(config.device)
    if config.threads:
        torch.set_num_threads(config.threads)
    with folder_lock(config.home, hint=LOCKED_HINT):
        await _join(address, config, expected_run=expected_run, device=device, verbose=verbose)


async def _join(address: str, config: PeerConfig, *, expected_run: str | None, device: str, verbose: bool) -> None:
    friends = Acquaintances(config.home)
    run, others = friends.of(address)
    swarm = await open_libp2p(
        config.home / "identity.key",
        initial_peers=[address, *others],
        listen=config.listen,
        client_mode=not config.is_listening,
        ttl_max_s=TTL_MAX_S,
        clock=SystemClock(),
    )

    async def dial() -> None:
        await swarm.join({text: read_address(text) for text in [address, *friends.of(address)[1]]})

    def meet(stage: Run, addresses: Sequence[str]) -> None:
        friends.remember(address, run=stage.origin, addresses=addresses)

    try:
        host, stages = await _knock(swarm, [address, *others], expected_run=expected_run, known_run=run)
        meet(stages[-1], others)
        if swarm.addresses:  # others can join through us, should the coordinator's address not answer
            tell_address(config.home, swarm, stages[-1])
        tour = Tour(
            swarm, config, SystemClock(), device=device, verbose=verbose, dial=dial, coordinator=host, meet=meet
        )
        tour.typed = {read_address(address).peer: (address,)}
        on_signals(tour.stop)
        await tour.take_part(stages)
    except IntegrityError as error:
        raise IntegrityError(str(error), hint=error.hint or DAMAGED_HINT) from None
    finally:
        await swarm.close()


async def _knock(
    swarm: Swarm, addresses: Sequence[str], *, expected_run: str | None, known_run: str | None
) -> tuple[PeerId, list[Run]]:
    """Whoever of `addresses` answers first, and the stages of its run. The first is the one that was typed; the others
    were met in the run that was joined through it, and are asked for that one only."""
    typed, *others = addresses
    try:
        host = await swarm.connect(typed, timeout_s=CONNECT_TIMEOUT_S)
        return host, await fetch_stages(swarm, host, expected=expected_run)
    except Unreachable:
        for other in others:
            with contextlib.suppress(DipacoError):
                host = await swarm.connect(other, timeout_s=CONNECT_TIMEOUT_S)
                return host, await fetch_stages(swarm, host, expected=expected_run or known_run)
        raise


class Tour:
    """One volunteer's way through the stages of a run, on one open swarm."""

    def __init__(
        self,
        swarm: Swarm,
        config: PeerConfig,
        clock: Clock,
        *,
        device: str,
        verbose: bool,
        dial: Dial,
        coordinator: PeerId,
        meet: Meet = lambda run, addresses: None,
        parts: Parts = PARTS,
    ) -> None:
        """`coordinator` is the peer that we joined through; `meet` is told the addresses of those that we see."""
        self._swarm = swarm
        self._config = config
        self._clock = clock
        self._device = device
        self._verbose = verbose
        self._dial = dial
        self._coordinator = coordinator
        self._meet = meet
        self._parts = parts
        self.typed: dict[PeerId, tuple[str, ...]] = {}
        """Where the peer is that was named on the command line, whatever it says itself."""
        self._known = Stages(swarm)
        self._volunteer: Volunteer | None = None
        self._stopped = asyncio.Event()

    async def take_part(self, stages: Sequence[Run]) -> None:
        """Take part from the newest of `stages` on, until the run is complete or a signal says stop."""
        for stage in stages:
            self._known.add(stage)
        run: Run | None = stages[-1]
        while run is not None and await self._stage(run) and not run.is_last_stage:
            run = await self._next(run)

    def stop(self) -> None:
        """Leave in good order."""
        self._stopped.set()
        if self._volunteer is not None:
            self._volunteer.stop()

    async def _stage(self, run: Run) -> bool:
        """Take part in one stage; whether it is complete."""
        folder, clock = self._config.run_folder(run.id), self._clock
        store, swarm = Store(folder), ScopedSwarm(self._swarm, run.id)
        self._parts.log_to(folder / "peer.log", verbose=self._verbose)
        store.write_document("manifest", canonical_bytes(run.sealed.to_dict()))
        history = History(folder / "history.jsonl", clock)
        watch = Watch(run, swarm, clock, Mandates(run, store))
        watch.typed.update(self.typed)
        size_max = max(map(run.payload_bytes_max, run.topology.modules()))
        uploads = Uploads(swarm, store, size_max=size_max, clock=clock)
        node = Node(
            run=run,
            swarm=swarm,
            store=store,
            clock=clock,
            watch=watch,
            presence=Presence(run, swarm, clock, Heartbeat(owns=bool(swarm.addresses))),
            history=history,
            keep_upload=uploads.claim,
            uploads_s=uploads.progress_s,
        )
        serve_store(swarm, store)
        history.add("joined", run=run.origin, stage=run.manifest.stage, peer=swarm.peer)
        await watch.refresh()
        await withdraw_claims(watch, node.presence, swarm.peer)
        return await self._live(node)

    async def _live(self, node: Node) -> bool:
        run, steps = node.run, node.run.config.inner.steps
        status = Status(run=run.name, peer=node.peer, rounds=run.config.rounds.rounds, steps=steps)
        status.paths = run.topology.path_count
        volunteer: Volunteer | None = None
        mirror = Mirror(node)
        ownership = Ownership(
            node,
            mirror,
            Electing(node),
            may_take=lambda: volunteer is not None and volunteer.is_run_open(),
        )
        volunteer = self._volunteer = Volunteer(
            node, ownership, status, device=self._device, make_trainer=self._parts.make_trainer
        )
        every_s = heartbeat_interval_s(run.config.liveness)
        rejoining = asyncio.create_task(self._keep_joined(node, every_s=every_s))
        try:
            async with self._parts.show(status, node.history):
                await volunteer.run(grace_s=self._config.grace_s)
        finally:
            rejoining.cancel()
            await asyncio.gather(rejoining, return_exceptions=True)
        return status.is_complete and not self._stopped.is_set()

    async def _keep_joined(self, node: Node, *, every_s: float) -> None:
        """Note who is there; and dial again while no seed node is seen: one that restarted knows nobody, and nobody
        looks for it."""
        while True:
            await node.clock.sleep(every_s)
            watch = node.watch
            met = [best_address(beat.addresses) for beat in watch.heartbeats.values() if beat.addresses]
            self._meet(node.run, sorted(met))
            if not watch.seeds():
                with contextlib.suppress(DipacoError):
                    await self._dial()

    async def _next(self, run: Run) -> Run | None:
        """The stage after `run`, as soon as the coordinator has opened it; None after a stop."""
        print("the warm-up is complete; waiting for the coordinator to open the grid", flush=True)
        while not self._stopped.is_set():
            for host in dict.fromkeys((run.manifest.author, self._coordinator)):
                with contextlib.suppress(SwarmError, WrongRun):
                    stages = await fetch_stages(self._swarm, host, expected=run.origin)
                    if stages[-1].id != run.id:
                        check_next_stage(run, stages[-1])
                        self._known.add(stages[-1])
                        return stages[-1]
            with contextlib.suppress(DipacoError):
                await self._dial()
            await self._clock.sleep(NEXT_STAGE_S)
        return None


async def withdraw_claims(watch: Watch, presence: Presence, me: PeerId) -> None:
    """Take back what this peer claimed before a crash, else its own old claim would send it to another path."""
    for path, claims in watch.claims.items():
        if me in claims:
            await presence.claim(path, since_s=claims[me].since_s, round_number=claims[me].round)
            await presence.release()
