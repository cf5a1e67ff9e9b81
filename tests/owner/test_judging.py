"""Work is measured before it counts: who is asked, what is refused, and what goes on all the same."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from judging_scene import BAD, GOOD, MODULE, OTHER_PATH, PATH, Scene, gradient, judged_config, scene
from runtime_harness import World, offer
from tiny_run import MODEL, appraisal_of, contribution_of, initial, signer, tiny_config, version_of
from trickling import trickle
from virtual_time import end, eventually

from bootstrap.archives.verify import verify_run
from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.core.outer.compress import compress, encode_compressed
from dipaco_p2p.core.outer.outer_step import OuterState
from dipaco_p2p.errors import IntegrityError, Refused
from dipaco_p2p.node.calls import Appraise
from dipaco_p2p.node.node import Member, ask, send
from dipaco_p2p.node.run import Run
from dipaco_p2p.owner.judge import FETCHED_AT_ONCE, Judge, drawn, mean_and_error, measured_gains
from dipaco_p2p.owner.version import Admitted, make_again
from dipaco_p2p.protocol.audits import Audit
from dipaco_p2p.protocol.decrees import ADMIT, Decree, ShownDecree
from dipaco_p2p.protocol.documents import BlobRef, Contribution, seal
from dipaco_p2p.protocol.expulsion import Expulsion, Vote
from dipaco_p2p.protocol.gate import GAIN_MAX, Appraisal
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.protocol.standing import Findings, Standings
from dipaco_p2p.protocol.verdicts import encode_appraisals, read_appraisals
from dipaco_p2p.protocol.versions import genesis_version
from simulation.training import toy_gains


async def test_harmful_work_does_not_count_and_its_author_hears_why(tmp_path: Path) -> None:
    async with scene(tmp_path) as on:
        honest, hostile = await on.author(60), await on.author(61)
        good = await on.push(honest, GOOD)
        bad = await on.push(hostile, BAD, path=OTHER_PATH)
        await on.version(1)
        assert on.counted() == {good}
        assert on.expired() == {bad: Reason.HARMFUL}


async def test_what_judges_said_is_in_the_lineage_and_can_be_judged_again(tmp_path: Path) -> None:
    async with scene(tmp_path) as on:
        await on.push(await on.author(60), GOOD)
        await on.push(await on.author(61), BAD, path=OTHER_PATH)
        await on.version(1)
        ref = on.owner.head.appraisals
        assert ref is not None
        said = [one.document for one in read_appraisals(on.leader.node.store.get(ref.digest) or b"")]
        assert sorted(one.gain > 0 for one in said) == [False, True]
        assert {one.author for one in said} == {on.run.manifest.author}  # nobody else has worked
        world = on.world
        await eventually(lambda: world.seed.archive.ledgers[MODULE].head.version == 1)
        assert not [one.problem for one in verify_run(on.run, world.seed.node.store, world.seed.archive) if one.problem]


async def test_who_was_refused_may_try_again_after_a_deadline_and_not_before(tmp_path: Path) -> None:
    async with scene(tmp_path) as on:
        hostile = await on.author(61)
        await on.push(hostile, BAD)
        await eventually(lambda: bool(on.expired()))
        with pytest.raises(Refused) as caught:
            await on.push(hostile, BAD)
        assert caught.value.reason == Reason.HARMFUL
        await asyncio.sleep(2 * on.run.config.rounds.deadline_s)
        good = await on.push(hostile, GOOD)  # a module that one peer trains must not stand still for good
        await on.version(1)
        assert on.counted() == {good}


async def test_those_who_have_worked_judge_and_the_coordinator_only_where_they_differ(tmp_path: Path) -> None:
    async def judges_of(on: Scene, author: Member, size: float) -> set[str]:
        await on.push(await on.author(61), size, path=OTHER_PATH)
        await eventually(lambda: bool(on.expired()))
        return set(on.expired().values())

    async def said(on: Scene, version: int) -> list[Appraisal]:
        ref = on.leader.chain.ledger.versions[version - 1].document.appraisals
        assert ref is not None
        return [one.document for one in read_appraisals(on.leader.node.store.get(ref.digest) or b"")]

    async with scene(tmp_path, others=(51, 52)) as on:
        workers = [leader.peer for leader in on.world.leaders if leader is not on.leader]
        on.leader.chain.chains.is_proven = lambda peer: peer in workers  # type: ignore[method-assign]
        author = await on.author(60)
        await on.push(author, GOOD)
        await on.version(1)
        assert {one.author for one in await said(on, 1)} == set(workers)
        assert await judges_of(on, author, BAD) == {Reason.HARMFUL}


async def test_work_that_judges_are_silent_about_counts_only_of_those_whom_the_chain_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their lines may be cut, which is not its author's doing."""

    async def silent(self: Judge, contribution: Contribution, *, is_audit: bool = False) -> None:
        await asyncio.Event().wait()

    async with scene(tmp_path) as on:
        author = await on.author(60)
        await on.push(author, GOOD)
        await on.version(1)
        monkeypatch.setattr(Judge, "appraise", silent)
        later = await on.push(author, 2 * GOOD, gives=False)
        stranger = await on.push(await on.author(61), 2 * GOOD, path=OTHER_PATH, gives=False)
        await on.version(2)
        assert later in on.counted() and on.expired() == {stranger: Reason.UNJUDGED}


