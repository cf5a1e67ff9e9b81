"""A tiny run in one process: a seed node, volunteers, and bare peers that speak to them by hand."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Any

from tiny_run import SEED_NUMBER, make_run, signer, tiny_config
from virtual_time import VirtualClock, end, play

from bootstrap.archives.verify import verify_run
from bootstrap.coordinator.terms import Terms
from bootstrap.folder import write_stage
from dipaco_p2p.config import RunConfig
from dipaco_p2p.errors import Refused
from dipaco_p2p.node.decree_news import serve_decrees
from dipaco_p2p.node.node import Member, open_member, send, serve_store
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.stages import Stages
from dipaco_p2p.node.store import Store
from dipaco_p2p.node.watch import CLAIM_LOOK_S
from dipaco_p2p.owner.archive import ArchiveChains, SeedArchive
from dipaco_p2p.owner.chain import Chains, ModuleChain
from dipaco_p2p.owner.granting import Electing
from dipaco_p2p.owner.judge import Judge, Measure, Repeat
from dipaco_p2p.owner.leader import Leader
from dipaco_p2p.owner.leadership import Leadership
from dipaco_p2p.protocol.documents import Contribution, Receipt, Sealed, seal, unseal
from dipaco_p2p.protocol.liveness import Heartbeat, heartbeat_interval_s
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.memory import MemoryNetwork, MemorySwarm
from dipaco_p2p.topology import ModuleId, PathId
from peers.path.kept import outbox_of
from peers.path.repeating import Repeater
from peers.path.trainer import PathTrainer
from peers.status import Status
from peers.volunteer import Volunteer

GRACE_S = 30.0
TRIES = 40
"""A leader looks for a claim at most once in CLAIM_LOOK_S, and has whoever is too fast wait."""
LATER = 2**20
"""A round that no test comes to."""


def node_of(
    run: Run, swarm: MemorySwarm, folder: Path, clock: Any, heartbeat: Heartbeat, *, upload_bytes_max: int = 0
) -> Member:
    """A peer as the programs build it; `events` of its history are in memory."""
    store = Store(folder)
    node = open_member(run, swarm, clock, store, heartbeat=heartbeat, upload_bytes_max=upload_bytes_max)
    serve_decrees(node.swarm, node.decrees, node.presence)
    return node


def taking_uploads(run: Run, swarm: MemorySwarm, folder: Path, clock: Any) -> Member:
    """The same, taking uploads as a volunteer does."""
    size_max = max(map(run.payload_bytes_max, run.topology.modules()))
    return node_of(run, swarm, folder, clock, Heartbeat(owns=True), upload_bytes_max=size_max)


def judging(chains: Chains, measure: Measure | None, repeat: Repeat | None = None) -> None:
    """Let this peer measure work, as the programs do."""
    judge = Judge(chains.node, measure=measure, repeat=repeat)
    chains.appraise = judge.appraise
    judge.serve()


class SeedChains(ArchiveChains):
    """What a seed node keeps, for which some have worked whom no version counts."""

    known: AbstractSet[PeerId] = frozenset()

    @property
    def workers(self) -> frozenset[PeerId]:
        return super().workers | self.known


class LeaderChains(Chains):
    """The same of a leader."""

    known: AbstractSet[PeerId] = frozenset()

    @property
    def workers(self) -> frozenset[PeerId]:
        return super().workers | self.known


class TinySeed:
    """The seed node of a tiny run, without its command line: archive, blobs, owner of last resort."""

    def __init__(self, world: World, run: Run) -> None:
        self.swarm = world.network.join(signer(SEED_NUMBER))
        heartbeat = Heartbeat(role="seed", owns=True, doing="serving")
        size_max = 2 * max(map(run.snapshot_bytes_max, run.topology.modules()))
        self.node = node_of(run, self.swarm, world.folder / "seed", world.clock, heartbeat, upload_bytes_max=size_max)
        self.archive = SeedArchive(run, self.node.store)
        self.chains = SeedChains(self.node, self.archive)
        judging(self.chains, world.measure)
        self.chains.known = world.known
        self.terms = Terms(self.chains, on_deposed=self._on_deposed)
        self.terms.serve()
        self.ownership = Leadership(self.chains, self.terms)
        Stages(self.swarm).add(run)
        serve_store(self.swarm, self.node.store)

    def term(self, module: ModuleId) -> int:
        """The newest term of `module` that it knows of."""
        return self.node.mandates.term(module)

    async def run(self) -> None:
        await asyncio.gather(self.node.presence.run(), watch_forever(self.node), self.ownership.run())

    async def _on_deposed(self, module: ModuleId, holder: PeerId) -> None:
        if holder == self.node.peer:
            await self.ownership.drop(module)
            await self.node.presence.resign(module)


class TinyVolunteer:
    """A volunteer of a tiny run, with everything that it said of itself in `events`."""

    def __init__(
        self,
        world: World,
        run: Run,
        number: int,
        *,
        status: Status | None = None,
        make_trainer: Callable[..., PathTrainer] = PathTrainer,
    ) -> None:
        self.number = number
        self.folder = world.folder / f"volunteer-{number}"
        self.swarm = world.network.join(signer(number))
        self.node = taking_uploads(run, self.swarm, self.folder, world.clock)
        self.events: list[dict[str, Any]] = []
        self.node.history.listen(self.events.append)
        serve_store(self.swarm, self.node.store, outbox_of(self.node.store))
        self.chains = Chains(self.node)
        repeat = Repeater(self.node, make_trainer=partial(PathTrainer, device="cpu"))
        judging(self.chains, world.measure, repeat)
        self.ownership = Leadership(self.chains, Electing(self.node), may_take=lambda: self.volunteer.is_run_open())
        self.status = status or Status()
        self.volunteer = Volunteer(self.node, self.ownership, self.status, device="cpu", make_trainer=make_trainer)
        self.task: asyncio.Task[None] | None = None

    @property
    def peer(self) -> PeerId:
        return self.swarm.peer

    def start(self) -> TinyVolunteer:
        self.task = asyncio.create_task(self._run(), name=f"volunteer {self.number}")
        return self

    async def _run(self) -> None:
        await self.node.watch.refresh()
        await self.volunteer.run(grace_s=GRACE_S)

    async def done(self) -> None:
        assert self.task is not None
        await self.task

    def said(self, ev: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["ev"] == ev]


async def watch_forever(node: Member) -> None:
    while True:
        await node.watch.refresh()
        await node.clock.sleep(heartbeat_interval_s(node.run.config.liveness) / 2)


class World:
    """A network with a seed node, and whoever joins it; a context manager that ends all of them."""

    def __init__(
        self,
        folder: Path,
        *,
        config: RunConfig | None = None,
        workers: Iterable[PeerId] = (),
        seed: int = 7,
        measure: Measure | None = None,
        repeat: Repeat | None = None,
        **faults: Any,
    ) -> None:
        """`workers` worked in a stage before. `measure` stands in for what judges measure with the model, and `repeat`
        for what leaders do as auditors."""
        self.folder = folder
        self.measure = measure
        self.repeat = repeat
        self.clock = VirtualClock()
        self.network = MemoryNetwork(seed, self.clock, **faults)
        store = Store(folder / "seed")
        self.run = write_stage(store, make_run(store, config or tiny_config(), workers=workers).sealed)
        self.volunteers: list[TinyVolunteer] = []
        self.leaders: list[TinyLeader] = []
        self.known: set[PeerId] = set()
        """Leaders that are taken to have worked, so that they may lead ahead of the seed node."""
        self.seed: TinySeed
        self._seed_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> World:
        self.start_seed()
        await self.seed.node.presence.beat()
        return self

    async def __aexit__(self, *error: object) -> None:
        for volunteer in self.volunteers:
            await self.kill(volunteer)
        for leader in self.leaders:
            await leader.die(self)
        await self.kill_seed()

    def start_seed(self) -> TinySeed:
        """Also after `kill_seed`: it goes on from its disk."""
        self.seed = TinySeed(self, self.run)
        self._seed_task = asyncio.create_task(self.seed.run(), name="seed")
        return self.seed

    async def kill_seed(self) -> None:
        self.network.kill(self.seed.swarm.peer)
        await end(self._seed_task)
        for module in self.seed.ownership.modules:
            await self.seed.ownership.drop(module)

    def join(self, number: int, **settings: Any) -> TinyVolunteer:
        volunteer = TinyVolunteer(self, self.run, number, **settings)
        self.volunteers.append(volunteer)
        return volunteer.start()

    def join_all(self, numbers: Iterable[int] = (1, 2, 3, 4)) -> None:
        """By default one for every path."""
        for number in numbers:
            self.join(number)

    async def done(self) -> None:
        """Wait until every volunteer has finished the run."""
        for volunteer in self.volunteers:
            await volunteer.done()

    async def finish(self) -> None:
        """To the end of the run, with whoever is left: every chain verifies, and what has a receipt is counted."""
        for volunteer in self.volunteers:
            if volunteer.task is not None and not volunteer.task.done():
                await volunteer.done()
        reports = verify_run(self.run, self.seed.node.store, self.seed.archive)
        assert {(report.versions, report.problem) for report in reports} == {(self.run.config.rounds.rounds, "")}
        receipts = {event["id"] for volunteer in self.volunteers for event in volunteer.said("receipt")}
        assert receipts <= {id_ for ledger in self.seed.archive.ledgers.values() for id_ in ledger.counted}

    def digests(self) -> dict[ModuleId, str]:
        """Of the newest version of each module, in the archive."""
        return {module: ledger.head.digest for module, ledger in self.seed.archive.ledgers.items()}

    async def kill(self, volunteer: TinyVolunteer) -> None:
        """As SIGKILL would: nothing that it does from now on reaches anybody."""
        self.network.kill(volunteer.peer)
        await end(volunteer.task)

    def leader(self, number: int, *, has_worked: bool = True) -> TinyLeader:
        self.leaders.append(TinyLeader(self, number, has_worked=has_worked))
        return self.leaders[-1]

    def peer(self, number: int) -> Member:
        """A bare node: no volunteer, for tests that speak to the others themselves."""
        return node_of(
            self.run,
            self.network.join(signer(number)),
            self.folder / f"peer-{number}",
            self.clock,
            Heartbeat(owns=False),
        )


class TinyLeader:
    """A peer that leads what it is told to, without training: its rounds close half a second after a contribution."""

    def __init__(self, world: World, number: int, *, has_worked: bool = True) -> None:
        self.swarm = world.network.join(signer(number))
        if has_worked:
            world.known.add(self.peer)
        folder = world.folder / f"leader-{number}"
        self.node = taking_uploads(world.run, self.swarm, folder, world.clock)
        self.events: list[dict[str, Any]] = []
        self.node.history.listen(self.events.append)
        self.chains = LeaderChains(self.node)
        judging(self.chains, world.measure, world.repeat)
        self.chains.known = world.known
        self.ownership = Leadership(self.chains, Electing(self.node), may_take=lambda: False)
        serve_store(self.swarm, self.node.store)
        self.tasks = [asyncio.create_task(part) for part in (self.node.presence.run(), watch_forever(self.node))]

    @property
    def peer(self) -> PeerId:
        return self.swarm.peer

    @property
    def chain(self) -> ModuleChain:
        """Of the module that most tests lead."""
        return self.chains[ModuleId(1, 0)]

    def owner(self, module: ModuleId) -> Leader:
        return self.ownership._leaders[module]

    async def lead(self, module: ModuleId) -> Leader:
        await self.node.watch.refresh()
        await self.ownership.take(module)
        return self.owner(module)

    async def die(self, world: World) -> None:
        world.network.kill(self.peer)
        for task in self.tasks:
            await end(task)
        for module in self.ownership.modules:
            await self.ownership.drop(module)


def flip(path: Path) -> None:
    """One bit of the byte in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


