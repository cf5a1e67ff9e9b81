"""A forger's work is taken out of the versions that count it, and the work of others stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from group_harness import (
    MODULE,
    OTHER_PATH,
    Group,
    contribute,
    document,
    make_versions,
    of_group,
    push,
    require_safe,
    seed_back,
)
from runtime_harness import World
from tiny_run import SEED_NUMBER, gradient_bytes, signer
from virtual_time import eventually

from bootstrap.archives import rebuild
from bootstrap.archives.rebuild import make_rebuilt
from bootstrap.archives.verify import ChainReport, verify_run
from bootstrap.control.decrees import Decreeing, told_all
from bootstrap.control.requests import Request
from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.model.layout import module_parts
from dipaco_p2p.core.outer.outer_step import OuterState, state_parts
from dipaco_p2p.node.node import Member
from dipaco_p2p.protocol.decrees import Rebuilt
from dipaco_p2p.protocol.documents import BlobRef, seal
from dipaco_p2p.protocol.versions import Damage, damage_by

HONEST, FORGED = 2e-4, 1e-3
"""How large the values of a gradient are."""


async def forge(world: World, group: Group, honest: Member, forger: Member, *, rounds: int = 2, seed: int = 7) -> None:
    """So many versions in which the forger has one path, and an honest author the other."""
    ledger = group.leader.ledger
    for number in range(rounds):
        before = ledger.head.version
        await contribute(world, group.leader, honest, seed=100 * seed + number, size=HONEST)
        payload = gradient_bytes(world.run, MODULE, seed=seed, size=FORGED)  # the same each time: nobody looks here
        sealed = seal(forger.swarm.signer, document(world, ledger, forger, payload, path=OTHER_PATH))
        await push(forger, group.leader, sealed, payload)
        await eventually(lambda before=before: ledger.head.version == before + 1)  # type: ignore[misc]
    await eventually(lambda: world.seed.archive.ledgers[MODULE].head.version == ledger.head.version)


def decreeing(world: World, make: Callable[[Damage], Rebuilt | None] | None = None) -> Decreeing:
    archive, store = world.seed.archive, world.seed.node.store
    made = make or (lambda damage: make_rebuilt(world.run, store, archive, damage))
    return Decreeing(world.seed.node.decrees, signer(SEED_NUMBER), world.run, archive.ledgers, rebuild=made)


async def ban(world: World, forger: Member, **more: object) -> str:
    """What a coordinator reads that bans and undoes."""
    order, ordered = Request(ask="ban", peer=forger.peer, reason="forged", undo=True), decreeing(world, **more)  # type: ignore[arg-type]
    row = ordered.issue(order, at_s=0.0)
    return told_all(row | {"undone": await ordered.undo(order, forger.peer, now_s=world.clock.now_s)})


def report(world: World) -> ChainReport:
    [found] = [
        each for each in verify_run(world.run, world.seed.node.store, world.seed.archive) if each.module == MODULE
    ]
    return found


def params(world: World, version: int) -> Floats:
    return world.seed.archive.state(MODULE, version).params


def stepped(world: World, begin: Floats, *seeds: int) -> Floats:
    """By hand: one path's gradients alone, one after the other, from fresh momentum."""
    settings, momentum, at = world.run.config.outer, np.zeros_like(begin), begin.astype(np.float64)
    for seed in seeds:
        payload = gradient_bytes(world.run, MODULE, seed=seed, size=HONEST)
        gradient = world.run.read_contribution(payload, MODULE).expand()
        momentum = settings.momentum * momentum + gradient
        at = at - settings.lr * (settings.momentum * momentum + gradient)
    return at.astype(np.float32)


async def test_the_versions_since_are_rebuilt_from_the_work_of_others(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, honest):
        forger = world.peer(61)
        await forger.watch.refresh()
        await forge(world, group, honest, forger, rounds=3)
        said = await ban(world, forger)
        assert f"rollback {MODULE} from 3 to 0, rebuilt without ...{forger.peer[-6:]} (not carried out yet)" in said
        assert "3 contributions of others stay" in said
        await eventually(lambda: group.leader.ledger.head.version == 4)
        await require_safe(world, group, versions=4)
        assert report(world).words == "to the bit"
        # The honest path's gradients alone: without a forger's beside it a path's step is its whole gradient.
        wanted, damaged = stepped(world, params(world, 0), 700, 701, 702), params(world, 3)
        off = float(np.abs(params(world, 4) - wanted).max())
        assert off < float(np.abs(damaged - wanted).max()) / 50, "but for what the codec of the last update left over"
        momentum = world.seed.archive.state(MODULE, 4).momentum
        assert np.abs(momentum).max() > 0, "it goes on as if it had been so from the start"
        await make_versions(world, group.leader, honest, seed=9)
        await require_safe(world, group, versions=5)


