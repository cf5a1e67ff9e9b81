"""The leader of a module, over the network: what it takes, what it refuses and why, and that it stays up."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from led_module import MODULE, PATH, Stage, on_stage
from runtime_harness import offer
from tiny_run import MODEL, contribution_of, gradient_bytes, signer
from virtual_time import eventually

from dipaco_p2p.core.model.layout import module_layout
from dipaco_p2p.core.outer.compress import CODECS, INT8
from dipaco_p2p.core.tensor_file import encode
from dipaco_p2p.errors import Refused
from dipaco_p2p.node.items import read_items
from dipaco_p2p.node.node import send
from dipaco_p2p.node.uploads import UNUSED_UPLOADS_MAX
from dipaco_p2p.owner.rejections import OF_AUTHOR_MAX
from dipaco_p2p.protocol.documents import (
    BlobRef,
    ModuleVersion,
    Rejection,
    Sealed,
    is_signed,
    rejected,
    seal,
)
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.rounds import Entry, OpenRound, read_open_round
from dipaco_p2p.topology import ModuleId, PathId

SIZE = module_layout(MODEL, 1).size


def payload_with(codes: np.ndarray[Any, Any], scales: np.ndarray[Any, Any]) -> bytes:
    return encode({"codes": codes, "scales": scales}, metadata=CODECS[INT8].metadata)


CODES = np.ones(SIZE, dtype=np.int8)
SCALES = np.full(-(-SIZE // 256), 1e-3, dtype=np.float32)
BAD_PAYLOADS = {
    "nan": payload_with(CODES, np.full_like(SCALES, np.nan)),
    "infinity": payload_with(CODES, np.full_like(SCALES, np.inf)),
    "negative": payload_with(CODES, -SCALES),
    "too short": payload_with(CODES[:-1], SCALES),
    "too long": payload_with(np.append(CODES, CODES[:1]), SCALES),
    "other type": payload_with(CODES, SCALES.astype(np.float16)),
    "no tensors": b"these are not tensors",
    "all zeros": payload_with(CODES * 0, SCALES),
    "far beyond the parameters": payload_with(CODES, SCALES * np.float32(1e30)),
}


@pytest.mark.parametrize("name", BAD_PAYLOADS)
async def test_a_bad_payload_is_refused_and_honest_work_goes_on(tmp_path: Path, name: str) -> None:
    async with on_stage(tmp_path) as stage:
        reason = await stage.refusal(BAD_PAYLOADS[name])
        assert reason == (Reason.NORM if name in ("all zeros", "far beyond the parameters") else Reason.MALFORMED)
        await stage.honest_round(1)
        assert len(stage.owner.head.shares) == 1


async def test_every_other_run_module_path_base_or_author_is_refused_by_name(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        payload = gradient_bytes(stage.world.run, MODULE)
        odd = {
            Reason.WRONG_RUN: {"run": "0" * 64},
            Reason.NOT_LEADER: {"module": ModuleId(2, 0)},
            Reason.WRONG_PATH: {"path": PathId((0, 1, 0))},
            Reason.UNKNOWN_BASE: {"base_digest": "1" * 64},
            Reason.MALFORMED: {"tokens": stage.world.run.tokens_full + 1},
        }
        for reason, changes in odd.items():
            assert await stage.refusal(payload, **changes) == reason
        assert await stage.refusal(payload, base_version=1) == Reason.UNKNOWN_BASE
        somebody = contribution_of(stage.world.run, signer(61), payload, module=MODULE, path=PATH)
        with pytest.raises(Refused) as caught:
            await offer(stage.node, stage.leader.peer, seal(signer(61), somebody), payload)
        assert caught.value.reason == Reason.NOT_AUTHOR
        await stage.honest_round(1)


async def test_a_forged_signature_is_refused(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        payload = gradient_bytes(stage.world.run, MODULE)
        sealed = seal(stage.node.swarm.signer, stage.document(payload))
        with pytest.raises(Refused, match="signature"):
            await offer(stage.node, stage.leader.peer, replace(sealed, signature="0" * 128), payload)
        changed = replace(sealed, document=replace(sealed.document, tokens=1))
        with pytest.raises(Refused, match="signature"):
            await offer(stage.node, stage.leader.peer, changed, payload)
        await stage.honest_round(1)


async def test_a_payload_that_was_not_uploaded_is_asked_for(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        payload = gradient_bytes(stage.world.run, MODULE)
        sealed = seal(stage.node.swarm.signer, stage.document(payload))
        header = {"contribution": sealed.to_dict()}
        with pytest.raises(Refused) as caught:
            await stage.node.swarm.call(stage.leader.peer, "module.contribute", header, timeout_s=5.0)
        assert caught.value.reason == "payload-missing"


async def test_a_payload_that_rotted_on_disk_is_asked_for_again(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        payload = gradient_bytes(stage.world.run, MODULE)
        await send(stage.node, stage.leader.peer, payload)
        name = BlobRef.of(payload).digest
        [path] = (stage.leader.node.store.folder / "blobs").rglob(name)
        path.write_bytes(payload[:-1] + b"?")
        sealed = seal(stage.node.swarm.signer, stage.document(payload))
        with pytest.raises(Refused) as caught:
            await stage.owner.contribute(stage.node.peer, sealed)
        assert caught.value.reason == "payload-missing"
        assert (await offer(stage.node, stage.leader.peer, sealed, payload)).document.contribution == sealed.id


@pytest.mark.parametrize("more", [-1, 1])
async def test_a_payload_of_another_size_than_stated_is_refused_and_nothing_of_it_stays(
    tmp_path: Path, more: int
) -> None:
    """Attack: no mirror took it, and the leader kept each try on its disk for good."""
    async with on_stage(tmp_path) as stage:
        node = stage.leader.node
        for seed in range(UNUSED_UPLOADS_MAX + 3):
            payload = gradient_bytes(stage.world.run, MODULE, seed=seed)
            ref, honest = BlobRef.of(payload), stage.document(payload)
            document = replace(honest, payload=replace(ref, size=ref.size + more))
            with pytest.raises(Refused) as caught:
                await offer(stage.node, stage.leader.peer, document, payload)
            assert caught.value.reason == Reason.MALFORMED
        assert not stage.leader.chain.ledger.open and not node.store.documents("open-")
        assert sum(map(len, node.uploads._unused.values())) == UNUSED_UPLOADS_MAX, "the oldest are dropped"
        await stage.honest_round(1)


async def test_too_large_a_payload_is_refused_before_it_is_kept(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        limit = max(map(stage.world.run.payload_bytes_max, stage.world.run.topology.modules()))
        huge = bytes(limit + 1)
        with pytest.raises(Refused) as caught:
            await send(stage.node, stage.leader.peer, huge)
        assert caught.value.reason == "oversized"
        assert list((stage.leader.node.store.folder / "partial").iterdir()) == []
        small = gradient_bytes(stage.world.run, MODULE)
        limit = stage.world.run.payload_bytes_max(MODULE)
        document = replace(stage.document(small), payload=BlobRef(digest="0" * 64, size=limit + 1))
        with pytest.raises(Refused) as caught:
            await offer(stage.node, stage.leader.peer, document, small)
        assert caught.value.reason == Reason.OVERSIZED


async def test_a_base_one_version_old_counts_and_one_of_two_does_not(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        genesis = {"base_version": 0, "base_digest": stage.owner.head.digest}
        other = stage.world.peer(62)
        payload = gradient_bytes(stage.world.run, MODULE, seed=8)
        late = contribution_of(stage.world.run, other.swarm.signer, payload, module=MODULE, path=PATH, **genesis)
        await stage.honest_round(1)
        assert (await offer(other, stage.leader.peer, late, payload)).document.round == 1
        await eventually(lambda: stage.owner.head.version == 2)
        too_late = gradient_bytes(stage.world.run, MODULE, seed=9)
        assert await stage.refusal(too_late, **genesis) == Reason.STALE_BASE


async def test_the_same_contribution_gets_the_same_receipt_and_counts_once(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        payload = gradient_bytes(stage.world.run, MODULE)
        sealed = seal(stage.node.swarm.signer, stage.document(payload))
        first = await offer(stage.node, stage.leader.peer, sealed, payload)
        assert set(first.document.holders) == {stage.leader.peer, stage.world.seed.node.peer}
        assert await offer(stage.node, stage.leader.peer, sealed, payload) == first
        await eventually(lambda: stage.owner.head.version == 1)
        assert await offer(stage.node, stage.leader.peer, sealed, payload) == first
        await stage.honest_round(2)
        ledger = stage.world.seed.archive.ledgers[MODULE]
        assert [sealed.id in {s.contribution for s in v.document.shares} for v in ledger.versions] == [True, False]


async def test_a_second_contribution_to_the_same_base_is_refused_also_in_the_next_round(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        base = {"base_version": 0, "base_digest": stage.owner.head.digest}
        await stage.hold_round_open()
        await offer(stage.node, stage.leader.peer, stage.document(one := gradient_bytes(stage.world.run, MODULE)), one)
        other = gradient_bytes(stage.world.run, MODULE, seed=2)
        assert await stage.refusal(other) == Reason.ALREADY_CONTRIBUTED
        await eventually(lambda: stage.owner.head.version == 1)
        assert await stage.refusal(other, **base) == Reason.ALREADY_CONTRIBUTED


async def test_of_two_that_come_at_once_one_gets_a_receipt(tmp_path: Path) -> None:
    async with on_stage(tmp_path, delay_s=(0.01, 0.1)) as stage:
        payloads = [gradient_bytes(stage.world.run, MODULE, seed=seed) for seed in (1, 2)]
        offers = [offer(stage.node, stage.leader.peer, stage.document(payload), payload) for payload in payloads]
        found = await asyncio.gather(*offers, return_exceptions=True)
        assert sorted(type(item).__name__ for item in found) == ["Refused", "Sealed"]
        ledger = stage.world.seed.archive.ledgers[MODULE]
        await eventually(lambda: ledger.head.version == 1)
        assert len(ledger.head.shares) == 1 and ledger.open == {}


async def test_a_norm_far_above_the_usual_is_refused_once_the_usual_is_known(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        loud = gradient_bytes(stage.world.run, MODULE, seed=9, size=2e-2)
        for number in range(3):
            await stage.honest_round(number)
        assert await stage.refusal(loud) == Reason.NORM
        await stage.honest_round(4)


async def test_a_norm_somewhat_above_the_usual_is_clipped(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        for number in range(3):
            await stage.honest_round(number)
        assert stage.owner.head.clip_norm is None
        await stage.honest_round(4)
        run, usual = stage.world.run, np.sqrt(SIZE) * 1e-3
        lr_sum = run.norms(MODULE, []).lr_sum
        assert stage.owner.head.clip_norm == pytest.approx(3 * usual * lr_sum(3) / lr_sum(1), rel=0.05)


async def test_a_complete_module_takes_no_more(tmp_path: Path) -> None:
    async with on_stage(tmp_path, rounds=2) as stage:
        await stage.honest_round(1)
        await stage.honest_round(2)
        assert stage.owner.is_complete
        assert await stage.refusal(gradient_bytes(stage.world.run, MODULE, seed=3)) == Reason.COMPLETE


async def test_a_round_waits_for_all_paths_until_its_deadline(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        rounds = stage.world.run.config.rounds
        await stage.hold_round_open()
        began_s = stage.world.clock.now_s()
        await stage.honest_round(1)
        assert stage.world.clock.now_s() - began_s >= rounds.deadline_s + rounds.grace_s


async def test_without_the_archive_receipts_name_the_leader_alone_and_versions_follow_later(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        await stage.world.kill_seed()
        payload = gradient_bytes(stage.world.run, MODULE)
        assert await stage.refusal(payload) == "no-mirror", "it counts as alive until its heartbeat expires"
        await eventually(lambda: not stage.leader.node.watch.seeds())
        receipt = await offer(stage.node, stage.leader.peer, stage.document(payload), payload)
        assert receipt.document.holders == (stage.leader.peer,)
        await eventually(lambda: stage.owner.head.version == 1)
        assert not stage.owner.is_complete
        assert stage.world.start_seed().archive.ledgers[MODULE].head.version == 0
        await stage.leader.node.watch.refresh()
        await stage.honest_round(2)
        archive = stage.world.seed.archive
        assert [sealed.document.version for sealed in archive.ledgers[MODULE].versions] == [1, 2]
        assert archive.contribution(receipt.document.contribution).document.payload == BlobRef.of(payload)
        assert stage.world.seed.node.store.get(BlobRef.of(payload).digest) == payload
        assert not stage.leader.node.store.documents("open-"), "nothing is kept here that the archive has"


async def test_a_receipt_for_what_was_counted_elsewhere_says_what_is_on_this_disk(tmp_path: Path) -> None:
    """A leader had taken a version over ready made, and gave a receipt for a contribution that it did not have."""
    async with on_stage(tmp_path) as stage:
        await stage.world.kill_seed()
        await eventually(lambda: not stage.leader.node.watch.seeds())
        payload = gradient_bytes(stage.world.run, MODULE)
        sealed = seal(stage.node.swarm.signer, stage.document(payload))
        await offer(stage.node, stage.leader.peer, sealed, payload)
        await eventually(lambda: stage.owner.head.version == 1)
        ledger, store = stage.leader.chain.ledger, stage.leader.node.store
        ledger.drop(sealed.id)
        store.drop(sealed.document.payload.digest)
        request = {"contribution": sealed.to_dict()}
        with pytest.raises(Refused) as caught:
            await stage.node.swarm.call(stage.leader.peer, "module.contribute", request, timeout_s=20.0)
        assert caught.value.reason == Reason.PAYLOAD_MISSING
        receipt = await offer(stage.node, stage.leader.peer, sealed, payload)
        assert receipt.document.round == 0 and ledger.kept[sealed.id] == sealed
        assert store.get(sealed.document.payload.digest) == payload


async def test_old_versions_leave_the_leaders_disk_when_the_archive_has_them(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        for number in range(6):
            await stage.honest_round(number)
        versions = stage.world.seed.archive.ledgers[MODULE].versions
        here = [stage.leader.node.store.size(sealed.document.digest) is not None for sealed in versions]
        there = [stage.world.seed.node.store.size(sealed.document.digest) is not None for sealed in versions]
        assert here == [False] * 3 + [True] * 3 and all(there)


async def test_a_new_version_wakes_those_who_wait_for_it(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        header = {"module": str(MODULE), "after": 0, "wait_s": 2.0}
        reply = await stage.node.swarm.call(stage.leader.peer, "module.next", header, timeout_s=20.0)
        assert await read_items(ModuleVersion, reply) == []
        await stage.honest_round(1)
        reply = await stage.node.swarm.call(stage.leader.peer, "module.next", header, timeout_s=20.0)
        assert [sealed.document.version for sealed in await read_items(ModuleVersion, reply)] == [1]


async def test_a_leader_tells_what_is_in_its_open_round(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:

        async def told() -> OpenRound:
            header = {"module": str(MODULE)}
            reply = await stage.node.swarm.call(stage.leader.peer, "module.round", header, timeout_s=20.0)
            open_ = read_open_round(reply.body)
            left.append(open_.left_s)
            return replace(open_, left_s=0.0)

        left: list[float] = []
        deadline_s = stage.world.run.config.rounds.deadline_s
        assert await told() == OpenRound(version=0, deadline_s=deadline_s)
        payload = gradient_bytes(stage.world.run, MODULE)
        await offer(stage.node, stage.leader.peer, stage.document(payload), payload)
        entry = Entry(path=PATH, peer=stage.node.peer)
        assert await told() == OpenRound(version=0, entries=(entry,), deadline_s=deadline_s)
        publish, seen = stage.owner._replication.publish, []

        async def slow_publish() -> None:
            seen.append(replace(stage.owner.open_round(), left_s=0.0))
            await publish()

        stage.owner._replication.publish = slow_publish  # type: ignore[method-assign]
        await eventually(lambda: stage.owner.head.version == 1)
        assert seen[0] == OpenRound(version=0, entries=(entry,), deadline_s=deadline_s), "it is not published yet"
        await asyncio.sleep(0.1)
        assert await told() == OpenRound(version=1, counted=((entry,),), deadline_s=deadline_s)
        assert left[0] == left[2] == deadline_s < left[1], "nothing runs before something is in, and then the grace too"
        for seed in (2, 3):
            await stage.honest_round(seed)
        await asyncio.sleep(0.1)
        assert (await told()).counted == ((entry,), (entry,)), "of the last two versions"


async def test_a_crowd_fills_no_version_and_leaves_room_for_those_who_have_worked(tmp_path: Path) -> None:
    """Attack: 670 small contributions of as many keys made a version that nobody took."""
    async with on_stage(tmp_path, contributions_max=8) as stage:  # four for each path through the module
        await stage.honest_round(1)
        await stage.hold_round_open()
        head, said = stage.owner.head, []
        for number in range(6):
            stranger = stage.world.peer(80 + number)
            await stranger.watch.refresh()
            payload = gradient_bytes(stage.world.run, MODULE, seed=50 + number)
            made_of = {"module": MODULE, "path": PATH, "base_version": 1, "base_digest": head.digest}
            document = contribution_of(stage.world.run, stranger.swarm.signer, payload, **made_of)
            try:
                await offer(stranger, stage.leader.peer, document, payload)
                said.append("taken")
            except Refused as refused:
                said.append(refused.reason)
        assert said == ["taken"] * 2 + [Reason.FULL] * 4
        payload = gradient_bytes(stage.world.run, MODULE, seed=2)
        await offer(stage.node, stage.leader.peer, stage.document(payload), payload)
        await eventually(lambda: stage.owner.head.version == 2)
        assert len(stage.owner.head.shares) == 3


async def test_a_round_waits_for_both_claimants_of_a_path(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        other, elsewhere = stage.world.peer(62), stage.world.peer(63)
        for path in stage.world.run.topology.paths_through(MODULE):
            if path != PATH:
                payload = gradient_bytes(stage.world.run, MODULE, seed=5)
                document = replace(stage.document(payload, path=path), author=elsewhere.peer)
                await offer(elsewhere, stage.leader.peer, document, payload)
        for node in (stage.node, other):
            await node.presence.claim(PATH, since_s=0.0)
        payload = gradient_bytes(stage.world.run, MODULE, seed=6)
        await offer(stage.node, stage.leader.peer, stage.document(payload), payload)
        await stage.leader.node.watch.refresh()
        await asyncio.sleep(2.0)
        assert stage.owner.head.version == 0
        payload = gradient_bytes(stage.world.run, MODULE, seed=7)
        document = replace(stage.document(payload), author=other.peer)
        await offer(other, stage.leader.peer, document, payload)
        await eventually(lambda: stage.owner.head.version == 1, limit_s=3.0)
        assert [share.path for share in stage.owner.head.shares].count(PATH) == 2


# -- what it says of what it refused: signed, in bounds, and nothing of what it took


async def notes(stage: Stage, after: str = "") -> list[Sealed[Rejection]]:
    reply = await stage.node.swarm.call(
        stage.leader.peer, "module.rejections", {"module": str(MODULE), "after": after}, timeout_s=5.0
    )
    return await read_items(Rejection, reply)


async def test_a_refused_contribution_is_noted_with_its_reason_and_its_authors_signature(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        payload = gradient_bytes(stage.world.run, MODULE)
        assert await stage.refusal(payload, base_version=7) == Reason.UNKNOWN_BASE
        assert await stage.refusal(payload, base_version=7) == Reason.UNKNOWN_BASE  # once more, and noted once
        [sealed] = await notes(stage)
        note = sealed.document
        assert (note.reason, note.round, note.author) == (Reason.UNKNOWN_BASE, 0, stage.leader.peer)
        assert note.contribution.author == stage.node.peer and is_signed(rejected(note))
        assert note.term == stage.owner.grant.term
        assert await notes(stage, after=rejected(note).id) == []
        await stage.honest_round(1)
        assert len(await notes(stage)) == 1, "what was taken is not noted, and the round before still is"
        for number in (2, 3):
            await stage.honest_round(number)
        assert await notes(stage) == []


async def test_nobody_gets_more_notes_than_a_few_and_none_about_what_is_not_its_own(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        payload = gradient_bytes(stage.world.run, MODULE)
        for number in range(OF_AUTHOR_MAX + 3):
            await stage.refusal(payload, base_version=7, tokens=10 + number)
        assert len(await notes(stage)) == OF_AUTHOR_MAX
        theirs = stage.world.peer(61)
        await theirs.watch.refresh()
        with pytest.raises(Refused) as caught:  # somebody else's, pushed as one's own
            await offer(
                theirs,
                stage.leader.peer,
                stage.document(payload, author=signer(61).peer, path=PathId((0, 1, 0))),
                payload,
            )
        assert caught.value.reason == Reason.WRONG_PATH
        assert {sealed.document.contribution.author for sealed in await notes(stage)} == {
            stage.node.peer,
            signer(61).peer,
        }
        assert await stage.refusal(payload, run="0" * 64) == Reason.WRONG_RUN
        assert all(sealed.document.contribution.run == stage.world.run.id for sealed in await notes(stage))


async def test_what_expires_is_noted(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        await stage.hold_round_open()
        payload = gradient_bytes(stage.world.run, MODULE)
        document = stage.document(payload, path=PATH)
        await offer(stage.node, stage.leader.peer, document, payload)
        [sealed] = stage.leader.chain.ledger.open.values()
        stage.leader.chain.expire(sealed, "payload-lost")
        [note] = await notes(stage)
        assert (note.document.reason, rejected(note.document).id) == ("payload-lost", sealed.id)
