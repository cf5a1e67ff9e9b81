"""Who owns a module no more and keeps what it gave receipts for: not done before the coordinator says what counts."""

from __future__ import annotations

from pathlib import Path

from group_harness import MODULE, OTHER_PATH, contribute, of_group
from virtual_time import eventually


async def test_a_former_mirror_is_not_done_until_what_it_keeps_is_final_though_nobody_leads(tmp_path: Path) -> None:
    async with of_group(tmp_path, rounds=2) as (world, group, author):
        leader, former = group.leader, group.mirrors[0]
        world.seed.ownership._may_take = lambda: False
        world.network.partition([{world.seed.node.peer}])
        await contribute(world, leader, author, seed=1)
        await contribute(world, leader, author, seed=2, path=OTHER_PATH)
        await eventually(lambda: len(former.ledger.spent) == 2)
        former.freeze()
        group.join(53)
        world.network.heal()
        await eventually(lambda: len(group.leading) == 1 and former.peer not in group.leader.owner(MODULE).grant.group)
        await eventually(lambda: world.seed.archive.ledgers[MODULE].head.version == 1)
        for member in [each for each in group.members if each is not former]:
            await group.kill(member)
        former.ownership._may_take = lambda: False
        former.thaw()
        assert len(former.ledger.kept) == 2 and former.ledger.final == 0
        former.node.watch.leader = lambda module: None  # type: ignore[method-assign]
        await eventually(lambda: not former.ledger.kept)
        assert former.ledger.final == 1
        assert former.ownership._is_settled(MODULE) and not former.chain.is_owner
