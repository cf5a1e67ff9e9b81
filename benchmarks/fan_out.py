"""`python -m benchmarks.fan_out`: how long a new version takes to reach all who train its module, and who sends it.

The programs' own fetching (`owner/sources.py`, `swarm/blobs/`) in virtual time, between peers with lines of their own:
a leader, two mirrors and the coordinator, which have the version at once, and trainers, which want it at once. The
coordinator's line serves the versions of other modules as well, so this module has only a part of it. `before` asks as
trainers did before they had turns: the leader, the mirrors, three trainers and the coordinator, all at once.

Bytes are scaled: a smaller blob stands for the whole one, on lines that are as much thinner. Applying the update
and disks take no time. Hostile trainers stand where they do most harm in the first version, at the front of the order;
in the ones after it they stand where the hash of the version puts them.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Annotated, Any, cast
from unittest import mock

import typer

from benchmarks.report import MB, JsonFile, require_known, run_benchmark, show, table, write_json
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.node.node import Member, fetch
from dipaco_p2p.owner import sources
from dipaco_p2p.owner.sources import Sources
from dipaco_p2p.program.tasks import SingleFlight
from dipaco_p2p.protocol import fan_out
from dipaco_p2p.protocol.documents import BlobRef, ModuleVersion
from dipaco_p2p.protocol.liveness import Heartbeat
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm.blobs.bandwidth import Line
from dipaco_p2p.swarm.blobs.blobs import serve_blobs
from dipaco_p2p.swarm.memory import MemoryNetwork
from dipaco_p2p.topology import ModuleId
from simulation.virtual_time import VirtualClock, VirtualLoop

MODULE = ModuleId(0, 0)
OWNERS = 3
BLOB_BYTES_MIN = 1 << 20
SCALE_MAX = 40
"""A line that is scaled down further would be thinner than any limit may be (swarm/blobs/bandwidth.py)."""
DELAY_S = 0.02
LIMIT_S = 24 * 3600.0
TRICKLE = 0.01
"""Of its line is what a trickling trainer gives."""
HOSTILE = "silent", "trickles", "wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One swarm of one module."""

    trainers: int
    size_mb: float
    """Of what everybody fetches."""
    up_mbit: float
    down_mbit: float
    sharers: int
    """Modules that share the coordinator's line."""
    is_in_turn: bool = True
    hostile: int = 0
    """Of the trainers."""
    kind: str = HOSTILE[0]
    versions: int = 1

    @property
    def blob_bytes(self) -> int:
        """Of the blob that stands for the whole one."""
        return max(BLOB_BYTES_MIN, int(self.size_mb * MB / SCALE_MAX))

    @property
    def scale(self) -> float:
        return self.size_mb * MB / self.blob_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What one version took."""

    last_s: float
    """Until the last honest trainer had it."""
    median_s: float
    leader: float
    """Copies that it sent."""
    mirror: float
    """The one that sent most."""
    trainer: float
    """Likewise, of the honest ones."""
    coordinator: float


class Blobs:
    """A store in memory, and what it gave away."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.sent_bytes = 0
        self.shown: dict[str, bytes] = {}
        """What it gives in place of what it should hold."""

    def get(self, name: str) -> bytes | None:
        return self.held.get(name)

    def put(self, data: bytes) -> BlobRef:
        ref = BlobRef.of(data)
        self.held[ref.digest] = data
        return ref

    def size(self, name: str) -> int | None:
        return len(self.held[name]) if name in self.held else None

    def partial_path(self, name: str) -> None:
        return None

    def read_range(self, name: str, offset: int, length: int) -> bytes | None:
        data = self.shown.get(name, self.held.get(name))
        part = None if data is None else data[offset : offset + length]
        self.sent_bytes += len(part or b"")
        return part

    def shown_size(self, name: str) -> int | None:
        return len(self.shown[name]) if name in self.shown else self.size(name)