async def test_one_work_is_taken_once_where_two_versions_have_the_same_parameters(tmp_path: Path) -> None:
    """Attack: a step that moves no parameter, and then harmful work from both versions. When it was refused, the second
    one ended the task of its leader."""
    async with scene(tmp_path) as on:
        author, hostile = await on.author(60), await on.author(61)
        nothing = np.full(on.run.layout(MODULE).size, 1e-20, np.float32)
        payload = encode_compressed(compress(nothing, codec=on.run.config.compression.uplink)[0])
        idle = replace((await on.work(author, GOOD)).document, payload=BlobRef.of(payload))
        await offer(author, on.leader.peer, seal(author.swarm.signer, idle), payload)
        genesis = on.owner.head.digest
        await on.version(1)
        assert on.owner.head.digest == genesis
        document = (await on.work(hostile, BAD, path=OTHER_PATH)).document
        fresh, late = [seal(hostile.swarm.signer, replace(document, base_version=base)) for base in (1, 0)]
        await offer(hostile, on.leader.peer, fresh, gradient(on.run, MODULE, BAD))
        with pytest.raises(Refused) as caught:
            await offer(hostile, on.leader.peer, late, gradient(on.run, MODULE, BAD))
        assert caught.value.reason == Reason.ALREADY_CONTRIBUTED
        await eventually(lambda: on.expired() == {fresh.id: Reason.HARMFUL})
        await on.push(author, GOOD)
        await on.version(2)


UNREADABLE = {"a": {"dtype": "F32", "shape": [0, 2**47, 2**47], "data_offsets": [0, 0]}}
"""The header of a tensor whose shape no array has."""


@pytest.mark.parametrize("is_readable", [False, True])
async def test_a_newcomers_work_does_not_count_where_its_leaders_own_judge_fails(
    tmp_path: Path, is_readable: bool
) -> None:
    """Attack: harmful work named a part that numpy refuses with an error of its own. That ended the task which asks
    judges, before anybody had noted that the work was unheard, and the work counted."""

    def fails(*parts: Any) -> Any:
        raise ValueError("a fault of ours")

    async with World(tmp_path, config=judged_config(), measure=fails if is_readable else toy_gains) as world:
        seed, expired = world.seed, list[str]()
        seed.node.history.listen(lambda event: expired.append(event.get("reason", event["ev"])))
        await seed.node.watch.refresh()
        await seed.ownership.take(MODULE)
        on = Scene(world, cast(Any, seed), seed.ownership._leaders[MODULE])
        author = await on.author(61)
        sealed = await on.work(author, BAD)
        if not is_readable:
            header = canonical_bytes(UNREADABLE)
            blob = len(header).to_bytes(8, "little") + header
            await send(author, seed.node.peer, blob)
            other, *rest = sealed.document.others
            named = replace(sealed.document, others=(replace(other, payload=BlobRef.of(blob)), *rest))
            sealed = seal(author.swarm.signer, named)
        await offer(author, seed.node.peer, sealed, gradient(on.run, MODULE, BAD))
        await eventually(lambda: Reason.UNJUDGED in expired)
        assert on.owner.head.version == 0