async def test_a_second_forger_is_left_out_besides_the_first_also_before_the_first_decree_is_carried_out(
    tmp_path: Path,
) -> None:
    async with of_group(tmp_path) as (world, group, honest):
        first, second = world.peer(61), world.peer(62)
        for forger in (first, second):
            await forger.watch.refresh()
        await forge(world, group, honest, first)
        await forge(world, group, honest, second, rounds=1, seed=8)
        leader, others = group.leader, group.mirrors
        for member in (leader, *others):
            member.freeze()
        await ban(world, first)
        said = await ban(world, second)
        for member in (leader, *others):
            member.thaw()
        await group.formed()
        assert said.count("rebuilt without") == 1 and "3 contributions of others stay" in said
        assert all(f"...{each.peer[-6:]}" in said.splitlines()[1] for each in (first, second))
        await eventually(lambda: group.leader.ledger.head.version == 4)
        await require_safe(world, group, versions=4)
        [decree] = [one.document.rollback.decree for one in group.leader.ledger.versions if one.document.rollback]
        assert decree.rebuilt is not None and set(decree.rebuilt.without) == {first.peer, second.peer}
        assert report(world).problem == ""


@pytest.mark.parametrize("lacking", ["contributions of others", "few versions", "payloads", "the outer state"])
async def test_where_nothing_can_be_rebuilt_the_module_goes_back(
    tmp_path: Path, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with of_group(tmp_path) as (world, group, honest):
        forger = world.peer(61)
        await forger.watch.refresh()
        await make_versions(world, group.leader, honest)
        if lacking == "contributions of others":
            await make_versions(world, group.leader, forger, seed=3)
        else:
            await forge(world, group, honest, forger)
        await eventually(lambda: world.seed.archive.ledgers[MODULE].head.version == group.leader.ledger.head.version)
        archive, store = world.seed.archive, world.seed.node.store
        if lacking == "few versions":
            monkeypatch.setattr(rebuild, "VERSIONS_MAX", 1)
        elif lacking == "payloads":
            share = next(one for one in archive.ledgers[MODULE].at(2).shares if one.peer == honest.peer)
            store.drop(archive.contribution(share.contribution).document.payload.digest)
        elif lacking == "the outer state":
            state = archive.ledgers[MODULE].at(1).state
            assert state is not None
            store.drop(state.digest)
        said = await ban(world, forger)
        assert "to 1 (not carried out yet)" in said and "rebuilt" not in said and "go with it" in said


async def test_a_decree_that_lies_about_what_was_rebuilt_is_found_out_by_whoever_verifies(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, honest):
        forger, store = world.peer(61), world.seed.node.store
        await forger.watch.refresh()
        await forge(world, group, honest, forger)

        def lie(damage: Damage) -> Rebuilt:
            state = OuterState.fresh(params(world, 0) + np.float32(1.0))
            blobs = module_parts(state.params, world.run.layout(MODULE)), state_parts(state)
            refs = [BlobRef.of(*parts) for parts in blobs]
            for ref, parts in zip(refs, blobs, strict=True):
                store.keep(ref, *parts)
            return Rebuilt(without=(forger.peer,), snapshot=refs[0], state=refs[1])

        await ban(world, forger, make=lie)
        await eventually(lambda: world.seed.archive.ledgers[MODULE].head.version == 3)
        assert report(world).problem == f"version 3 of {MODULE} is not what decree 2 says"


async def test_what_was_dropped_is_told_as_the_coordinators_word(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, honest):
        forger = world.peer(61)
        await forger.watch.refresh()
        await forge(world, group, honest, forger)
        await ban(world, forger)
        await eventually(lambda: group.leader.ledger.head.version == 3)
        await require_safe(world, group, versions=3)
        archive, store = world.seed.archive, world.seed.node.store
        retention = replace(archive.thinning.retention, rounds=1)
        archive.thinning.retention = retention
        for name in archive.thinning.thin(archive.ledgers[MODULE]):
            store.drop(name)
        found = report(world)
        assert (found.problem, found.signed, found.decreed) == ("", 2, 1)
        assert found.words.endswith("1 rebuilt as the coordinator decreed")


async def test_what_was_rebuilt_outlives_the_program_before_any_version_names_it(tmp_path: Path) -> None:
    """A store that opens drops whatever no document names; decrees lie in another one."""
    async with of_group(tmp_path) as (world, group, honest):
        forger, store = world.peer(61), world.seed.node.store
        await forger.watch.refresh()
        await forge(world, group, honest, forger)
        damage = damage_by(forger.peer, [each.document for each in group.leader.ledger.versions])
        assert damage is not None
        found = make_rebuilt(world.run, store, world.seed.archive, damage)
        assert found is not None and store.drop_unnamed() == 0
        assert all(store.size(ref.digest) == ref.size for ref in (found.snapshot, found.state))


async def test_a_coordinator_that_starts_again_has_what_it_decreed(tmp_path: Path) -> None:
    """Its store drops whatever no document names when it opens, and no version does yet."""
    async with of_group(tmp_path) as (world, group, honest):
        forger = world.peer(61)
        await forger.watch.refresh()
        await forge(world, group, honest, forger)
        for member in group.members:
            member.freeze()
        await ban(world, forger)
        await world.kill_seed()
        for member in group.members:
            member.thaw()
        await seed_back(world, group)
        await eventually(lambda: group.leader.ledger.head.version == 3)
        await require_safe(world, group, versions=3)
