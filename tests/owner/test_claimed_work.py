"""A contribution needs a claim: a leader takes work of those who train the path, as far as it has seen."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from led_module import MODULE, PATH, TTL_S, on_stage
from runtime_harness import claim, offer
from tiny_run import gradient_bytes, signer
from virtual_time import eventually

from dipaco_p2p.canonical import digest
from dipaco_p2p.errors import Refused
from dipaco_p2p.node.node import Member, send
from dipaco_p2p.owner.chain import Chains
from dipaco_p2p.protocol.documents import seal
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.rounds import Entry
from dipaco_p2p.protocol.standing import FORGERS_WAIT, Findings
from dipaco_p2p.topology import ModuleId, PathId


async def test_work_of_a_peer_that_claims_nothing_is_refused_until_it_does(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        payload = gradient_bytes(stage.world.run, MODULE)
        await send(stage.node, stage.leader.peer, payload)
        header = {"contribution": seal(stage.node.swarm.signer, stage.document(payload)).to_dict()}
        for method in ("module.contribute", "module.forward"):
            with pytest.raises(Refused) as caught:
                extra = {"module": str(MODULE)} if method == "module.forward" else {}
                await stage.node.swarm.call(stage.leader.peer, method, header | extra, timeout_s=5.0)
            assert caught.value.reason == Reason.UNCLAIMED
        await offer(stage.node, stage.leader.peer, stage.document(payload), payload)


async def test_whoever_asks_for_a_claim_while_it_is_looked_for_gets_what_the_look_finds(tmp_path: Path) -> None:
    """Eight copies of a push that came with its claim: seven of them were refused, for they came too soon to look."""
    async with on_stage(tmp_path, delay_s=(0.01, 0.1)) as stage:
        await claim(stage.node, PATH)
        found = await asyncio.gather(*(stage.leader.node.watch.claimed_s(stage.node.peer, PATH) for _ in range(8)))
        assert None not in found


async def test_one_identity_cannot_train_every_path_of_others(tmp_path: Path) -> None:
    """It moves its claim to each path and pushes at once. Those who train the paths are there before it."""
    async with on_stage(tmp_path) as stage:
        run, paths = stage.world.run, stage.world.run.topology.paths_through(MODULE)
        honest = [stage.world.peer(70 + number) for number, _ in enumerate(paths)]

        async def push(node: Member, path: PathId) -> str:
            payload = gradient_bytes(run, MODULE, seed=hash((node.peer, path, stage.owner.head.version)) % 2**32)
            document = replace(stage.document(payload, path=path), author=node.peer)
            try:
                await offer(node, stage.leader.peer, document, payload)
            except Refused as refused:
                return refused.reason
            return "taken"

        for number in range(3):
            assert {await push(node, path) for node, path in zip(honest, paths, strict=True)} == {"taken"}
            await eventually(lambda number=number: stage.owner.head.version == number + 1)  # type: ignore[misc]
        await stage.world.clock.sleep(TTL_S)
        for node in honest:
            await node.presence.beat()
        said = [await push(stage.node, path) for path in paths]
        assert said == [Reason.COVERED] * len(paths)
        for node in honest[1:]:  # the last path is free now
            await node.presence.release()
        await stage.leader.node.watch.refresh()
        assert await push(stage.node, paths[-1]) == "taken"


async def test_a_path_that_is_in_is_free_for_nobody_though_its_claimant_has_moved_on(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        stranger, free = stage.world.peer(61), PathId((0, 0, 1))
        await stage.honest_round(1)
        await claim(stage.leader.node, free)  # the round waits for it
        payload = gradient_bytes(stage.world.run, MODULE, seed=2)
        await stage.world.clock.sleep(TTL_S)
        await offer(stage.node, stage.leader.peer, stage.document(payload), payload)
        await stage.node.presence.release()
        await stage.leader.node.watch.refresh()
        document = replace(stage.document(gradient_bytes(stage.world.run, MODULE, seed=3)), author=stranger.peer)
        with pytest.raises(Refused) as caught:
            await offer(stranger, stage.leader.peer, document, gradient_bytes(stage.world.run, MODULE, seed=3))
        assert caught.value.reason == Reason.COVERED


async def test_in_the_first_round_a_claim_covers_no_second_path(tmp_path: Path) -> None:
    """Attack, seed 2 of 50 keys that claim all paths: the second path of three honest volunteers was refused three
    times in favour of idle claims, and its modules had no version for 50 s. Who claims it and works still counts."""
    async with on_stage(tmp_path) as stage:
        first, second = stage.world.run.topology.paths_through(MODULE)
        slow = stage.world.peer(61)
        await claim(slow, second)
        await stage.leader.node.watch.refresh()
        assert slow.peer in stage.leader.node.watch.claims[second]
        payload = gradient_bytes(stage.world.run, MODULE)
        await offer(stage.node, stage.leader.peer, stage.document(payload, path=first), payload)
        await stage.hold_round_open()
        more = gradient_bytes(stage.world.run, MODULE, seed=2)
        await offer(stage.node, stage.leader.peer, stage.document(more, path=second), more)
        late = gradient_bytes(stage.world.run, MODULE, seed=3)
        await offer(slow, stage.leader.peer, replace(stage.document(late, path=second), author=slow.peer), late)
        assert {Entry(path=second, peer=peer) for peer in (stage.node.peer, slow.peer)} <= stage.owner._round.entries


async def test_claims_of_strangers_cover_no_path_while_others_worked_in_the_stage_before(tmp_path: Path) -> None:
    """Attack, seed 0 of `benchmarks.attack random --warmup 3`: idle claims kept volunteers from the second path that
    each of them had to train in the grid's first round."""
    async with on_stage(tmp_path, workers=[signer(60).peer, signer(62).peer]) as stage:
        first, second = stage.world.run.topology.paths_through(MODULE)
        assert set(stage.leader.chain.ledger.workers) == {signer(60).peer, signer(62).peer}
        await claim(stage.world.peer(61), second)
        await stage.leader.node.watch.refresh()
        payload = gradient_bytes(stage.world.run, MODULE)
        await offer(stage.node, stage.leader.peer, stage.document(payload, path=first), payload)
        payload = gradient_bytes(stage.world.run, MODULE, seed=2)
        await offer(stage.node, stage.leader.peer, stage.document(payload, path=second), payload)


