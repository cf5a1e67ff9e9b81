"""Of the same work by two authors the first one counts, whatever came first over the line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from led_module import MODULE, PATH, Stage, on_stage
from runtime_harness import offer
from tiny_run import contribution_of, gradient_bytes, signer
from virtual_time import eventually

from dipaco_p2p.core.outer.codec import Compressed
from dipaco_p2p.core.outer.compress import compress, encode_compressed
from dipaco_p2p.errors import Refused
from dipaco_p2p.node.calls import Commit
from dipaco_p2p.node.node import Member
from dipaco_p2p.owner import originals
from dipaco_p2p.owner.originals import REMEMBERED, Originals
from dipaco_p2p.protocol.documents import Contribution, Sealed, seal
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.topology import PathId

OTHER_PATH = PathId((0, 0, 1))


async def joined(stage: Stage, number: int) -> Member:
    node = stage.world.peer(number)
    await node.watch.refresh()
    return node


def work_of(stage: Stage, author: Member, payload: bytes, *, path: PathId = PATH) -> Sealed[Contribution]:
    return seal(author.swarm.signer, stage.document(payload, path=path, author=author.swarm.peer))


def same_work(stage: Stage, *numbers: int) -> tuple[list[Sealed[Contribution]], Compressed]:
    """One outer gradient, and the contributions of as many authors that hand it in."""
    run, payload = stage.world.run, gradient_bytes(stage.world.run, MODULE)
    documents = {
        signer(number): contribution_of(run, signer(number), payload, module=MODULE, path=PATH) for number in numbers
    }
    return [seal(*item) for item in documents.items()], run.read_contribution(payload, MODULE)


def longer(stage: Stage, payload: bytes) -> bytes:
    """The same work, and not a byte of it the same."""
    values = stage.world.run.read_contribution(payload, MODULE).expand() * np.float32(1.0001)
    return encode_compressed(compress(values, codec=stage.world.run.config.compression.uplink)[0])


async def commit(stage: Stage, author: Member, sealed: Sealed[Contribution]) -> None:
    await Commit(contribution=sealed).call(author.swarm, stage.leader.peer, timeout_s=5.0)


def authors_of(stage: Stage, version: int) -> list[str]:
    return sorted(share.peer for share in stage.owner.head.shares) if stage.owner.head.version == version else []


async def refusal(stage: Stage, author: Member, sealed: Sealed[Contribution], payload: bytes) -> str:
    with pytest.raises(Refused) as caught:
        await offer(author, stage.leader.peer, sealed, payload)
    return caught.value.reason


def expired(stage: Stage) -> list[str]:
    return [event["reason"] for event in stage.leader.events if event["ev"] == "expired"]


@pytest.mark.parametrize("has_committed", [True, False])
async def test_a_copy_that_arrives_first_counts_only_where_its_original_was_not_committed(
    tmp_path: Path, has_committed: bool
) -> None:
    async with on_stage(tmp_path) as stage:
        await stage.hold_round_open()
        author, copier = stage.node, await joined(stage, 61)
        payload = gradient_bytes(stage.world.run, MODULE, seed=1)
        original, copy = work_of(stage, author, payload), work_of(stage, copier, longer(stage, payload))
        if has_committed:
            await commit(stage, author, original)
        await offer(copier, stage.leader.peer, copy, longer(stage, payload))
        if has_committed:
            await offer(author, stage.leader.peer, original, payload)
        else:
            assert await refusal(stage, author, original, payload) == Reason.COPIED
        await eventually(lambda: stage.owner.head.version == 1)
        first = author if has_committed else copier
        assert authors_of(stage, 1) == [first.peer]
        assert expired(stage) == ([Reason.COPIED] if has_committed else [])


async def test_a_late_copy_of_what_a_version_counts_is_one_too(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        author, copier = stage.node, await joined(stage, 61)
        payload = gradient_bytes(stage.world.run, MODULE, seed=1)
        original, copy = work_of(stage, author, payload), work_of(stage, copier, longer(stage, payload))
        await offer(author, stage.leader.peer, original, payload)
        await eventually(lambda: stage.owner.head.version == 1)
        assert await refusal(stage, copier, copy, longer(stage, payload)) == Reason.COPIED


@pytest.mark.parametrize("staleness", [0, 1])
async def test_a_copy_that_says_it_began_from_the_next_version_is_one_too(tmp_path: Path, staleness: int) -> None:
    async with on_stage(tmp_path, staleness=staleness) as stage:
        author, copier = stage.node, await joined(stage, 61)
        payload = gradient_bytes(stage.world.run, MODULE, seed=1)
        await offer(author, stage.leader.peer, work_of(stage, author, payload), payload)
        await eventually(lambda: stage.owner.head.version == 1)
        copy = work_of(stage, copier, longer(stage, payload))
        assert copy.document.base_version == 1
        assert await refusal(stage, copier, copy, longer(stage, payload)) == Reason.COPIED


async def test_replicas_with_work_of_their_own_and_other_paths_are_no_copies(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        await stage.hold_round_open()
        payloads = [gradient_bytes(stage.world.run, MODULE, seed=seed) for seed in (1, 2, 1)]
        authors = [stage.node, await joined(stage, 61), await joined(stage, 62)]
        for author, payload, path in zip(authors, payloads, (PATH, PATH, OTHER_PATH), strict=True):
            await offer(author, stage.leader.peer, work_of(stage, author, payload, path=path), payload)
        await eventually(lambda: stage.owner.head.version == 1)
        assert len(authors_of(stage, 1)) == 3 and not expired(stage)


async def test_who_may_not_contribute_may_not_commit(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        sealed = work_of(stage, await joined(stage, 61), b"of another author")
        with pytest.raises(Refused) as caught:
            await commit(stage, stage.node, sealed)
        assert caught.value.reason == Reason.NOT_AUTHOR
        early = replace(work_of(stage, stage.node, b"mine").document, base_version=5)
        with pytest.raises(Refused) as caught:
            await commit(stage, stage.node, seal(stage.node.swarm.signer, early))
        assert caught.value.reason == Reason.STALE_BASE
        topology, works = stage.world.run.topology, stage.leader.chain.originals._works
        elsewhere = next(path for path in topology.paths() if MODULE not in path.modules())
        for odd in (elsewhere, PathId((0, 0, 9)), PathId((0, 9, 0)), PathId((0, 0))):
            with pytest.raises(Refused) as caught:
                await commit(stage, stage.node, work_of(stage, stage.node, b"mine", path=odd))
            assert caught.value.reason == Reason.WRONG_PATH and not works
        stage.leader.chain.node.mandates.grant = lambda module: None  # type: ignore[method-assign]
        with pytest.raises(Refused) as caught:
            await commit(stage, stage.node, work_of(stage, stage.node, b"mine"))
        assert caught.value.reason == Reason.NOT_LEADER


async def test_a_crowd_of_commitments_costs_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(originals, "COMMITTED_MAX", 3)
    monkeypatch.setattr(originals, "_lot", lambda secret, author: b"")
    async with on_stage(tmp_path) as stage:
        found = Originals(stage.world.run, MODULE)
        works, gradient = same_work(stage, *range(70, 80))
        for sealed in works:
            found.commit(sealed, is_known=False)
        assert len(found._works) == 3
        for steps in range(1, 9):
            again = replace(works[5].document, steps=steps)
            found.commit(seal(signer(75), again), is_known=True)
        assert len(found._works) == 4, "of one path and base the first counts"
        found.drop(seal(signer(75), replace(works[5].document, steps=1)).id)
        found.commit(works[5], is_known=True)
        sketch = found.sketch(gradient)
        for sealed in reversed(works):
            found.add(sealed, sketch)
        ids = [sealed.id for sealed in works]
        assert found.copies(ids) == ids[1:], "the first that committed is the original"
        found.forget(oldest_base=REMEMBERED)
        assert found._works
        found.forget(oldest_base=REMEMBERED + 1)
        assert not found._works


async def test_what_one_author_commits_to_is_bounded_by_its_paths(tmp_path: Path) -> None:
    """Attack: with made-up paths one peer that had worked filled any memory."""
    async with on_stage(tmp_path, staleness=1) as stage:
        await stage.honest_round(1)
        paths, works = stage.world.run.topology.paths_through(MODULE), stage.leader.chain.originals._works
        assert stage.node.peer in stage.leader.chain.ledger.workers
        before = len(works)
        for index in range(9, 29):
            with pytest.raises(Refused):
                await commit(stage, stage.node, work_of(stage, stage.node, b"mine", path=PathId((index,) * 3)))
        for number in range(3):
            for base in (0, 1, 2):  # of version 0 and PATH the work has come, and counts
                for path in paths:
                    document = stage.document(b"%d" % number, path=path, base_version=base)
                    await commit(stage, stage.node, seal(stage.node.swarm.signer, document))
        assert len(works) - before == 3 * len(paths)


async def test_one_key_does_not_take_the_places_of_newcomers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: one stranger committed to all that is remembered, and no newcomer's commitment was."""
    monkeypatch.setattr(originals, "COMMITTED_MAX", 4)
    monkeypatch.setattr(originals, "_lot", lambda secret, author: b"1" if author == signer(73).peer else b"0")
    async with on_stage(tmp_path) as stage:
        found = Originals(stage.world.run, MODULE)
        (honest, first, second, third, fourth), gradient = same_work(stage, 70, 71, 72, 73, 74)
        greedy = [seal(signer(75), replace(first.document, author=signer(75).peer, base_version=b)) for b in range(6)]
        for sealed in greedy:
            found.commit(sealed, is_known=False)
        assert list(found._works) == [sealed.id for sealed in greedy[:4]]
        for sealed in (honest, first, second):
            found.commit(sealed, is_known=False)
        everybody = {greedy[0].id, honest.id, first.id, second.id}
        assert found._works.keys() == everybody, "the latest of whoever has most gives way"
        found.commit(greedy[1], is_known=False)
        found.commit(third, is_known=False)
        assert found._works.keys() == everybody, "nobody has more than a newcomer, or a worse lot"
        found.add(second, found.sketch(gradient))
        found.commit(third, is_known=False)
        assert third.id in found._works, "what has come takes no place of those that wait"
        found.take_back(second.id)
        assert second.id in found._works
        found.commit(fourth, is_known=True)
        assert fourth.id in found._works


