"""A volunteer that trains nothing: it holds the modules of the only path, pushes what it is given, and follows.

It listens nowhere, as `dipaco-peer join --no-listen`, so that no module falls to it; all else that it says and asks is
what the program says and asks: heartbeat and claim, `peers.path.contribute`, `Follower` with a mirror that keeps
versions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dipaco_p2p.canonical import Parts
from dipaco_p2p.clock import SystemClock
from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.compress import compress, encode_compressed
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.node.dial import CONNECT_TIMEOUT_S
from dipaco_p2p.node.node import open_member
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.stages import fetch_stages
from dipaco_p2p.node.store import Store
from dipaco_p2p.node.transfer import serve_store
from dipaco_p2p.owner.chain import Chains, ModuleChain
from dipaco_p2p.owner.follower import Follower
from dipaco_p2p.program.tasks import keep_going
from dipaco_p2p.protocol.documents import BlobRef, Contribution, ModuleVersion, Sealed
from dipaco_p2p.protocol.liveness import heartbeat_interval_s
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.hivemind.libp2p import open_libp2p
from dipaco_p2p.swarm.stage_scope import ScopedSwarm
from dipaco_p2p.topology import ModuleId
from peers.joining.arrival import TTL_MAX_S
from peers.path.contribute import push

LEADERS_S = 120.0
"""Until all modules have a leader."""
POLL_S = 0.2
GRADIENT_STD = 1e-3
LOSS = 5.0


@dataclass(slots=True, kw_only=True)
class Pushed:
    """When, in seconds since the epoch, one contribution was where."""

    bytes: int
    uploaded_s: float
    """The leader has the whole payload."""
    receipt_s: float


class NotingChain(ModuleChain):
    """Notes when a version was applied and checked, and its blobs are on this disk."""

    applied_s = 0.0

    def note(self, versions: Sequence[Sealed[ModuleVersion]], snapshot: Parts, update: bytes | None = None) -> None:
        self.applied_s = self.node.clock.now_s()
        super().note(versions, snapshot, update)


class IdleVolunteer:
    """One, on an open swarm."""

    def __init__(self, swarm: Swarm, run: Run, folder: Path) -> None:
        clock, store, scoped = SystemClock(), Store(folder), ScopedSwarm(swarm, run.id)
        self.node = open_member(run, scoped, clock, store)
        serve_store(scoped, store)
        self.modules = list(run.topology.modules())
        [self._path] = run.topology.paths()
        chains = Chains(self.node)
        self._chains = {module: NotingChain(chains, module) for module in self.modules}
        self._readers = {module: Follower(self.node, module, chain) for module, chain in self._chains.items()}
        self._residuals: dict[ModuleId, Floats] = {}
        self._loops: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Find the leaders, fetch version 0, claim the path, and be present from now on."""
        watch, clock = self.node.watch, self.node.clock
        until_s = clock.now_s() + LEADERS_S
        await watch.refresh()
        while any(watch.leader(module) is None for module in self.modules):
            if clock.now_s() > until_s:
                raise DipacoError(f"nobody leads all modules after {LEADERS_S:.0f} s")
            await clock.sleep(POLL_S)
            await watch.refresh()
        await asyncio.gather(*(reader.sync() for reader in self._readers.values()))
        await self.node.presence.claim(self._path, since_s=clock.now_s())
        loops = (self.node.presence.run, self._watch_swarm)
        self._loops = [asyncio.create_task(keep_going(loop, clock)) for loop in loops]

    async def end(self) -> None:
        """Fall silent."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)

    def encode(self, module: ModuleId, gradient: Floats) -> bytes:
        """A payload, with what the last one could not say, which then lies in the memory of `gradient`; as
        `PathTrainer.outer_gradients`."""
        codec = self.node.run.config.compression.uplink
        owed = self._residuals.get(module)
        compressed, self._residuals[module] = compress(gradient, owed, codec=codec, out=gradient)
        return encode_compressed(compressed)

    async def push(self, module: ModuleId, payload: bytes) -> Pushed:
        """Bring it to the leader; returns with the receipt."""
        clock = self.node.clock
        pushed = Pushed(bytes=len(payload), uploaded_s=0.0, receipt_s=0.0)

        def on_progress() -> None:  # the last part that arrived says it last
            pushed.uploaded_s = clock.now_s()

        document = self._document(module, await asyncio.to_thread(BlobRef.of, payload))
        await push(self.node, document, payload, on_progress=on_progress)
        pushed.receipt_s = clock.now_s()
        return pushed

    async def follow(self, versions: Mapping[ModuleId, int]) -> dict[ModuleId, float]:
        """Wait for what follows these versions, all at once, and apply it; when each was applied."""
        await asyncio.gather(*(self._readers[module].sync(after=after) for module, after in versions.items()))
        return {module: self._chains[module].applied_s for module in versions}

    def version(self, module: ModuleId) -> int:
        """The version that is held."""
        return self._readers[module].version.version

    def _document(self, module: ModuleId, payload: BlobRef) -> Contribution:
        run, base = self.node.run, self._readers[module].version
        return Contribution(
            run=run.id,
            module=module,
            path=self._path,
            base_version=base.version,
            base_digest=base.digest,
            sharding=0,
            payload=payload,
            state=None,
            steps=run.config.inner.steps,
            tokens=run.tokens_full,
            loss=LOSS,
            author=self.node.peer,
        )

    async def _watch_swarm(self) -> None:
        while True:
            await self.node.watch.refresh()
            await self.node.clock.sleep(heartbeat_interval_s(self.node.run.config.liveness) / 2)


@contextlib.asynccontextmanager
async def joined(address: str, folder: Path) -> AsyncIterator[IdleVolunteer]:
    """A volunteer in the run at `address` while the block runs. Raises as joining does."""
    folder.mkdir(parents=True, exist_ok=True)
    swarm = await open_libp2p(
        folder / "identity.key", initial_peers=[address], client_mode=True, ttl_max_s=TTL_MAX_S, clock=SystemClock()
    )
    try:
        seed = await swarm.connect(address, timeout_s=CONNECT_TIMEOUT_S)
        run = (await fetch_stages(swarm, seed, expected=None))[-1]
        volunteer = IdleVolunteer(swarm, run, folder)
        volunteer.node.watch.typed[seed] = (address,)
        try:
            await volunteer.begin()
            yield volunteer
        finally:
            await volunteer.end()
    finally:
        await swarm.close()


def gradients(run: Run) -> Callable[[ModuleId, int], Floats]:
    """Outer gradients of random normals: the same of a module for all, but for their lengths, so that their payloads
    differ. Only one is kept, of the module that was asked for last."""
    kept: dict[ModuleId, Floats] = {}

    def gradient(module: ModuleId, number: int) -> Floats:
        if module not in kept:
            kept.clear()
            size = run.layout(module).size
            kept[module] = np.random.default_rng(module.level).standard_normal(size, dtype=np.float32)
            kept[module] *= np.float32(GRADIENT_STD)
        return kept[module] * np.float32(1 + number / 100)

    return gradient
