"""What volunteers read and are asked: the real programs in the simulator's virtual time, every read counted.

A read is one `get` of a DHT key: it brings all records that live under the key, as Kademlia's answer does, so records
and bytes count each time, also those that were known. Calls are counted at the peer that answers. Joining is left out:
counting begins after the warm-up. No faults strike.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from dipaco_p2p.config import LevelConfig
from dipaco_p2p.protocol.records import Record
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.memory import MemorySwarm
from simulation.plan import Plan, make_plan
from simulation.speed import remembered_signatures
from simulation.world import World, disks_folder, perform

TTL_S = 30.0
DEADLINE_S = 40.0
STEP_S = 10.0
"""With two steps a round: a round takes a volunteer about 20 s."""
ROUNDS = 1000
"""More than there is time for: the run must not end while it is measured."""
MEASURES = ("reads", "records", "bytes", "puts", "asked", "answered")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What one swarm did, a minute: of the median volunteer, and of the busiest peer."""

    volunteers: int
    grid: tuple[int, ...]
    median: dict[str, float]
    busiest: dict[str, float]
    fullest_records: int
    """Of all keys that anybody read."""
    fullest_bytes: int

    def row(self) -> str:
        """For people."""
        told = "  ".join(f"{self.median[name]:10,.0f}" for name in MEASURES)
        busy = f"{self.busiest['answered']:10,.0f}"
        return f"{self.volunteers:10d}  {told}  {busy}  {self.fullest_records:7d}  {self.fullest_bytes:9,d}"


HEADER = "volunteers  " + "  ".join(f"{name:>10}" for name in MEASURES) + "    busiest   fullest key, bytes"


def count(volunteers: int, *, grid: Sequence[int], minutes: float, warm_up_s: float, seed: int = 1) -> Counts:
    """Play a swarm of so many volunteers for `minutes` after the warm-up."""
    plan = counted_plan(volunteers, grid=grid, until_s=warm_up_s + 60 * minutes, seed=seed)
    with (
        tempfile.TemporaryDirectory(prefix="dipaco-scale-", dir=disks_folder()) as name,
        remembered_signatures(),
    ):
        world = Unfinished(plan, Path(name))
        with _counted(world, from_s=warm_up_s) as counter:
            perform(world)
    assert not world.bugs, world.bugs
    return counter.counts(plan, grid=tuple(grid), minutes=minutes)


def counted_plan(volunteers: int, *, grid: Sequence[int], until_s: float, seed: int) -> Plan:
    """A run without faults and without judges, that nobody can finish in time."""
    plan = make_plan(seed, (), volunteers=volunteers)
    levels = tuple(
        LevelConfig(modules=width, blocks=1, embedding=number == 0, head=number == 0)
        for number, width in enumerate(grid)
    )
    config = replace(
        plan.config,
        model=replace(plan.config.model, levels=levels),
        rounds=replace(
            plan.config.rounds, rounds=ROUNDS, min_paths=1, deadline_s=DEADLINE_S, owners=2, overlap=False, staleness=1
        ),
        liveness=replace(plan.config.liveness, heartbeat_ttl_s=TTL_S, settle_s=2.0),
        judging=replace(plan.config.judging, judges=0, audited=0),
    )
    return replace(
        plan,
        config=config,
        step_s=tuple(STEP_S for _ in range(volunteers)),
        join_s=tuple(5.0 * number / volunteers for number in range(volunteers)),
        delay_s=(0.01, 0.05),
        loss=0.0,
        faulty_s=until_s,
        faults=(),
        is_narrow=False,
    )


class Unfinished(World):
    """A world that ends when its time is over."""

    async def _finish(self) -> None:
        return


class _Counter:
    def __init__(self) -> None:
        self.by_peer: dict[PeerId, Counter[str]] = defaultdict(Counter)
        self.fullest_records = self.fullest_bytes = 0

    def read(self, peer: PeerId, records: Sequence[Record]) -> None:
        size_bytes, mine = sum(len(record.to_bytes()) for record in records), self.by_peer[peer]
        mine["reads"] += 1
        mine["records"] += len(records)
        mine["bytes"] += size_bytes
        self.fullest_records = max(self.fullest_records, len(records))
        self.fullest_bytes = max(self.fullest_bytes, size_bytes)

    def counts(self, plan: Plan, *, grid: tuple[int, ...], minutes: float) -> Counts:
        peers = [self.by_peer[peer] for peer in self.volunteers]
        everybody = list(self.by_peer.values())
        return Counts(
            volunteers=plan.volunteers,
            grid=grid,
            median={name: statistics.median(each[name] for each in peers) / minutes for name in MEASURES},
            busiest={name: max(each[name] for each in everybody) / minutes for name in MEASURES},
            fullest_records=self.fullest_records,
            fullest_bytes=self.fullest_bytes,
        )

    volunteers: Sequence[PeerId] = ()


@contextlib.contextmanager
def _counted(world: World, *, from_s: float) -> Iterator[_Counter]:
    """Counts what happens in the block from `from_s` on."""
    counter = _Counter()
    counter.volunteers = [each.peer for each in world.volunteers]
    get, put, call, answer = MemorySwarm.get, MemorySwarm.put, MemorySwarm.call, MemorySwarm._answer

    async def counted_get(self: MemorySwarm, key: str) -> dict[PeerId, Record]:
        found = await get(self, key)
        if world.now_s >= from_s:
            counter.read(self.peer, list(found.values()))
        return found

    async def counted_put(self: MemorySwarm, key: str, body: dict[str, Any], *, ttl_s: float) -> bool:
        counter.by_peer[self.peer]["puts"] += world.now_s >= from_s
        return await put(self, key, body, ttl_s=ttl_s)

    async def counted_call(self: MemorySwarm, *arguments: Any, **options: Any) -> Any:
        counter.by_peer[self.peer]["asked"] += world.now_s >= from_s
        return await call(self, *arguments, **options)

    async def counted_answer(self: MemorySwarm, *arguments: Any) -> Any:
        counter.by_peer[self.peer]["answered"] += world.now_s >= from_s
        return await answer(self, *arguments)

    with (
        mock.patch.object(MemorySwarm, "get", counted_get),
        mock.patch.object(MemorySwarm, "put", counted_put),
        mock.patch.object(MemorySwarm, "call", counted_call),
        mock.patch.object(MemorySwarm, "_answer", counted_answer),
    ):
        yield counter
