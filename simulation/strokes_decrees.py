"""What a coordinator decrees, as faults: they strike others, too. Each is undone after a while, a rollback never."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from .strokes import away_s, fault, some

if TYPE_CHECKING:
    from .world import World

RETRY_S = 0.5


@fault("ban")
async def ban(world: World, chance: random.Random) -> None:
    """A volunteer is banned, and admitted again later; two at least stay that have not come to the end."""
    if sum(not (volunteer.is_gone or volunteer.is_done) for volunteer in world.volunteers) > 2:
        victim = some(world, chance)
        if world.seed.decree("ban", peer=victim.peer):
            await asyncio.sleep(3 * away_s(world, chance))
            await _insist(world, "admit", peer=victim.peer)
            victim.start()


@fault("halt")
async def halt(world: World, chance: random.Random) -> None:
    """The run is frozen for a while."""
    if world.seed.decree("freeze"):
        await asyncio.sleep(2 * away_s(world, chance))
        await _insist(world, "unfreeze")


@fault("rollback")
async def rollback(world: World, chance: random.Random) -> None:
    """A module goes back to any version before its newest."""
    heads = {
        module: head for module, head in world.seed.archived().items() if 0 < head < world.run.config.rounds.rounds
    }
    if heads:
        module = chance.choice(sorted(heads))
        to, after = chance.randrange(heads[module]), heads[module]
        world.seed.decree("rollback", stage=world.run.id, module=module, to=to, after=after)


async def pardon(world: World) -> None:
    """When the faults are over nobody is banned any more, and nothing is frozen."""
    while (stage := world.seed.stage) is None:
        await asyncio.sleep(RETRY_S)
    state = stage.seen().decrees.state
    for peer in sorted(state.banned):
        await _insist(world, "admit", peer=peer)
    if state.frozen is not None:
        await _insist(world, "unfreeze")


async def _insist(world: World, act: str, **values: str) -> None:
    """As soon as there is a coordinator to ask."""
    while not world.seed.decree(act, **values):
        await asyncio.sleep(RETRY_S)
