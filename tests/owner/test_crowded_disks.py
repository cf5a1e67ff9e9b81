"""Strangers' work that may still count: it must neither fill an owner's disk nor keep others' work from it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

import pytest
from group_harness import MODULE, OTHER_PATH, PATH, Group, GroupMember, contribute
from runtime_harness import World
from tiny_run import signer, tiny_config
from virtual_time import eventually

from dipaco_p2p.errors import Refused
from dipaco_p2p.node.node import Member
from dipaco_p2p.owner import room
from dipaco_p2p.program import files
from dipaco_p2p.program.files import Disk
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import PathId
from peers.governor import allowances
from peers.governor.allowances import Allowance, InUse, LimitedDisk, folder_bytes

pytestmark = pytest.mark.slow
WORKER, NEWCOMER, CROWD = 60, 61, 100
PIECE_BYTES = 8192
"""What the two files of one piece of work take here."""


class SmallDisks(Disk):
    """Some folders may have only so many bytes, by `disk_gb`."""

    def __init__(self, reserve: int) -> None:
        """`reserve` pieces are to stay free."""
        self._reserve = reserve
        self._disks: dict[Path, LimitedDisk] = {}

    def shrink(self, *members: GroupMember, pieces: int) -> None:
        """From now on they have room for so many pieces beyond the reserve."""
        for member in members:
            folder, in_use = member.node.store.folder, InUse(free=member.node.uploads.free)
            limit_bytes = folder_bytes(folder) + (self._reserve + pieces) * PIECE_BYTES
            self._disks[folder] = LimitedDisk(Allowance(folder, limit_bytes, in_use=lambda in_use=in_use: in_use))

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        self._of(Path(file.name)).write(file, data)

    def free_bytes(self, folder: Path, *, wanted: int) -> int:
        return self._of(folder).free_bytes(folder, wanted=wanted)

    def _of(self, path: Path) -> Disk:
        return next((disk for folder, disk in self._disks.items() if path.is_relative_to(folder)), Disk())


class Crowd:
    """A group, and strangers that all come from one address."""

    def __init__(self, world: World, group: Group) -> None:
        self.world, self.group = world, group
        self.refused: dict[str, int] = {}
        """How often, by reason."""
        self._authors: dict[int, Member] = {}
        self._keys = iter(range(CROWD, 256))

    async def push(self, number: int, *, path: PathId = PATH) -> None:
        """One piece of work by the key `number`."""
        if number not in self._authors:
            self._authors[number] = self.world.peer(number)
        author = self._authors[number]
        await author.watch.refresh()
        await contribute(self.world, self.group.leader, author, seed=number, path=path)

    async def flood(self, pieces: int) -> None:
        """So many pieces, each by a new key."""
        for _ in range(pieces):
            try:
                await self.push(next(self._keys))
            except Refused as refused:
                self.refused[refused.reason] = self.refused.get(refused.reason, 0) + 1

    @property
    def is_anybody_out(self) -> bool:
        """Whether a write failed that ends a program."""
        return any(member.node.store.failure is not None for member in self.group.members)


@asynccontextmanager
async def crowded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, reserve: int = 24
) -> AsyncIterator[tuple[Crowd, SmallDisks]]:
    disk, worker = SmallDisks(reserve), signer(WORKER).peer
    monkeypatch.setattr(files, "disk", disk)
    monkeypatch.setattr(allowances, "LOOK_S", 0.0)
    monkeypatch.setattr(room, "path_bytes_max", lambda run: reserve * PIECE_BYTES // room.RESERVE_PATHS)
    async with World(folder, config=tiny_config(rounds=30), workers=[worker]) as world:
        group = await Group(world, (50, 51, 52)).formed()
        crowd = {signer(number).peer for number in range(CROWD, 256)}
        for member in group.members:

            def host(peer: PeerId) -> str:
                return "203.0.113.1" if peer in crowd else "198.51.100.7"

            monkeypatch.setattr(member.swarm, "host", host)
        yield Crowd(world, group), disk


async def test_a_crowd_fills_no_disk_and_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: half of a version's places, or all of them in a first round, with a new key for each piece: with 18 MB a
    piece up to 7 GB. An owner with less room ended with exit code 5, though its coordinator lived."""
    async with crowded(tmp_path, monkeypatch, reserve=4) as (crowd, disk):
        disk.shrink(crowd.group.leader, pieces=12)
        await crowd.flood(24)
        assert not crowd.is_anybody_out
        assert set(crowd.refused) == {Reason.BUSY}, "an honest newcomer comes again, and loses nothing"
        await crowd.push(NEWCOMER)
        await crowd.push(WORKER, path=OTHER_PATH)
        ledger = crowd.group.leader.ledger
        await eventually(lambda: ledger.head.version == 1)
        counted = [share.peer for share in ledger.head.shares]
        assert {signer(NEWCOMER).peer, signer(WORKER).peer} <= set(counted)


async def test_a_mirror_with_a_small_disk_makes_what_counts_a_crowds_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a part of the crowd's work, and what a version counts: it is neither full nor deaf."""
    async with crowded(tmp_path, monkeypatch) as (crowd, disk):
        group, leader = crowd.group, crowd.group.leader
        small, large = [group.of(peer) for peer in leader.owner(MODULE).grant.mirrors]
        await group.seed_away()
        disk.shrink(small, pieces=18)
        await crowd.flood(16)
        assert not crowd.refused and len(large.ledger.open) == 16
        assert 4 < len(small.ledger.open) < 16 and not leader.owner(MODULE).deaf
        await crowd.push(WORKER, path=OTHER_PATH)
        await eventually(lambda: leader.ledger.head.version == 1)
        assert len(leader.ledger.head.shares) == 17
        await eventually(lambda: small.peer in leader.ledger.versions[0].cosignatures)
        assert not crowd.is_anybody_out


async def test_whoever_takes_a_module_over_takes_of_a_crowds_work_what_it_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attack: what a crowd brought to the large disk of a leader filled the small one of its successor."""
    async with crowded(tmp_path, monkeypatch) as (crowd, disk):
        group = crowd.group
        first, second = group.mirrors
        disk.shrink(first, second, pieces=-8)
        await crowd.flood(24)
        assert not first.ledger.open and not second.ledger.open
        disk.shrink(first, second, pieces=8)
        await group.kill(group.leader)
        await eventually(lambda: len(group.leading) == 1)
        assert 0 < len(group.leader.ledger.open) < 24, "the archive gives it"
        await crowd.push(WORKER)
        await crowd.push(WORKER, path=OTHER_PATH)
        await eventually(lambda: group.leader.ledger.head.version == 1)
        assert signer(WORKER).peer in {share.peer for share in group.leader.ledger.head.shares}
        assert not crowd.is_anybody_out
