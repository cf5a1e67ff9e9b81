"""The coordinator is away: its run goes on, and when it is back it has signed everything within a minute.

`DIPACO_HOURS_AWAY=24 python -m pytest tests/owner/test_a_day_away.py` plays a day, which takes minutes; the suite plays
a quarter of an hour.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from group_harness import MODULE, Group, asked, lighten, make_versions, sees
from runtime_harness import World
from tiny_run import tiny_config
from virtual_time import eventually, play

from dipaco_p2p.config import LivenessConfig
from dipaco_p2p.node.calls import KeepVersion
from dipaco_p2p.owner.retention import Retention

HOURS = float(os.environ.get("DIPACO_HOURS_AWAY", "0.25"))
STEPS, STEP_S = 12, HOURS * 3600.0 / 12
ARCHIVES = {
    "full": Retention(),
    "without parameters": Retention(rounds=1, remade=0.0, measured=0.0),
}


@pytest.mark.parametrize("archive", ARCHIVES)
def test_what_was_made_without_the_coordinator_is_signed_within_a_minute(tmp_path: Path, archive: str) -> None:
    play(partial(away, tmp_path, archive), limit_s=HOURS * 3600.0 + 7200.0)


async def away(folder: Path, archive: str) -> None:
    # Rare heartbeats: a day with those of other tests takes an hour to play.
    config = replace(tiny_config(rounds=60), liveness=LivenessConfig(heartbeat_ttl_s=60.0, settle_s=2.0))
    async with World(folder, config=config) as world:
        group = await Group(world, (50, 51, 52, 53)).formed()
        author = world.peer(60)
        await author.watch.refresh()
        await lighten(world, group, ARCHIVES[archive])
        await make_versions(world, group.leader, author, 2, seed=1)
        await eventually(lambda: world.seed.archive.ledgers[MODULE].final == 2)
        await group.seed_away()
        began_s, ids = world.clock.now_s(), list[str]()
        for step in range(STEPS):
            if step == 4:
                await group.kill(group.leader)
                await eventually(lambda: len(group.leading) == 1)
                await sees(author, group.leader)
            if step == 6:
                group.join(54)
            ids += await make_versions(world, group.leader, author, 2, seed=100 + step)
            await asyncio.sleep(max(0.0, began_s + (step + 1) * STEP_S - world.clock.now_s()))
        assert group.leader.ledger.head.version == 2 + 2 * STEPS and group.leader.ledger.final == 2
        world.start_seed().archive.thinning.retention = ARCHIVES[archive]
        world.seed.node.presence.note(light=ARCHIVES[archive].is_light)
        back_s, calls = world.clock.now_s(), asked(world)
        await world.seed.node.presence.beat()
        await eventually(lambda: world.seed.archive.ledgers[MODULE].final == 2 + 2 * STEPS)
        assert world.clock.now_s() - back_s < 60.0
        often = calls.count(KeepVersion.METHOD) - 2 * STEPS
        assert often <= config.rounds.staleness + 2, "only the first and the last are asked for before what they count"
        shares = (share for sealed in world.seed.archive.ledgers[MODULE].versions for share in sealed.document.shares)
        assert {share.contribution for share in shares} >= set(ids), "nothing with a receipt is lost"