class Stage:
    """All peers of one case."""

    def __init__(self, case: Case) -> None:
        self.case, self.clock = case, VirtualClock()
        self.nodes: dict[PeerId, Any] = {}
        self.sources: dict[PeerId, Sources] = {}
        network = MemoryNetwork(1, self.clock, delay_s=(DELAY_S, DELAY_S))
        count = 1 + OWNERS + case.trainers
        signers = [Signer(number.to_bytes(32, "big")) for number in range(1, count + 1)]
        self.seed, self.leader, *rest = (signer.peer for signer in signers)
        self.mirrors, self.trainers = rest[: OWNERS - 1], rest[OWNERS - 1 :]
        self.hostile = frozenset[PeerId]()
        beats = {signer.peer: Heartbeat(addresses=("/memory",), owns=True) for signer in signers}
        beats[self.seed] = Heartbeat(role="seed")
        watch = SimpleNamespace(
            heartbeats=beats,
            claims={},
            neighbourhood=SimpleNamespace(is_all=True),
            leader=lambda module: self.leader,
            seeds=lambda: [self.seed],
            addresses=lambda peer: (),
        )
        grant = SimpleNamespace(group=(self.leader, *self.mirrors))
        for signer in signers:
            self._join(network, signer, watch, grant)

    def _join(self, network: MemoryNetwork, signer: Signer, watch: Any, grant: Any) -> None:
        case, blobs = self.case, Blobs()
        share = case.scale * (case.sharers if signer.peer == self.seed else 1)
        line = Line(up_mbit=case.up_mbit / share, down_mbit=case.down_mbit / share, clock=self.clock)
        swarm = network.join(signer, line=line)
        serve_blobs(swarm, blobs.read_range, blobs.shown_size)
        node = SimpleNamespace(
            peer=signer.peer,
            swarm=swarm,
            clock=self.clock,
            store=blobs,
            watch=watch,
            run=SimpleNamespace(manifest=SimpleNamespace(author=self.seed)),
            mandates=SimpleNamespace(grant=lambda module: grant),
            history=SimpleNamespace(add=lambda ev, **facts: None),
            fetching=SingleFlight[bytes](),
        )
        self.nodes[signer.peer] = node
        self.sources[signer.peer] = Sources(cast(Member, node), MODULE)

    async def play(self) -> list[Told]:
        """One version after the other."""
        return [await self._version(number) for number in range(1, self.case.versions + 1)]

    async def _version(self, number: int) -> Told:
        data = random.Random(number).randbytes(self.case.blob_bytes)
        for peer in (self.seed, self.leader, *self.mirrors):
            self.nodes[peer].store.put(data)
        ref = BlobRef.of(data)
        shares = tuple(SimpleNamespace(peer=peer) for peer in self.trainers)
        version: Any = SimpleNamespace(
            version=number, digest=ref.digest, update=ref, author=self.leader, shares=shares, module=MODULE
        )
        if number == 1:
            self.hostile = frozenset(fan_out.order(ref.digest, self.trainers)[: self.case.hostile])
            for peer in self.hostile if self.case.kind == "trickles" else ():
                line = self.nodes[peer].swarm.line
                line.up._bucket.bytes_per_s *= TRICKLE
        for peer in self.hostile:
            shown = {"silent": {}, "trickles": {ref.digest: data}, "wrong": {ref.digest: bytes(len(data))}}
            self.nodes[peer].store.shown |= shown[self.case.kind]
        before = {peer: node.store.sent_bytes for peer, node in self.nodes.items()}
        honest = [peer for peer in self.trainers if peer not in self.hostile]
        took_s = await asyncio.gather(*(self._fetched(peer, version) for peer in honest))
        copies = {peer: (node.store.sent_bytes - before[peer]) / len(data) for peer, node in self.nodes.items()}
        return Told(
            last_s=max(took_s),
            median_s=statistics.median(took_s),
            leader=copies[self.leader],
            mirror=max(copies[peer] for peer in self.mirrors),
            trainer=max(copies[peer] for peer in honest),
            coordinator=copies[self.seed],
        )

    async def _fetched(self, peer: PeerId, version: ModuleVersion) -> float:
        began_s = self.clock.now_s()
        while True:
            try:
                if self.case.is_in_turn:
                    await self.sources[peer].update(version, keep=True)
                else:
                    assert version.update is not None
                    await fetch(self.nodes[peer], version.update, holders=self._before(peer), keep=True)
                return self.clock.now_s() - began_s
            except DipacoError:
                await self.clock.sleep(0.5)

    def _before(self, peer: PeerId) -> Sequence[PeerId]:
        others = sorted((other for other in self.trainers if other != peer), key=lambda other: (other < peer, other))
        return [self.leader, *self.mirrors, *others[: sources.TRAINERS_MAX], self.seed]