async def offer(
    node: Member,
    leader: PeerId,
    document: Contribution | Sealed[Contribution],
    payload: bytes,
    *,
    timeout_s: float = 20.0,
) -> Sealed[Receipt]:
    """Claim the path, upload, and contribute once, as any client may; raises what the leader says."""
    sealed = document if isinstance(document, Sealed) else seal(node.swarm.signer, document)
    await claim(node, sealed.document.path)
    await send(node, leader, payload)
    header: dict[str, Any] = {"contribution": sealed.to_dict()}
    header["invitations"] = [invitation.to_dict() for invitation in node.invitations.own]
    for _ in range(TRIES):
        try:
            reply = await node.swarm.call(leader, "module.contribute", header, timeout_s=timeout_s)
        except Refused as refused:
            if refused.reason not in (Reason.UNCLAIMED, Reason.TOO_SOON):
                raise
            await node.clock.sleep(CLAIM_LOOK_S)
        else:
            return unseal(Receipt, reply.header["receipt"])
    raise AssertionError("the leader does not see our claim, or thinks us too fast")


async def claim(node: Member, path: PathId) -> None:
    """Say that `node` trains `path`, in a way that no round waits for it."""
    before, since_s = node.presence._claim, node.clock.now_s()
    if before is not None:
        since_s = before.since_s if before.path == path else max(since_s, math.nextafter(before.since_s, math.inf))
    await node.presence.claim(path, since_s=since_s, round_number=LATER)


def digests_of(folder: Path, config: RunConfig, *, volunteers: int = 4) -> dict[ModuleId, str]:
    """The digests of a run in which nothing happens; four volunteers are one for every path."""
    found: dict[ModuleId, str] = {}

    async def scenario() -> None:
        async with World(folder, config=config) as world:
            world.join_all(range(1, volunteers + 1))
            await world.finish()
            found.update(world.digests())

    play(scenario)
    return found


def finished_run(folder: Path, *, rounds: int = 2) -> Run:
    """A run that four volunteers completed; the seed node's archive is in `folder`/seed."""
    found: list[Run] = []

    async def scenario() -> None:
        async with World(folder, config=tiny_config(rounds=rounds)) as world:
            world.join_all()
            await world.done()
            found.append(world.run)

    play(scenario)
    return found[0]
