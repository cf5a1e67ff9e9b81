"""Owners as volunteers are, but for the training: they take what falls to them, keep groups full, and merge."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from runtime_harness import TinyLeader, World, offer
from tiny_run import contribution_of, gradient_bytes, tiny_config
from virtual_time import eventually

from bootstrap.archives.verify import verify_run
from dipaco_p2p.errors import Refused, Unreachable
from dipaco_p2p.node.ledger import Ledger
from dipaco_p2p.node.node import Member
from dipaco_p2p.owner.leader import Leader
from dipaco_p2p.owner.retention import Retention
from dipaco_p2p.protocol.documents import Contribution, Receipt, Sealed, seal
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.topology import ModuleId, PathId
from simulation.virtual_time import Process

MODULE = ModuleId(1, 0)
PATH, OTHER_PATH = PathId((0, 0, 0)), PathId((0, 0, 1))
"""The two paths through MODULE: a round that has both closes at once."""


class GroupMember(TinyLeader):
    """An owner that acts by itself."""

    def __init__(self, world: World, number: int, *, process: Process) -> None:
        """To be called in the context of `process`."""
        super().__init__(world, number)
        self.number = number
        self.process = process
        self._network = world.network
        self.ownership._may_take = lambda: True
        self.tasks.append(asyncio.create_task(self.ownership.run(), name=f"member {number}"))

    def freeze(self) -> None:
        """As SIGSTOP: it does nothing and answers nothing."""
        self._network.freeze(self.peer)
        self.process.freeze()

    def thaw(self) -> None:
        self.process.thaw()
        self._network.thaw(self.peer)

    @property
    def leads(self) -> bool:
        owner = self.ownership._leaders.get(MODULE)
        return owner is not None and owner.is_leading

    @property
    def ledger(self) -> Ledger:
        return self.chain.ledger

    def said(self, ev: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["ev"] == ev and event["module"] == str(MODULE)]


class Group:
    """The members of a world, by what they do for MODULE."""

    def __init__(self, world: World, numbers: Sequence[int]) -> None:
        self.world = world
        self.members: list[GroupMember] = []
        for number in numbers:
            self.join(number)

    def join(self, number: int) -> GroupMember:
        """One more; also one that was here before, with its disk."""
        process = Process(f"member {number}")
        member = process.context.run(GroupMember, self.world, number, process=process)
        self.world.leaders.append(member)
        self.members.append(member)
        return member

    async def kill(self, member: GroupMember) -> None:
        self.members.remove(member)
        await member.die(self.world)

    def of(self, peer: PeerId) -> GroupMember:
        return next(member for member in self.members if member.peer == peer)

    @property
    def leading(self) -> list[GroupMember]:
        return [member for member in self.members if member.leads]

    @property
    def leader(self) -> GroupMember:
        [found] = self.leading
        return found

    @property
    def mirrors(self) -> list[GroupMember]:
        """Of the leader's grant, those that live."""
        peers = {member.peer for member in self.members}
        return [self.of(peer) for peer in self.leader.owner(MODULE).grant.mirrors if peer in peers]

    async def formed(self, *, mirrors: int = 2) -> Group:
        """Wait until one leads, with so many mirrors that live, all of which have its chain."""
        await eventually(lambda: self._is_formed(mirrors))
        return self

    def _is_formed(self, mirrors: int) -> bool:
        if len(self.leading) != 1:
            return False
        head = self.leader.ledger.head.digest
        grant = self.leader.owner(MODULE).grant
        everybody = len(self.mirrors) == len(grant.mirrors) == mirrors
        return everybody and all(
            mirror.ledger.head.digest == head and mirror.node.mandates.grant(MODULE) == grant for mirror in self.mirrors
        )

    async def seed_away(self) -> None:
        """Kill the seed, and wait until all have noticed."""
        await self.world.kill_seed()
        await eventually(lambda: not any(member.node.watch.seeds() for member in self.members))


@asynccontextmanager
async def of_group(
    folder: Path, *, numbers: Sequence[int] = (50, 51, 52), rounds: int = 30, **faults: Any
) -> AsyncIterator[tuple[World, Group, Member]]:
    """`scene` gets a group that has formed, and an author that may contribute."""
    async with World(folder, config=tiny_config(rounds=rounds), **faults) as world:
        group = await Group(world, numbers).formed(mirrors=min(len(numbers), 3) - 1)
        author = world.peer(60)
        await author.watch.refresh()
        yield world, group, author


def deaf(member: GroupMember | World, method: str) -> None:
    """It answers everything but `method`."""

    async def refuse(*_: object) -> Reply:
        raise Refused("not now", reason="busy")

    swarm = member.seed.swarm if isinstance(member, World) else member.swarm
    swarm._dispatcher._handlers[method] = refuse


