"""From an address to a running volunteer: the composition of all parts, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.clock import Clock, SystemClock
from dipaco_p2p.errors import DipacoError, IntegrityError
from dipaco_p2p.protocol.liveness import Heartbeat, heartbeat_interval_s
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.runtime.archive import RemoteArchive
from dipaco_p2p.runtime.console import log_to, on_signals
from dipaco_p2p.runtime.history import History
from dipaco_p2p.runtime.join import fetch_run, serve_manifest
from dipaco_p2p.runtime.node import Node
from dipaco_p2p.runtime.ownership import Ownership
from dipaco_p2p.runtime.presence import Presence
from dipaco_p2p.runtime.run import Run
from dipaco_p2p.runtime.store import Store, folder_lock
from dipaco_p2p.runtime.transfer import Uploads, serve_store
from dipaco_p2p.runtime.watch import Watch
from dipaco_p2p.swarm.addresses import read_address
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.libp2p import open_libp2p

from .config import PeerConfig, torch_device
from .display import show
from .status import Status
from .volunteer import Volunteer

TTL_MAX_S = 3600.0
"""Longest life of a record that this node keeps for others, before it knows the run's own."""
CONNECT_TIMEOUT_S = 15.0
DAMAGED_HINT = "its holders' data is damaged or forged, not yours: tell whoever runs the coordinator, then join again"
LOCKED_HINT = "one identity cannot be in two places: give this volunteer another --home, or end the other one"

Dial = Callable[[], Awaitable[None]]


async def join(address: str, config: PeerConfig, *, expected_run: str | None, verbose: bool) -> None:
    """Take part in the run at `address` until it is complete or a signal says stop. Raises DipacoError."""
    import torch

    device = torch_device(config.device)
    if config.threads:
        torch.set_num_threads(config.threads)
    with folder_lock(config.home, hint=LOCKED_HINT):
        await _join(address, config, expected_run=expected_run, device=device, verbose=verbose)


async def _join(address: str, config: PeerConfig, *, expected_run: str | None, device: str, verbose: bool) -> None:
    swarm = await open_libp2p(
        config.home / "identity.key",
        initial_peers=[address],
        listen=config.listen,
        client_mode=not config.is_listening,
        ttl_max_s=TTL_MAX_S,
        clock=SystemClock(),
    )

    async def dial() -> None:
        await swarm.join({address: read_address(address)})

    try:
        seed = await swarm.connect(address, timeout_s=CONNECT_TIMEOUT_S)
        run = await fetch_run(swarm, seed, expected=expected_run)
        await take_part(run, swarm, config, device=device, verbose=verbose, dial=dial)
    except IntegrityError as error:
        raise IntegrityError(str(error), hint=error.hint or DAMAGED_HINT) from None
    finally:
        await swarm.close()


async def take_part(run: Run, swarm: Swarm, config: PeerConfig, *, device: str, verbose: bool, dial: Dial) -> None:
    """Build a volunteer on an open swarm and let it live; `dial` brings it back to the seed node if that was away."""
    folder = config.run_folder(run.id)
    clock = SystemClock()
    store = Store(folder)
    log_to(folder / "peer.log", verbose=verbose)
    store.write_document("manifest", canonical_bytes(run.sealed.to_dict()))
    history = History(folder / "history.jsonl", clock)
    watch = Watch(run, swarm, clock)
    uploads = Uploads(swarm, store, size_max=max(map(run.payload_bytes_max, run.topology.modules())))
    node = Node(
        run=run,
        swarm=swarm,
        store=store,
        clock=clock,
        watch=watch,
        presence=Presence(run, swarm, clock, Heartbeat(owns=bool(swarm.addresses))),
        history=history,
        keep_upload=uploads.claim,
    )
    serve_store(swarm, store)
    serve_manifest(swarm, run.sealed)
    history.add("joined", run=run.id, peer=swarm.peer)
    status = Status(run=run.name, peer=swarm.peer, rounds=run.config.rounds.rounds, steps=run.config.inner.steps)
    status.paths = run.topology.path_count
    await watch.refresh()
    await withdraw_claims(watch, node.presence, swarm.peer)
    volunteer: Volunteer | None = None
    ownership = Ownership(
        node, RemoteArchive(swarm, watch), may_take=lambda: volunteer is not None and volunteer.is_run_open()
    )
    volunteer = Volunteer(node, ownership, status, device=device, folder=folder)
    on_signals(volunteer.stop)
    rejoining = asyncio.create_task(keep_joined(watch, dial, clock, every_s=heartbeat_interval_s(run.config.liveness)))
    try:
        async with show(status, history):
            await volunteer.run(grace_s=config.grace_s)
    finally:
        rejoining.cancel()
        await asyncio.gather(rejoining, return_exceptions=True)


async def withdraw_claims(watch: Watch, presence: Presence, me: PeerId) -> None:
    """Take back what this peer claimed before a crash, else its own old claim would send it to another path."""
    for path, claims in watch.claims.items():
        if me in claims:
            await presence.claim(path, since_s=claims[me].since_s, round_number=claims[me].round)
            await presence.release()


async def keep_joined(watch: Watch, dial: Dial, clock: Clock, *, every_s: float) -> None:
    """Dial the seed node again while none is seen: one that restarted knows nobody, and nobody looks for it."""
    while True:
        await clock.sleep(every_s)
        if not watch.seeds():
            with contextlib.suppress(DipacoError):
                await dial()
