"""Owners keep what the coordinator has not signed, and take nothing more before their disks are full of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from group_harness import MODULE, document, make_versions, of_group
from runtime_harness import offer
from tiny_run import gradient_bytes
from virtual_time import eventually

from dipaco_p2p.errors import Refused
from dipaco_p2p.owner import room
from dipaco_p2p.owner.room import RESERVE_PATHS, path_bytes_max
from dipaco_p2p.program import files
from dipaco_p2p.protocol.documents import seal
from dipaco_p2p.protocol.reasons import Reason


async def test_owners_take_no_further_work_before_their_disks_are_full_of_what_is_not_signed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with of_group(tmp_path) as (world, group, author):
        reserve = RESERVE_PATHS * path_bytes_max(world.run)
        await make_versions(world, group.leader, author)  # its author has worked
        monkeypatch.setattr(files.disk, "free_bytes", lambda folder, *, wanted: wanted - 1)
        await make_versions(world, group.leader, author, 4, seed=1)  # the coordinator signs each
        await eventually(lambda: group.leader.ledger.final == group.leader.ledger.head.version)
        await group.seed_away()
        monkeypatch.setattr(files.disk, "free_bytes", lambda folder, *, wanted: reserve)
        await make_versions(world, group.leader, author, world.run.config.rounds.staleness + 2, seed=2)
        payload = gradient_bytes(world.run, MODULE, seed=3)
        sealed = seal(author.swarm.signer, document(world, group.leader.ledger, author, payload))

        monkeypatch.setattr(files.disk, "free_bytes", lambda folder, *, wanted: wanted - 1)
        with pytest.raises(Refused, match="wait for the coordinator, and this owner has no room for more") as refused:
            await offer(author, group.leader.peer, sealed, payload)
        assert refused.value.reason == Reason.BUSY and sealed.id not in group.leader.ledger.kept
        leaders = {group.leader.node.store.folder}
        monkeypatch.setattr(
            files.disk, "free_bytes", lambda folder, *, wanted: wanted if folder in leaders else wanted - 1
        )
        with pytest.raises(Refused) as refused:  # the disks of its mirrors are as full
            await offer(author, group.leader.peer, sealed, payload)
        assert refused.value.reason == Reason.NO_MIRROR
        assert not any(sealed.id in member.ledger.kept for member in group.members)

        monkeypatch.setattr(files.disk, "free_bytes", lambda folder, *, wanted: wanted)
        with monkeypatch.context() as few, pytest.raises(Refused, match="no room"):
            few.setattr(room, "UNSIGNED_MAX", len(group.leader.ledger.spent))  # who takes over could not list more
            await offer(author, group.leader.peer, sealed, payload)
        assert (await offer(author, group.leader.peer, sealed, payload)).document.contribution == sealed.id
