"""A leader alone, with keys that it has just made as auditors, against volunteers whose works were never made."""

from __future__ import annotations

from pathlib import Path

from audit_scene import OFF, SAME, AuditScene, audited_world
from judging_scene import GOOD, MODULE
from tiny_run import appraisal_of, signer

from dipaco_p2p.canonical import digest
from dipaco_p2p.node.run import Run
from dipaco_p2p.protocol.documents import Sealed, seal
from dipaco_p2p.protocol.gate import Appraisal, Repetition
from dipaco_p2p.protocol.signing import VALUES_MAX, PeerId, Signer

SHAMS = [signer(number) for number in (201, 202)]
"""Nobody has ever heard of these: no claim, no heartbeat, no work."""


def sham(run: Run, friend: Signer, of: PeerId, found: Repetition) -> Sealed[Appraisal]:
    work = digest(f"never made by {of}".encode())
    said = appraisal_of(friend, run=run.id, work=work, of=of, tokens=VALUES_MAX, repeated=found)
    return seal(friend, said)


async def test_a_leader_and_keys_of_its_own_make_nobody_a_forger_and_earn_nothing(tmp_path: Path) -> None:
    """Attack: mirrors and the coordinator signed it, leaders of other modules refused the victims as well, and the keys
    had the credit of a billion rounds. More keys, whose "works" came out the same, kept it from looking as if machines
    differed."""
    async with audited_world(tmp_path) as (world, auditors):
        auditors.may_end.set()
        others, leader = [world.leader(number) for number in (51, 52)], world.leader(50)
        for each in (*others, leader):
            await each.node.watch.refresh()
        on = AuditScene(world, leader, await leader.lead(MODULE))
        on.auditors = auditors
        victim = await on.author(60)
        await on.push(victim, GOOD)
        await on.version(1)
        lies = [sham(world.run, friend, victim.swarm.peer, OFF) for friend in SHAMS]
        lies += [sham(world.run, SHAMS[0], signer(number).peer, SAME) for number in range(210, 216)]
        on.owner.trials._evidence += lies  # its own memory
        await on.push(victim, 1.1 * GOOD)
        await on.version(2)
        await on.verified()
        for ledger in (world.seed.archive.ledgers[MODULE], *(each.chains[MODULE].ledger for each in others)):
            assert not ledger.standings.waiting and not ledger.standings.of(victim.swarm.peer).is_out
            earned = {audit.by for _, audit in ledger.standings.earned(world.run.config.audited)}
            assert not earned & {one.peer for one in SHAMS}
        assert on.authors_of(2) == {victim.swarm.peer}