async def test_an_author_that_trickles_its_work_holds_up_no_judge(tmp_path: Path) -> None:
    """Attack: it named another module's part that nobody else has. The judge was at it for as long as the author liked,
    measured nothing meanwhile, and honest work expired."""
    async with scene(tmp_path) as on:
        hostile, judge = await on.author(61), on.world.seed.node
        measured = list[str]()
        judge.history.listen(lambda event: measured.append(event["work"]) if event["ev"] == "appraised" else None)
        part = trickle(hostile.swarm, bytes(on.run.payload_bytes_max(OTHER_PATH.modules()[0])))
        sealed = await on.work(hostile, GOOD, path=OTHER_PATH)
        other, *rest = sealed.document.others
        lie = replace(sealed.document, others=(replace(other, payload=part), *rest))
        works = [replace(lie, tokens=lie.tokens - one) for one in range(FETCHED_AT_ONCE + 1)]
        beating = asyncio.create_task(hostile.presence.run())
        await eventually(lambda: hostile.peer in judge.watch.heartbeats)
        requests = [Appraise(contribution=seal(hostile.swarm.signer, work)) for work in works]
        asking = [asyncio.ensure_future(ask(on.leader.node, judge.peer, request)) for request in requests]
        await asyncio.sleep(1.0)
        honest = await on.work(await on.author(60), GOOD)
        await ask(on.leader.node, judge.peer, Appraise(contribution=honest), timeout_s=1.0)
        assert measured == [honest.document.work]
        with pytest.raises(Refused) as caught:
            await asking[0]
        assert caught.value.reason == Reason.PAYLOAD_MISSING
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await end(beating)


async def test_a_known_author_that_trickles_a_part_of_its_work_is_not_taken_unseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attack: it named a part that nobody else has, and gave that a few bytes at a time. A large one could have come
    on a thin line after the round was over: judges were silent about it, and its harmful work counted, since silence
    is nobody's fault whom the chain knows."""
    monkeypatch.setattr("dipaco_p2p.node.node.LEAST_BYTES_S", 1.0)
    async with scene(tmp_path) as on:
        hostile = await on.author(60)
        await on.push(hostile, GOOD)
        await on.version(1)
        beating = asyncio.create_task(hostile.presence.run())
        await eventually(lambda: hostile.peer in on.world.seed.node.watch.heartbeats)
        sealed = await on.work(hostile, BAD)
        part = trickle(hostile.swarm, bytes(on.run.payload_bytes_max(PATH.modules()[0])))
        other, *rest = sealed.document.others
        lie = replace(sealed.document, others=(replace(other, payload=part), *rest))
        await offer(hostile, on.leader.peer, seal(hostile.swarm.signer, lie), gradient(on.run, MODULE, BAD))
        await eventually(lambda: bool(on.expired()) or on.owner.head.version > 1)
        assert set(on.expired().values()) == {Reason.UNJUDGED}
        await end(beating)


async def test_a_run_goes_on_where_nobody_lives_who_could_judge(tmp_path: Path) -> None:
    async with scene(tmp_path) as on:
        await on.world.kill_seed()
        await eventually(lambda: not on.leader.node.watch.seeds())
        good = await on.push(await on.author(60), GOOD, gives=False)
        await on.version(1)
        assert on.counted() == {good}


async def test_what_nobody_was_there_to_measure_is_measured_once_somebody_is(tmp_path: Path) -> None:
    """Attack, seed 1192: harmful work that came while the coordinator was away counted when it was back."""
    async with scene(tmp_path, min_paths=2) as on:
        world, trials = on.world, on.owner.trials
        await world.kill_seed()
        await eventually(lambda: not on.leader.node.watch.seeds())
        hostile = await on.author(61)
        bad = await on.push(hostile, BAD, to=on.leader.peer)
        await eventually(lambda: trials.is_over([bad]))
        world.start_seed()
        await world.seed.node.presence.beat()
        await on.work(hostile, BAD)  # whose other payloads it can be given now
        await eventually(lambda: bool(on.leader.node.watch.seeds()))
        good = await on.push(await on.author(60), GOOD, path=OTHER_PATH)
        await on.version(1)
        assert on.counted() == {good} and on.expired() == {bad: Reason.HARMFUL}


