"""Faults of those that lie from some moment on for good, each drawn by a lot of its own (plan.py)."""

from __future__ import annotations

import asyncio
import random

from dipaco_p2p.protocol.liveness import Claim
from dipaco_p2p.protocol.owners import rank
from dipaco_p2p.protocol.records import claims_key
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.topology import PathId
from peers.stages import StageRunner

from .actors import Environment, VolunteerMachine, some
from .hostile import Stranger

RETRY_S = 0.1
AWAY_TTLS = 0.7, 1.5
"""Lives of a heartbeat until nobody waits for its state any more."""


async def spoiling_volunteer(world: Environment, chance: random.Random) -> None:
    """The only volunteer that worked in a stage before makes its paths worse, also when the other faults are over."""
    world.volunteers[0].is_spoiling = True
    world.note(world.volunteers[0].name, "spoils")


async def idle_worker(world: Environment, chance: random.Random) -> None:
    """A volunteer that has worked works no more, and claims a path for ever, also when the other faults are over: its
    claim weighs, so rounds wait for it until their deadline."""
    worked = {one.who for one in world.events if one.ev == "round"}
    able = [one for one in world.volunteers if one.name in worked and not (one.is_gone or one.is_done)]
    if sum(not (one.is_gone or one.is_done) for one in world.volunteers) <= 2 or not able:
        return
    idler = chance.choice(able)
    never_comes_back(world, idler)
    await asyncio.sleep(world.plan.ttl_s)
    claimant, path = Stranger(world, chance, signer=idler.signer), chance.choice(list(world.run.topology.paths()))
    world.stayers.append(asyncio.create_task(claim_for_ever(world, claimant, path)))


def never_comes_back(world: Environment, volunteer: VolunteerMachine) -> None:
    """It dies, and its disk with it."""
    volunteer.crash()
    volunteer.is_gone = True
    world.note(volunteer.name, "disk lost", peer=volunteer.peer)


async def claim_for_ever(
    world: Environment, claimant: Stranger, path: PathId, *, renewed: random.Random | None = None
) -> None:
    """Say that this path is being trained, until cancelled; with the chance `renewed` by a new key each time."""
    while True:
        await claimant.put(claims_key(world.run.id, path), Claim(path=path, since_s=0.0))
        await asyncio.sleep(world.plan.ttl_s / 3)
        if renewed is not None:
            claimant.leave()
            claimant = Stranger(world, renewed)


async def leaving_forger(world: Environment, chance: random.Random) -> None:
    """A volunteer's outer gradients are not what its steps come to, and it leaves with its receipts each time, before
    auditors ask it for a state; then it is back. When the other faults are over it is honest."""
    forger = some(world, chance)
    forger.is_forging = True
    world.note(forger.name, "forges")
    world.note(forger.name, "leaves audits", peer=forger.peer)
    try:
        while not forger.is_done:
            known = len(world.events)
            while not any(one.who == forger.name and one.ev == "round" for one in world.events[known:]):
                await asyncio.sleep(RETRY_S)
            forger.tell(StageRunner.finish)
            while forger.is_running:
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(chance.uniform(*AWAY_TTLS) * world.plan.ttl_s)
            forger.start()
    finally:
        forger.is_forging = False


async def usurper(world: Environment, chance: random.Random) -> None:
    """Somebody that never works becomes a member of groups, and grants itself their modules, also when the other faults
    are over. Its key comes first in rank for one of them."""
    world.note("stranger", "usurper stays")
    module = chance.choice(list(world.run.topology.modules()))
    volunteers = [volunteer.peer for volunteer in world.volunteers]
    signers = iter(lambda: Signer(chance.randbytes(32)), None)
    signer = next(each for each in signers if rank(module, [each.peer, *volunteers])[0] == each.peer)
    world.stayers.append(asyncio.create_task(Stranger(world, chance, signer=signer).usurp()))
