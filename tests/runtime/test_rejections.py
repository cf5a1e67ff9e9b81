"""What a leader refuses it says so of, signed and in bounds, to whoever asks; and of what it took it says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from runtime_harness import offer
from test_owner import MODULE, PATH, Stage, on_stage
from tiny_run import gradient_bytes, signer

from dipaco_p2p.errors import Refused
from dipaco_p2p.node.items import read_items
from dipaco_p2p.owner.rejections import OF_AUTHOR_MAX
from dipaco_p2p.protocol.documents import Rejection, Sealed, is_signed, rejected
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.topology import PathId


async def notes(stage: Stage, after: str = "") -> list[Sealed[Rejection]]:
    reply = await stage.node.swarm.call(
        stage.leader.peer, "module.rejections", {"module": str(MODULE), "after": after}, timeout_s=5.0
    )
    return read_items(Rejection, reply)


def test_a_refused_contribution_is_noted_with_its_reason_and_its_authors_signature(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
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

    on_stage(tmp_path, scene)


def test_nobody_gets_more_notes_than_a_few_and_none_about_what_is_not_its_own(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
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

    on_stage(tmp_path, scene)


def test_what_expires_is_noted(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.hold_round_open()
        payload = gradient_bytes(stage.world.run, MODULE)
        document = stage.document(payload, path=PATH)
        await offer(stage.node, stage.leader.peer, document, payload)
        [sealed] = stage.leader.chain.ledger.open.values()
        stage.leader.chain.expire(sealed, "payload-lost")
        [note] = await notes(stage)
        assert (note.document.reason, rejected(note.document).id) == ("payload-lost", sealed.id)

    on_stage(tmp_path, scene)
