"""Keepers of old versions, in a world whose archive has a chain of one module that they have worked on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from mirror_harness import ONE, Shelf, on_shelf
from runtime_harness import World, node_of, watch_forever
from tiny_run import signer
from virtual_time import end

from dipaco_p2p.node.node import serve_store
from dipaco_p2p.owner.chain import Chains
from dipaco_p2p.owner.challenges import Challenges
from dipaco_p2p.owner.keeper import Keeper
from dipaco_p2p.owner.mirror_calls import MirrorCalls
from dipaco_p2p.owner.retention import Retention
from dipaco_p2p.protocol.liveness import Heartbeat
from dipaco_p2p.protocol.signing import PeerId, Signer

FIRST = 60
ROOM = 10**9


class TinyKeeper:
    """A volunteer that only keeps: it looks when it is told to."""

    def __init__(
        self, world: World, number: int, *, room_bytes: int = ROOM, make: Callable[..., Keeper] = Keeper
    ) -> None:
        self.number = number
        self.swarm = world.network.join(signer(number))
        self.folder = world.folder / f"keeper-{number}"
        self.node = node_of(world.run, self.swarm, self.folder, world.clock, Heartbeat())
        self.keeper = make(self.node, self.folder / "keep", room_bytes=room_bytes)
        self.keeper.serve()
        chains = Chains(self.node)
        chains.kept, chains.find_kept = self.keeper.versions, self.keeper.archive.find_stored
        MirrorCalls(chains).serve_reading()
        serve_store(self.swarm, self.node.store, self.keeper.store)
        self.tasks = [asyncio.create_task(part) for part in (self.node.presence.run(), watch_forever(self.node))]

    @property
    def peer(self) -> PeerId:
        return self.swarm.peer

    def blobs(self) -> set[str]:
        return {path.name for path in (self.folder / "keep" / "blobs").glob("*/*")}

    async def offer(self) -> None:
        await self.node.presence.say(keeps=self.keeper.share)

    async def die(self, world: World) -> None:
        world.network.kill(self.peer)
        for task in self.tasks:
            await end(task)


class Keepers:
    """An archive that challenges, and those who keep for it."""

    def __init__(self, shelf: Shelf, numbers: range, *, wanted: int, room_bytes: int) -> None:
        self.shelf, self.world = shelf, shelf.world
        self.signers: list[Signer] = [signer(number) for number in numbers]
        seed = self.world.seed
        self.challenges = Challenges(seed.node, seed.archive, wanted=wanted)
        self.challenges.serve()
        if wanted:
            seed.archive.thinning.retention = Retention(rounds=2, keepers=wanted)
            seed.archive.thinning.kept_elsewhere = self.challenges.kept
        self.each = [TinyKeeper(self.world, number, room_bytes=room_bytes) for number in numbers]

    async def grow(self, *numbers: int) -> None:
        """Versions that count work of all keepers, in turn."""
        turns = itertools.islice(itertools.cycle(self.signers), 2 * numbers[0], None)
        for number in numbers:
            sealed, _ = self.shelf.version(number, authors=(next(turns), next(turns)))
            await self.shelf.keep(sealed)

    async def looks(self, times: int = 1, *, passing_s: float = 0.0) -> None:
        """All look, after they have heard of each other."""
        for _ in range(times):
            for one in self.alive:
                await one.offer()
            for one in self.alive:
                await one.node.watch.refresh()
                await one.keeper.look()
            await self.world.seed.node.watch.refresh()
            await self.world.clock.sleep(passing_s)

    @property
    def alive(self) -> list[TinyKeeper]:
        return [one for one in self.each if self.world.network.lives(one.peer)]

    async def challenged(self, times: int = 1) -> None:
        for _ in range(times):
            await self.world.seed.node.watch.refresh()
            await self.challenges.look()


@asynccontextmanager
async def on_keepers(
    folder: Path, *, count: int = 4, versions: int = 10, wanted: int = 0, rounds: int = 40, room_bytes: int = ROOM
) -> AsyncIterator[Keepers]:
    """`count` keepers of an archive with `versions`, by whom it has let them work."""
    async with on_shelf(folder, keeps_everything=True, rounds=rounds) as shelf:
        shelf.adopt(ONE, term=1)
        found = Keepers(shelf, range(FIRST, FIRST + count), wanted=wanted, room_bytes=room_bytes)
        try:
            await found.grow(*range(1, versions + 1))
            yield found
        finally:
            for one in found.each:
                await one.die(found.world)