async def test_what_judges_said_is_kept_until_the_coordinator_is_back_to_judge_again(tmp_path: Path) -> None:
    """Other blobs of so old versions are dropped long before: the archive makes them again of contributions."""
    async with scene(tmp_path, others=(51,)) as on:
        world, count = on.world, 8
        author, other = await on.author(60), await on.author(61)
        await on.push(author, GOOD)
        await on.push(other, GOOD, path=OTHER_PATH)
        await on.version(1)
        judge = world.leaders[0]  # an owner that has worked, so that work is judged while the seed is away
        on.leader.chain.chains.is_proven = lambda peer: peer == judge.peer  # type: ignore[method-assign]
        manifest = on.run.manifest
        for ref in [*(one.blob for one in manifest.genesis), *(one.blob for one in manifest.shards)]:
            judge.node.store.put(world.seed.archive.blob(ref.digest))  # as a volunteer of these paths has them
        await world.kill_seed()
        await eventually(lambda: not on.leader.node.watch.seeds())
        for number in range(2, count):
            await on.push(author, GOOD, to=judge.peer)
            await on.push(other, GOOD, path=OTHER_PATH, to=judge.peer)
            await on.version(number)
        assert on.owner.head.appraisals is not None
        world.start_seed()
        await world.seed.node.presence.beat()
        await eventually(lambda: world.seed.archive.ledgers[MODULE].final == count - 1)


async def test_a_contribution_must_name_the_other_parts_of_its_path(tmp_path: Path) -> None:
    async with scene(tmp_path) as on:
        author, payload = await on.author(60), gradient(on.run, MODULE, GOOD)
        bare = contribution_of(on.run, author.swarm.signer, payload, module=MODULE, path=PATH)
        with pytest.raises(Refused) as caught:
            await offer(author, on.leader.peer, bare, payload)
        assert caught.value.reason == Reason.MALFORMED


@pytest.mark.parametrize("number", [60, 50])
async def test_a_judge_measures_for_the_leader_of_the_module_alone_and_not_its_own_work(
    tmp_path: Path, number: int
) -> None:
    async with scene(tmp_path) as on:
        asker = await on.author(60) if number == 60 else on.leader.node
        sealed = await on.work(await on.author(61), GOOD)
        if number == 50:  # it leads, and asks the seed about the seed's own work
            sealed = seal(signer(200), replace(sealed.document, author=on.run.manifest.author))
        with pytest.raises(Refused) as caught:
            await ask(asker, on.run.manifest.author, Appraise(contribution=sealed))
        assert caught.value.reason == (Reason.NOT_LEADER if number == 60 else Reason.OTHER)


async def test_a_version_that_counts_refused_work_is_made_again_by_nobody(tmp_path: Path) -> None:
    async with scene(tmp_path) as on:
        run, author, leader, judge = on.run, signer(60), signer(50), signer(200)
        payload = gradient(run, MODULE, BAD)
        document = contribution_of(run, author, payload, module=MODULE, path=PATH)
        sealed = seal(author, document)
        said = seal(judge, appraisal(run, document, judge, gain=-1.0))
        blob = encode_appraisals([said])
        version, _ = version_of(run, leader, [(sealed, payload)], term=1)
        again = [Admitted(sealed, lambda: run.read_contribution(payload, MODULE))]

        def make(standings: Standings, *, findings: Findings | None, **says: Any) -> object:
            told = replace(version.document, appraisals=BlobRef.of(blob), findings=findings, **says)
            parent, state = genesis_version(run.manifest, MODULE), OuterState.fresh(initial()[0][1].copy())
            norms = run.norms(MODULE, [])
            return make_again(run, parent, state, again, told, norms=norms, standings=standings, appraisals=blob)

        with pytest.raises(IntegrityError, match="harmful"):
            make(Standings(), findings=Findings.of(failed=[(author.peer, document.work)]))
        known = Standings()
        known.add(1, authors=[author.peer], findings=None)
        make(known, findings=None)  # it is all whom the chain knows: then the run has a problem, and not the peer
        with pytest.raises(IntegrityError, match="does not follow"):
            make(known, findings=Findings(forged=(author.peer,)))
        with pytest.raises(IntegrityError, match="does not follow"):  # the judge has repeated nothing
            make(known, findings=None, audits=(Audit(work=document.work, by=judge.peer, tokens=document.tokens),))
        vote = Vote(owner=leader.peer, signature="ab" * 64)
        with pytest.raises(IntegrityError, match="does not wait"):  # whom nobody has found a forger
            make(known, findings=None, expels=Expulsion(peer=author.peer, found=1, votes=(vote,)))
        decree = Decree(
            run=run.origin, number=1, previous="", at_s=0.0, act=ADMIT, reason="", peer=author.peer, author=judge.peer
        )
        with pytest.raises(IntegrityError, match="readmission"):
            make(known, findings=None, readmits=ShownDecree(decree=decree, signature="ab" * 64))


