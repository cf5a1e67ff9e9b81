"""How a leader brings an archive that was away what it has missed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from group_harness import MODULE, Group, make_versions, of_group
from virtual_time import eventually

from dipaco_p2p.errors import Refused
from dipaco_p2p.node.calls import KeepContribution, KeepVersion
from dipaco_p2p.owner import replica
from dipaco_p2p.protocol.documents import Contribution, unseal
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.api import Reply


def lose(group: Group, contribution: str) -> None:
    """No owner has its payload any more."""
    for member in group.members:
        if (sealed := member.ledger.kept.get(contribution)) is not None:
            member.node.store.drop(sealed.document.payload.digest)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_an_archive_that_was_away_gets_the_work_of_the_next_versions_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """While it makes one again. What nobody has of a later version keeps no earlier one from being signed."""
    monkeypatch.setattr(replica, "AHEAD", 2)
    async with of_group(tmp_path) as (world, group, author):
        await group.seed_away()
        ids = await make_versions(world, group.leader, author, 7, seed=1)
        if is_lost:
            lose(group, ids[4])  # of the third
        seed, may_answer, begun = world.start_seed(), asyncio.Event(), list[str]()
        answer = seed.swarm._dispatcher._handlers[KeepVersion.METHOD]
        archived = seed.archive.ledgers[MODULE]

        async def wait(*request: Any) -> Reply:
            if archived.kept:  # of the first version
                begun.append(KeepVersion.METHOD)
                await may_answer.wait()
            return await answer(*request)

        seed.swarm._dispatcher._handlers[KeepVersion.METHOD] = wait
        await seed.node.presence.beat()
        known = set(ids[:4] if is_lost else ids[:6])
        await eventually(lambda: bool(begun) and set(archived.kept) >= known)
        assert not set(archived.kept) & set(ids[6:])
        may_answer.set()
        await eventually(lambda: archived.final == (2 if is_lost else 7))


async def test_an_archive_that_has_room_for_no_more_than_the_next_version_gets_all_of_them(tmp_path: Path) -> None:
    """It may refuse what comes ahead of its turn."""
    async with of_group(tmp_path) as (world, group, author):
        await group.seed_away()
        await make_versions(world, group.leader, author, 7, seed=1)
        seed, counted = world.start_seed(), set[str]()
        handlers = seed.swarm._dispatcher._handlers
        cosign, keep = handlers[KeepVersion.METHOD], handlers[KeepContribution.METHOD]

        async def note(sender: PeerId, values: Any, *rest: Any) -> Reply:
            counted.clear()
            counted.update(share["contribution"] for share in values["version"]["document"]["shares"])
            return await cosign(sender, values, *rest)

        async def refuse(sender: PeerId, values: Any, *rest: Any) -> Reply:
            if unseal(Contribution, values["contribution"]).id not in counted:
                raise Refused("no room", reason=Reason.FULL)
            return await keep(sender, values, *rest)

        handlers.update({KeepVersion.METHOD: note, KeepContribution.METHOD: refuse})
        await seed.node.presence.beat()
        await eventually(lambda: seed.archive.ledgers[MODULE].final == 7)