def played(case: Case) -> list[Told]:
    """What each version of a case took."""

    async def run() -> list[Told]:
        async with asyncio.timeout(LIMIT_S):
            return await Stage(case).play()

    thin = sources.THIN_BYTES_S / case.scale
    with mock.patch.object(sources, "THIN_BYTES_S", thin), asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


def main(
    trainers: Annotated[str, typer.Option(help="So many, one table row each.")] = "4,8,16,32",
    sizes: Annotated[str, typer.Option(help="Of what everybody fetches, in MB.")] = "25,100",
    up_mbit: Annotated[float, typer.Option(min=0.1, help="Everybody's uplink.")] = 20.0,
    down_mbit: Annotated[float, typer.Option(min=0.1, help="Everybody's downlink.")] = 100.0,
    sharers: Annotated[int, typer.Option(min=1, help="Modules that share the coordinator's line.")] = 4,
    hostile: Annotated[int, typer.Option(min=0, help="So many of the trainers, the first ones in the order.")] = 0,
    kinds: Annotated[str, typer.Option(help=f"What they do: {', '.join(HOSTILE)}.")] = ",".join(HOSTILE),
    versions: Annotated[int, typer.Option(min=1, help="One after the other, with --hostile.")] = 3,
    json_file: JsonFile = None,
) -> None:
    """Play one new version among trainers on equal lines, as before and in turn; with --hostile, several in turn."""
    require_known("kind", chosen := kinds.split(","), HOSTILE)
    found: list[dict[str, Any]] = []
    for size_mb in map(float, sizes.split(",")):
        lines = {"size_mb": size_mb, "up_mbit": up_mbit, "down_mbit": down_mbit, "sharers": sharers}
        rows = []
        for count in map(int, trainers.split(",")):
            for case in _cases(count, lines, hostile=hostile, kinds=chosen, versions=versions):
                told = played(case)
                found.append(asdict(case) | {"told": [asdict(each) for each in told]})
                rows.append(_row(case, told))
        one_s = size_mb * 8 / up_mbit
        title = f"{size_mb:g} MB to each, {up_mbit:g} Mbit/s up and {down_mbit:g} down; one copy takes {one_s:g} s"
        columns = (
            "trainers",
            "",
            "last has it, s",
            "median, s",
            "copies: leader",
            "a mirror",
            "a trainer",
            "coordinator",
        )
        show(table(title, columns, rows, left=("",)))
    write_json(json_file, found)


def _cases(count: int, lines: dict[str, Any], *, hostile: int, kinds: Sequence[str], versions: int) -> list[Case]:
    if not hostile:
        return [Case(trainers=count, is_in_turn=is_in_turn, **lines) for is_in_turn in (False, True)]
    if hostile >= count:
        raise typer.BadParameter(f"{hostile} of {count} trainers are hostile: leave at least one that is not")
    twin = Case(trainers=count, versions=versions, **lines)
    return [twin, *(Case(trainers=count, hostile=hostile, kind=kind, versions=versions, **lines) for kind in kinds)]


def _row(case: Case, told: Sequence[Told]) -> tuple[str, ...]:
    what = ("in turn" if case.is_in_turn else "before") if case.versions == 1 or not case.hostile else ""
    what = what or f"{case.hostile} {case.kind}"

    def each(name: str, form: str) -> str:
        return "; ".join(format(getattr(one, name), form) for one in told)

    copies = [each(name, ".2f") for name in ("leader", "mirror", "trainer", "coordinator")]
    return (str(case.trainers), what, each("last_s", ".1f"), each("median_s", ".1f"), *copies)


if __name__ == "__main__":
    run_benchmark(main)
