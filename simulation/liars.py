"""Faults of those that lie from some moment on for good, each drawn by a lot of its own (plan.py)."""

from __future__ import annotations

import asyncio
import random

from dipaco_p2p.protocol.owners import rank
from dipaco_p2p.protocol.signing import Signer

from .actors import Environment
from .hostile import Stranger


async def usurper(world: Environment, chance: random.Random) -> None:
    """Somebody that never works becomes a member of groups, and grants itself their modules, also when the other faults
    are over. Its key comes first in rank for one of them."""
    world.note("stranger", "usurper stays")
    module = chance.choice(list(world.run.topology.modules()))
    volunteers = [volunteer.peer for volunteer in world.volunteers]
    signers = iter(lambda: Signer(chance.randbytes(32)), None)
    signer = next(each for each in signers if rank(module, [each.peer, *volunteers])[0] == each.peer)
    world.stayers.append(asyncio.create_task(Stranger(world, chance, signer=signer).usurp()))