def remembered(stage: Stage, works: list[Sealed[Contribution]]) -> set[str]:
    """The authors of which commitments are remembered that come in this order."""
    found = Originals(stage.world.run, MODULE)
    for sealed in works:
        found.commit(sealed, is_known=False)
    return {work.document.author for work in found._works.values()}


async def test_a_crowd_of_commitments_keeps_strangers_out_by_chance_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attack: a key for each place, all of which came first, and no other stranger's commitment was remembered."""
    monkeypatch.setattr(originals, "COMMITTED_MAX", 40)
    monkeypatch.setattr("secrets.token_bytes", lambda count: bytes(count))
    async with on_stage(tmp_path) as stage:
        crowd, honest = same_work(stage, *range(100, 140))[0], same_work(stage, *range(150, 160))[0]
        kept = remembered(stage, crowd + honest)
        ours = {sealed.document.author for sealed in honest}
        assert len(kept) == 40 and len(kept & ours) >= 5, "four in five of all authors, whoever they are"
        for order in (honest + crowd, [*crowd, *honest, *crowd, *crowd], [*reversed(crowd), *honest, *honest]):
            assert remembered(stage, order) == kept, "neither who comes first, nor who comes again and again"
        monkeypatch.setattr("secrets.token_bytes", lambda count: bytes([1]) * count)
        assert remembered(stage, crowd + honest) != kept, "nobody foresees it"