async def test_whoever_has_not_read_a_chain_does_not_take_the_stage_before_for_its_end(tmp_path: Path) -> None:
    """A volunteer follows the modules of its path alone: of the others the workers of the stage before led for ever."""
    async with on_stage(tmp_path, workers=[signer(62).peer]) as stage:
        chains = Chains(stage.node)
        chains[MODULE]
        assert chains.workers == {signer(62).peer}
        stage.node.watch.seen[MODULE] = 3
        stage.node.watch.heads[MODULE].clear()
        assert not chains.workers and chains.is_proven(signer(62).peer)


async def test_a_claim_of_who_worked_in_the_stage_before_covers_a_path(tmp_path: Path) -> None:
    async with on_stage(tmp_path, workers=[signer(60).peer, signer(61).peer]) as stage:
        first, second = stage.world.run.topology.paths_through(MODULE)
        await claim(stage.world.peer(61), second)
        await stage.leader.node.watch.refresh()
        payload = gradient_bytes(stage.world.run, MODULE)
        await offer(stage.node, stage.leader.peer, stage.document(payload, path=first), payload)
        assert await stage.refusal(payload, path=second) == Reason.COVERED


async def test_whom_another_modules_chain_found_to_forge_is_refused_here_too(tmp_path: Path) -> None:
    """Attack, seed 0 of `benchmarks.attack flip-3`: a module made its version before the audits of a forgery ended, and
    took the forger's next work for 4 s, while whoever trained that path in its place left the module out."""
    async with on_stage(tmp_path) as stage:
        other, payload = ModuleId(2, 0), gradient_bytes(stage.world.run, MODULE)
        standings = stage.leader.chain.chains[other].ledger.standings
        standings.add(1, authors=[], findings=Findings.of(forged=[(stage.node.peer, digest(b"a work"))]))
        assert await stage.refusal(payload) == Reason.NOT_REPEATED
        assert Entry(path=PATH, peer=stage.node.peer) in stage.owner.open_round().refused
        for version in range(2, 2 + FORGERS_WAIT):
            standings.add(version, authors=[], findings=None)
        await offer(stage.node, stage.leader.peer, stage.document(payload), payload)


async def test_nobody_is_through_with_all_paths_at_once(tmp_path: Path) -> None:
    """Both paths take their volunteer four seconds; then it says that it has trained both in the same moment."""
    async with on_stage(tmp_path) as stage:
        first, second = stage.world.run.topology.paths_through(MODULE)

        async def train(path: PathId, *, seed: int, after_s: float) -> None:
            await stage.world.clock.sleep(after_s)
            payload = gradient_bytes(stage.world.run, MODULE, seed=seed)
            await offer(stage.node, stage.leader.peer, stage.document(payload, path=path), payload)

        for number in range(2):
            await train(first, seed=10 * number, after_s=4.0)
            await train(second, seed=10 * number + 1, after_s=4.0)
            await eventually(lambda number=number: stage.owner.head.version == number + 1)  # type: ignore[misc]
        await train(first, seed=20, after_s=4.0)
        pushed_s = stage.world.clock.now_s()
        await train(second, seed=21, after_s=0.0)
        assert stage.world.clock.now_s() - pushed_s >= 1.0, "a quarter of what a path takes"
