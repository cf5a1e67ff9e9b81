"""Volunteers that train nothing: they hold the modules of the only path, push what they are given, and follow.

    python -m benchmarks.transfer.volunteer FOLDER ADDRESS NUMBER...      one process, one volunteer for each number
    python -m benchmarks.transfer.volunteer FOLDER ADDRESS NUMBER LISTEN  one that leads and mirrors modules

Each has a swarm, a disk and a daemon of its own. One without LISTEN listens nowhere, as `dipaco-peer join --no-listen`,
so that it leads no module; everything else that it sends is what the program sends: heartbeat and claim,
`peers.path.contribute`, `Follower` with a chain that keeps versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.processes import Handler, Values, serve
from dipaco_p2p.canonical import Parts
from dipaco_p2p.clock import SystemClock
from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.outer.compress import compress, encode_compressed
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.node.node import open_member, serve_store
from dipaco_p2p.node.reading import open_connection
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.stages import fetch_stages
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.chain import Chains, ModuleChain
from dipaco_p2p.owner.follower import Follower
from dipaco_p2p.owner.granting import Electing
from dipaco_p2p.owner.leadership import Leadership
from dipaco_p2p.program.tasks import keep_going
from dipaco_p2p.protocol.documents import BlobRef, Contribution, ModuleVersion, Sealed
from dipaco_p2p.protocol.liveness import Heartbeat, heartbeat_interval_s
from dipaco_p2p.swarm.addresses import read_address
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.hivemind.libp2p import open_libp2p
from dipaco_p2p.swarm.identity import KEY_NAME
from dipaco_p2p.swarm.stage_scope import ScopedSwarm
from dipaco_p2p.topology import ModuleId
from peers.path.contribute import push
from peers.path.kept import outbox_of

LEADERS_S = 120.0
"""Until all modules have a leader."""
POLL_S = 0.2
GRADIENT_STD = 1e-3
LOSS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One volunteer's part of a round, with all modules of its path; times in seconds since the epoch."""

    bytes: int
    """Of all payloads."""
    encoded_s: float
    uploaded_s: float
    """The leaders have all payloads whole."""
    receipt_s: float
    """The volunteer has a receipt for each of them."""
    applied_s: dict[str, float]
    """By module, when its next version was applied."""
    kept_s: float
    """Its chain on its disk says so, too."""


class NotingChain(ModuleChain):
    """Notes when a version was applied and checked, and its blobs are on this disk."""

    applied_s = 0.0

    def note(self, versions: Sequence[Sealed[ModuleVersion]], snapshot: Parts, update: bytes | None = None) -> None:
        self.applied_s = self.node.clock.now_s()
        super().note(versions, snapshot, update)