async def test_a_crowd_of_commitments_takes_no_place_of_who_has_worked_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for another module, or long ago."""
    monkeypatch.setattr(originals, "COMMITTED_MAX", 3)
    async with on_stage(tmp_path) as stage:
        author, works = await joined(stage, 61), stage.leader.chain.originals._works
        stage.leader.chain.chains.earlier = frozenset({author.swarm.peer})
        for number in range(70, 76):
            stranger = await joined(stage, number)
            await commit(stage, stranger, work_of(stage, stranger, b"%d" % number))
        sealed = work_of(stage, author, b"mine")
        await commit(stage, author, sealed)
        assert sealed.id in works and len(works) == 4
        originals_ = stage.leader.chain.originals
        originals_.take_back(sealed.id)
        for number in range(80, 90):
            stranger = await joined(stage, number)
            await commit(stage, stranger, work_of(stage, stranger, b"%d" % number))
        assert sealed.id in works, "nor after it came, and was not admitted"


async def test_of_two_copies_that_a_new_leader_takes_over_none_is_the_original(tmp_path: Path) -> None:
    """It was not there: both have receipts, and share what the work is worth."""
    async with on_stage(tmp_path) as stage:
        found = Originals(stage.world.run, MODULE)
        works, gradient = same_work(stage, 70, 71, 72)
        sketch = found.sketch(gradient)
        ids = [sealed.id for sealed in works]
        found.take_over()
        for sealed in works:
            found.add(sealed, sketch, has_receipt=sealed is not works[2])
        assert found.copies(ids) == ids[2:], "what comes to it without a receipt is later"


async def test_a_new_leader_knows_who_committed_to_it_when_it_was_a_mirror(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        found = Originals(stage.world.run, MODULE)
        works, gradient = same_work(stage, 70, 71)
        sketch = found.sketch(gradient)
        found.commit(works[1], is_known=False)
        found.take_over()
        for sealed in works:
            found.add(sealed, sketch, has_receipt=True)
        assert found.copies([sealed.id for sealed in works]) == [works[0].id]
