"""Verifying a run of which only volunteers are left: what they kept is gathered, checked, and made again."""

from __future__ import annotations

import asyncio
from pathlib import Path

from keepers_harness import Keepers, on_keepers
from mirror_harness import MODULE
from tiny_run import signer

from bootstrap.archives.gathered import NOBODY, Gathered, gather, verify_gathered
from bootstrap.archives.verify import ChainReport
from dipaco_p2p.node.calls import GetChain
from dipaco_p2p.node.items import Page
from dipaco_p2p.node.node import CALL_TIMEOUT_S
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.ranges import refs_of_version
from dipaco_p2p.protocol.documents import ModuleVersion
from dipaco_p2p.protocol.keeping import SHARES
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import ModuleId
from dipaco_p2p.use.folder import RunFolder


async def gathered(found: Keepers, folder: Path, *, number: int = 99) -> dict[ModuleId, ChainReport]:
    files = RunFolder(folder)
    swarm = found.world.network.join(signer(number))
    for one in found.alive:
        await one.offer()
    stage = await gather(found.world.run, swarm, found.world.clock, files.store("grid"))
    return {report.module: report for report in verify_gathered(files, [stage])}


async def without_seed(found: Keepers) -> None:
    """Its folder is gone with it."""
    await found.world.kill_seed()


async def test_with_the_seed_and_two_of_three_keepers_gone_all_is_made_again(tmp_path: Path) -> None:
    async with on_keepers(tmp_path, count=3) as found:
        await found.looks(2)
        await without_seed(found)
        for one in found.each[:2]:
            await one.die(found.world)
        report = (await gathered(found, tmp_path / "to"))[MODULE]
        assert (report.versions, report.words) == (10, "to the bit")
        again = (await gathered(found, tmp_path / "to", number=98))[MODULE]
        assert again.words == "to the bit", "a later call goes on in the same folder"


async def test_the_newest_versions_that_keepers_had_no_time_for_are_left_out_and_told(tmp_path: Path) -> None:
    async with on_keepers(tmp_path, count=3) as found:
        await found.looks(2)
        await found.grow(11, 12)
        for one in found.each:
            await one.keeper._follow()  # the chain alone
        await without_seed(found)
        report = (await gathered(found, tmp_path / "to"))[MODULE]
        assert report.words == "to the bit; 2 newer as the coordinator signed them"
        assert (report.versions, report.unshown) == (10, 2)


async def test_what_is_lost_in_the_middle_is_a_problem(tmp_path: Path) -> None:
    async with on_keepers(tmp_path, count=3) as found:
        await found.looks(2)
        refs = refs_of_version(found.world.seed.archive, MODULE, 4)
        assert refs is not None
        for one in found.each:
            one.keeper.store.drop(refs[-1].digest)
        await without_seed(found)
        report = (await gathered(found, tmp_path / "to"))[MODULE]
        assert "missing" in report.problem and not report.unshown


async def test_a_stage_that_nobody_shows_does_not_verify(tmp_path: Path) -> None:
    async with on_keepers(tmp_path, count=3) as found:
        files = RunFolder(tmp_path / "to")
        reports = verify_gathered(files, [Gathered(run=found.world.run, archive=None)])
        assert {report.problem for report in reports} == {NOBODY} and len(reports) == 5


async def test_a_crowd_that_offers_to_keep_and_is_silent_is_waited_for_once(tmp_path: Path) -> None:
    """Attack: keys that cost nothing, each of which was waited for 20 s for every module, one after the other."""
    async with on_keepers(tmp_path, count=3) as found:
        await found.looks(2)
        await without_seed(found)

        async def silence(sender: PeerId, request: GetChain) -> Page[ModuleVersion]:
            await asyncio.sleep(2 * CALL_TIMEOUT_S)
            raise AssertionError("nobody waits so long")

        for number in range(100, 130):
            node = found.world.peer(number)
            GetChain.serve(node.swarm, silence)
            await node.presence.say(keeps=SHARES)
        async with asyncio.timeout(4 * CALL_TIMEOUT_S):
            report = (await gathered(found, tmp_path / "to"))[MODULE]
        assert (report.versions, report.words) == (10, "to the bit")


async def test_what_a_keeper_gives_is_believed_by_its_digest_alone(tmp_path: Path) -> None:
    async with on_keepers(tmp_path, count=3) as found:
        await found.looks(2)
        await without_seed(found)
        liar = found.each[0].keeper.store
        for path in (liar.folder / "blobs").glob("*/*"):
            path.write_bytes(bytes(path.stat().st_size))
        report = (await gathered(found, tmp_path / "to"))[MODULE]
        assert report.words == "to the bit" and isinstance(liar, Store)