class IdleVolunteer:
    """One, on an open swarm; `owns`: it leads and mirrors modules, too."""

    def __init__(self, swarm: Swarm, run: Run, folder: Path, *, owns: bool) -> None:
        clock, store, scoped = SystemClock(), Store(folder), ScopedSwarm(swarm, run.id)
        self.modules = list(run.topology.modules())
        payload_bytes = max(map(run.payload_bytes_max, self.modules)) if owns else 0
        self.node = open_member(
            run, scoped, clock, store, heartbeat=Heartbeat(owns=owns), upload_bytes_max=payload_bytes
        )
        self._outbox = outbox_of(store)
        serve_store(scoped, store, self._outbox)
        [self._path] = run.topology.paths()
        chains = Chains(self.node)
        self._chains = {module: NotingChain(chains, module) for module in self.modules}
        chains._chains.update(self._chains)
        self._readers = {module: Follower(self.node, module, chain) for module, chain in self._chains.items()}
        self._ownership = Leadership(chains, Electing(self.node)) if owns else None
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
        loops = [self.node.presence.run, self._watch_swarm]
        loops += [self._ownership.run] if self._ownership is not None else []
        self._loops = [asyncio.create_task(keep_going(loop, clock)) for loop in loops]

    @property
    def led(self) -> list[ModuleId]:
        """The modules that it leads."""
        return self._ownership.modules if self._ownership is not None else []

    async def end(self) -> None:
        """Fall silent."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)

    async def round(self, gradients: dict[ModuleId, Floats], encoding: asyncio.Lock) -> Turn:
        """Encode these outer gradients, push all of them at once, and follow until all next versions are applied."""
        bases = {module: reader.version.version for module, reader in self._readers.items()}
        async with encoding:
            payloads = {module: await asyncio.to_thread(self._encode, module, gradients) for module in self.modules}
        encoded_s = time.time()
        uploaded_s = await asyncio.gather(*(self._push(module, payload) for module, payload in payloads.items()))
        receipt_s = time.time()
        await asyncio.gather(*(self._readers[module].sync(after=after) for module, after in bases.items()))
        return Turn(
            bytes=sum(map(len, payloads.values())),
            encoded_s=encoded_s,
            uploaded_s=max(uploaded_s),
            receipt_s=receipt_s,
            applied_s={str(module): self._chains[module].applied_s for module in self.modules},
            kept_s=time.time(),
        )

    def _encode(self, module: ModuleId, gradients: dict[ModuleId, Floats]) -> bytes:
        """A payload, and the residual for the next one, which takes the memory of the gradient; as
        `PathTrainer.outer_gradients`."""
        gradient, codec = gradients.pop(module), self.node.run.config.compression.uplink
        compressed, self._residuals[module] = compress(gradient, self._residuals.get(module), codec=codec, out=gradient)
        payload = encode_compressed(compressed)
        self._outbox.put(payload)  # mirrors fetch it from here
        return payload

    async def _push(self, module: ModuleId, payload: bytes) -> float:
        """Bring it to the leader, until the receipt; when the leader had the whole payload."""
        uploaded_s = 0.0

        def on_progress() -> None:  # the last part that arrives has the last word
            nonlocal uploaded_s
            uploaded_s = time.time()

        document = self._document(module, await asyncio.to_thread(BlobRef.of, payload))
        await push(self.node, document, payload, on_progress=on_progress)
        return uploaded_s

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


class Volunteers:
    """Those of one process."""

    def __init__(self, volunteers: dict[int, IdleVolunteer]) -> None:
        self._volunteers = volunteers
        self._prepared: dict[int, dict[ModuleId, Floats]] = {}
        self._encoding = asyncio.Lock()
        """As many processes as cores: more than one at a time would only wait for each other."""

    async def handle(self, values: Values) -> Values:
        """Prepare the next round's outer gradients, or play that round."""
        if values["do"] == "prepare":
            await asyncio.to_thread(self._prepare)
            return {"led": [str(module) for one in self._volunteers.values() for module in one.led]}
        began_s = time.time()
        turns = await asyncio.gather(
            *(one.round(self._prepared.pop(number), self._encoding) for number, one in self._volunteers.items())
        )
        return {"began_s": began_s, "turns": [asdict(turn) for turn in turns]}

    def _prepare(self) -> None:
        """Random normals, others for each: a copy of another's would not be taken."""
        self._prepared = {number: {} for number in self._volunteers}
        run = next(iter(self._volunteers.values())).node.run
        for module in run.topology.modules():
            for number, gradients in self._prepared.items():
                chance = np.random.default_rng((module.level, number))
                gradients[module] = chance.standard_normal(run.layout(module).size, dtype=np.float32)
                gradients[module] *= np.float32(GRADIENT_STD)


@contextlib.asynccontextmanager
async def joined(address: str, folder: Path) -> AsyncIterator[IdleVolunteer]:
    """A volunteer in the run at `address` that listens nowhere, while the block runs. Raises as joining does."""
    async with open_connection(address) as connection, living(connection.swarm, address, folder, owns=False) as one:
        yield one


@contextlib.asynccontextmanager
async def leading(address: str, folder: Path, listen: str) -> AsyncIterator[IdleVolunteer]:
    """The same of one that others can dial; its key is in `folder` already, if anybody wants to know it before."""
    swarm = await open_libp2p(folder / KEY_NAME, listen=listen, clock=SystemClock(), initial_peers=[address])
    try:
        async with living(swarm, address, folder, owns=True) as one:
            yield one
    finally:
        await swarm.close()


@contextlib.asynccontextmanager
async def living(swarm: Swarm, address: str, folder: Path, *, owns: bool) -> AsyncIterator[IdleVolunteer]:
    """One on an open swarm."""
    host = read_address(address).peer
    run = (await fetch_stages(swarm, host, expected=None))[-1]
    volunteer = IdleVolunteer(swarm, run, folder, owns=owns)
    volunteer.node.watch.typed[host] = (address,)
    try:
        await volunteer.begin()
        yield volunteer
    finally:
        await volunteer.end()


@contextlib.asynccontextmanager
async def opened(folder: Path, address: str, numbers: list[int], listen: str | None = None) -> AsyncIterator[Handler]:
    """These volunteers take part while the block runs; with `listen`, the only one of them leads."""
    async with contextlib.AsyncExitStack() as stack:
        volunteers = {}
        for number in numbers:
            place = folder / f"volunteer-{number}"
            one = joined(address, place) if listen is None else leading(address, place, listen)
            volunteers[number] = await stack.enter_async_context(one)
        yield Volunteers(volunteers).handle


if __name__ == "__main__":
    place, ticket, *chosen = sys.argv[1:]
    listens = [word for word in chosen if word.startswith("/")]
    serve(lambda: opened(Path(place), ticket, [int(word) for word in chosen if word not in listens], *listens))
