"""A version that its leader hands in with cosignatures of keys that it has just made, as many as a reader allows."""

from __future__ import annotations

from pathlib import Path

import pytest
from group_harness import MODULE, make_versions, of_group
from tiny_run import signer
from virtual_time import eventually

from dipaco_p2p.node.ledger import Ledger, RemoteLedger
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.protocol.documents import COSIGNATURES_MAX, ModuleVersion, Sealed, cosign

SHAMS = [signer(number) for number in range(210, 210 + COSIGNATURES_MAX)]


def crowded(sealed: Sealed[ModuleVersion]) -> Sealed[ModuleVersion]:
    return Sealed(sealed.document, sealed.signature, {each.peer: cosign(each, sealed) for each in SHAMS})


async def test_whoever_adds_its_own_to_a_crowd_of_cosignatures_can_still_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attack: archive and mirrors wrote one more to their disks than anybody reads. Nobody could follow them any more,
    and the coordinator could not start again."""
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, 2, seed=1)
        await eventually(lambda: world.seed.archive.ledgers[MODULE].final == 2)
        for replica in group.leader.ownership._leaders[MODULE]._replication.replicas():

            async def hostile(sealed: Sealed[ModuleVersion], *, send=replica._remote.cosign, **told: object) -> str:  # type: ignore[no-untyped-def]
                return str(await send(crowded(sealed), **told))

            monkeypatch.setattr(replica._remote, "cosign", hostile)
        await make_versions(world, group.leader, author, 1, seed=2)
        mirrors, archive = group.mirrors, world.seed.archive.ledgers[MODULE]
        await eventually(lambda: archive.final == 3 and all(one.ledger.final == 3 for one in mirrors))
        for ledger, owner in [(archive, world.seed.node.peer), *((one.ledger, one.peer) for one in mirrors)]:
            cosignatures = ledger.versions[2].cosignatures
            assert len(cosignatures) == COSIGNATURES_MAX and owner in cosignatures
        newcomer = world.peer(99)
        await newcomer.watch.refresh()
        for peer in (world.seed.node.peer, *(one.peer for one in mirrors)):
            assert len(await RemoteLedger(newcomer, peer, MODULE).chain(after=0)) == 3
        await world.kill_seed()
        assert SeedArchive(world.run, world.seed.node.store).ledgers[MODULE].final == 3, "it starts again"
        await group.kill(mirrors[0])
        assert Ledger(world.run, mirrors[0].node.store, MODULE).final == 3


async def test_no_crowd_of_cosignatures_ousts_the_coordinators(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, 1, seed=1)
        await eventually(lambda: group.leader.ledger.final == 1)
        ledger = group.leader.ledger
        ledger.cosign(1, crowded(ledger.versions[0]).cosignatures)
        assert len(ledger.versions[0].cosignatures) == COSIGNATURES_MAX
        assert world.seed.node.peer in ledger.versions[0].cosignatures