async def lighten(world: World, group: Group, retention: Retention) -> None:
    """The seed's archive keeps what `retention` says, and all members have heard that it is light."""
    world.seed.archive.thinning.retention = retention
    await world.seed.node.presence.say(light=retention.is_light)
    seed = world.seed.node.peer
    await eventually(lambda: all(_hears(member, seed) == retention.is_light for member in group.members))
    await world.seed.node.watch.refresh()


def _hears(member: GroupMember, seed: PeerId) -> bool | None:
    beat = member.node.watch.heartbeats.get(seed)
    return None if beat is None else beat.light


def asked(world: World) -> list[str]:
    """The methods that the seed node is called by, from now on."""
    calls: list[str] = []
    handlers = world.seed.swarm._dispatcher._handlers

    def noting(method: str, handler: Any) -> Any:
        async def noted(*request: Any) -> Any:
            calls.append(method)
            return await handler(*request)

        return noted

    handlers.update({method: noting(method, handler) for method, handler in handlers.items()})
    return calls


def document(world: World, ledger: Ledger, author: Member, payload: bytes, *, path: PathId = PATH) -> Contribution:
    """An honest contribution to the head of `ledger`."""
    base = {"base_version": ledger.head.version, "base_digest": ledger.head.digest}
    return contribution_of(world.run, author.swarm.signer, payload, module=MODULE, path=path, **base)


async def contribute(
    world: World, leader: TinyLeader, author: Member, *, seed: int = 0, path: PathId = PATH, size: float = 1e-3
) -> Sealed[Receipt]:
    payload = gradient_bytes(world.run, MODULE, seed=seed, size=size)
    sealed = seal(author.swarm.signer, document(world, leader.chain.ledger, author, payload, path=path))
    return await push(author, leader, sealed, payload)


async def push(author: Member, leader: TinyLeader, sealed: Sealed[Contribution], payload: bytes) -> Sealed[Receipt]:
    """Until there is an answer: a leader may wait as long as we for mirrors that it cannot reach."""
    for _ in range(3):
        with contextlib.suppress(Unreachable):
            return await offer(author, leader.peer, sealed, payload)
    return await offer(author, leader.peer, sealed, payload)


async def sees(node: Member, leader: TinyLeader) -> None:
    """Look until `node` believes that `leader` leads."""
    for _ in range(40):
        await node.watch.refresh()
        if node.watch.leader(MODULE) == leader.peer:
            return
        await asyncio.sleep(0.5)
    raise AssertionError(f"{leader.peer} is not believed")


async def make_versions(
    world: World, leader: TinyLeader, author: Member, count: int = 1, *, seed: int = 0
) -> list[str]:
    """Let `leader` make versions of two contributions each; the contributions' ids."""
    ledger, ids = leader.chain.ledger, []
    for number in range(count):
        before = ledger.head.version
        for offset, path in enumerate((PATH, OTHER_PATH)):
            receipt = await contribute(world, leader, author, seed=1000 * seed + 2 * number + offset, path=path)
            ids.append(receipt.document.contribution)
        await eventually(lambda before=before: ledger.head.version == before + 1)  # type: ignore[misc]
        owner = leader.owner(MODULE)
        await eventually(lambda owner=owner: owner._published == owner.head.version)  # type: ignore[misc]
    return ids


async def lead_at_last(world: World, leader: TinyLeader) -> Leader:
    """Lead MODULE, also if its group may still come back, or had a newer version: that is waited for a while."""
    for _ in range(20):
        with contextlib.suppress(Unreachable, Refused):
            return await leader.lead(MODULE)
        await asyncio.sleep(world.run.config.liveness.heartbeat_ttl_s)
    return await leader.lead(MODULE)


async def expired(world: World) -> None:
    """Let time pass until whoever fell silent now is gone from the DHT, and all have looked."""
    await asyncio.sleep(2.0 * world.run.config.liveness.heartbeat_ttl_s)


def require_verified(world: World, *, versions: int) -> None:
    """The seed's archive has a chain of MODULE that anybody can make again."""
    [report] = [
        found for found in verify_run(world.run, world.seed.node.store, world.seed.archive) if found.module == MODULE
    ]
    assert (report.versions, report.problem) == (versions, "")


def counted(member: GroupMember) -> list[str]:
    """What the chain of a member counts, one entry for each time."""
    return [share.contribution for sealed in member.ledger.versions for share in sealed.document.shares]


async def seed_back(world: World, group: Group) -> None:
    await world.start_seed().node.presence.beat()
    await eventually(lambda: all(member.node.watch.seeds() for member in group.members))


async def require_safe(world: World, group: Group, *, versions: int) -> None:
    """The archive comes to have all of it, and anybody can make it again."""
    await eventually(lambda: world.seed.archive.ledgers[MODULE].head.version == versions)
    await eventually(lambda: group.leader.ledger.final == versions)
    require_verified(world, versions=versions)