def appraisal(run: Run, document: Contribution, judge: Signer, *, gain: float) -> Appraisal:
    told = {"run": run.id, "work": document.work, "of": document.author, "tokens": document.tokens}
    return appraisal_of(judge, **told, gain=gain, error=0.01)


# -- what is measured


@pytest.mark.slow
async def test_a_run_of_volunteers_is_judged_from_the_first_round_to_the_last(tmp_path: Path) -> None:
    """With the model itself, real training and the payloads as the programs give them."""
    async with World(tmp_path, config=judged_config(rounds=3)) as world:
        world.join_all()
        await world.done()
        chains = [ledger.versions for ledger in world.seed.archive.ledgers.values()]
        assert all(one.document.appraisals is not None for chain in chains for one in chain)
        assert not [event for one in world.volunteers for event in one.said("expired")]
        judges = {
            appraised.document.author
            for chain in chains
            for one in chain
            for appraised in read_appraisals(world.seed.archive.blob(one.document.appraisals.digest))  # type: ignore[union-attr]
        }
        assert {volunteer.peer for volunteer in world.volunteers} & judges


def test_the_loss_of_a_trained_path_falls_and_that_of_the_opposite_rises(tmp_path: Path) -> None:
    import torch

    from dipaco_p2p.core.model.inner import InnerLoop
    from dipaco_p2p.core.model.shards import Shard

    flats = [flat.copy() for flat in initial()[0]]
    tokens = (np.random.default_rng(1).integers(0, 8, (16, MODEL.context))).astype(np.int32)
    config = replace(judged_config(), inner=replace(tiny_config().inner, steps=20, batch=4))
    torch.manual_seed(0)
    loop = InnerLoop(config.inner, 20, MODEL, device="cpu", seed=0)
    trained = loop.run(flats, Shard(tokens=tokens), first_step=0, steps=20, on_step=lambda report: True).flats
    opposite = [2 * old - new for old, new in zip(flats, trained, strict=True)]

    class Meant:
        def __init__(self) -> None:
            self.config = config

    run: Any = Meant()
    gain, error = mean_and_error(measured_gains(run, flats, trained, tokens, device="cpu"))
    assert gain > 3 * error > 0
    gain, error = mean_and_error(measured_gains(run, flats, opposite, tokens, device="cpu"))
    assert gain < -3 * error


def test_the_draw_alone_says_which_sequences_are_read() -> None:
    tokens = np.arange(100, dtype=np.int32)[:, None]
    first = drawn(tokens, "ab", 8)
    assert (drawn(tokens, "ab", 8) == first).all() and len(np.unique(first)) == 8
    assert (drawn(tokens, "cd", 8) != first).any()
    assert len(drawn(tokens[:5], "ab", 8)) == 5


def test_a_loss_beyond_any_number_is_the_worst_there_is() -> None:
    assert mean_and_error(np.array([1.0, np.inf])) == (-GAIN_MAX, 0.0)
    assert mean_and_error(np.array([np.nan, 1.0])) == (-GAIN_MAX, 0.0)
    assert mean_and_error(np.array([1e30, 1e30])) == (GAIN_MAX, 0.0)
    assert mean_and_error(np.array([1.0, 3.0])) == (2.0, 1.0)
