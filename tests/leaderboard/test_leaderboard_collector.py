"""The collector among live peers: some lie, some are silent, some are gone, and it goes on."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from collector_harness import Peer, Swarm, shown
from leaderboard_harness import (
    COORDINATOR,
    LEADER,
    MIRROR,
    MODULE,
    STRANGER,
    Bench,
    changed,
    dump,
    signed_by,
)
from tiny_run import granted

from dipaco_p2p.node.authority import Decrees
from dipaco_p2p.node.decree_news import serve_decrees
from dipaco_p2p.node.items import items_reply
from dipaco_p2p.node.node import CONTROL_TIMEOUT_S
from dipaco_p2p.node.stages import Stages
from dipaco_p2p.protocol.decrees import Decree
from dipaco_p2p.protocol.documents import seal
from dipaco_p2p.protocol.liveness import Head, Heartbeat
from dipaco_p2p.protocol.rounds import OpenRound
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.topology import PathId
from leaderboard import collector as collector_module
from leaderboard.ledger import text_of
from leaderboard.model import Mark, PathState

SCRIPT = "<script>alert(1)</script>"


async def test_a_chain_is_followed_as_it_grows_and_is_signed(swarm: Swarm) -> None:
    leader = await swarm.begin()
    [one, two, three], _ = swarm.bench.chain(3)
    await leader.lead_with(signed_by(one, MIRROR), two)
    assert shown(await swarm.look()) == [(1, Mark.RECEIPTED), (2, Mark.CLAIMED)]
    await leader.lead_with(signed_by(one, MIRROR, COORDINATOR), signed_by(two, MIRROR), three)
    assert shown(await swarm.look()) == [(1, Mark.VERIFIED), (2, Mark.RECEIPTED), (3, Mark.CLAIMED)]


async def test_what_is_final_is_asked_for_once(swarm: Swarm) -> None:
    leader = await swarm.begin()
    versions, _ = swarm.bench.chain(3)
    signed = [signed_by(sealed, COORDINATOR) for sealed in versions]
    asked: list[int] = []

    def answer(header: dict[str, Any]) -> Reply:
        asked.append(header["after"])
        return items_reply(signed[header["after"] :])

    await leader.lead(3, versions[-1].document.digest)
    leader.answer("module.next", answer)
    await swarm.look()
    assert asked[0] == 0
    asked.clear()
    for _ in range(3):
        await swarm.look()
    assert set(asked) <= {3}


LIES: dict[str, Callable[[Bench], list[Any]]] = {
    "a forged version": lambda bench: [changed(bench.chain(1)[0][0], term=9)],
    "a gap": lambda bench: bench.chain(3)[0][1:],
    "another leader's name": lambda bench: [bench.make(leader=STRANGER)[0]],
    "junk": lambda bench: [1, None, SCRIPT, {"document": SCRIPT, "signature": SCRIPT}],
    "an oversized one": lambda bench: [changed(bench.chain(1)[0][0], norm_rule="x" * 200_000)],
    "a script for a peer": lambda bench: [scripted(bench)],
}


def scripted(bench: Bench) -> Any:
    [sealed], _ = bench.chain(1)
    share = replace(sealed.document.shares[0], peer=PeerId(SCRIPT))
    return seal(LEADER, replace(sealed.document, shares=(share,)))


@pytest.mark.parametrize("lie", LIES)
async def test_a_leaders_lie_is_counted_and_the_seed_nodes_chain_is_shown(swarm: Swarm, lie: str) -> None:
    leader = await swarm.begin()
    versions, _ = swarm.bench.chain(2, seed=500)
    leader.tell_chain("module.next", *LIES[lie](swarm.bench))
    await leader.lead(3, "0" * 64)
    first = await swarm.look()
    assert shown(first) == [] and first.refused and SCRIPT not in repr(first)
    swarm.seed.tell_chain("mirror.chain", *[signed_by(sealed, COORDINATOR) for sealed in versions])
    second = await swarm.look()
    assert shown(second) == [(1, Mark.VERIFIED), (2, Mark.VERIFIED)]
    text = repr([dump(swarm.database, table) for table in ("records", "witnessed", "heartbeats")])
    assert SCRIPT not in text and STRANGER.peer not in text


async def test_who_only_says_that_it_is_a_seed_node_cannot_make_versions(swarm: Swarm) -> None:
    await swarm.seed.presence.beat()
    liar = Peer(swarm, STRANGER, Heartbeat(role="seed", owns=True))
    await liar.presence.beat()
    sealed, _ = swarm.bench.make(leader=STRANGER)
    liar.tell_chain("mirror.chain", sealed)
    liar.answer("run.judgements", lambda header: items_reply([swarm.bench.judgement(0, "0" * 64, author=STRANGER)]))
    snapshot = await swarm.look()
    assert shown(snapshot) == [] and snapshot.rounds == ()
    assert not snapshot.refused, "nobody asks it"
    assert STRANGER.peer not in {row.peer for row in snapshot.contributors}


async def test_a_mandate_that_was_missed_is_asked_for(swarm: Swarm) -> None:
    """Versions of a former leader, not final yet, are believed once somebody shows its grant."""
    leader = await swarm.begin()
    swarm.bench.stage.grants.clear()
    [sealed], _ = swarm.bench.chain(1)
    swarm.seed.tell_chain("mirror.chain", sealed)
    swarm.seed.answer(
        "module.mandate",
        lambda header: items_reply([swarm.bench.grant] if header["module"] == str(MODULE) else []),
    )
    assert leader.answers == {}  # it does not say that it leads, any more
    assert shown(await swarm.look()) == [(1, Mark.CLAIMED)]


async def test_a_leader_that_is_silent_does_not_keep_the_others_from_being_heard(swarm: Swarm) -> None:
    leader = await swarm.begin()
    versions, _ = swarm.bench.chain(1)

    async def never(sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    for method in ("module.next", "module.round", "module.receipts"):
        leader.scoped.serve(method, never)
    await leader.lead(1, versions[0].document.digest)
    swarm.seed.tell_chain("mirror.chain", signed_by(versions[0], COORDINATOR))
    before_s = swarm.clock.now_s()
    assert shown(await swarm.look()) == [(1, Mark.VERIFIED)]
    assert swarm.clock.now_s() - before_s < collector_module.POLL_MAX_S


SLOW_S = 0.98 * CONTROL_TIMEOUT_S
ROUNDS = 20


@pytest.mark.parametrize("is_chain", [False, True], ids=["the same version again", "a chain of its own"])
async def test_a_leader_that_answers_just_in_time_does_not_keep_the_others_from_being_heard(
    tmp_path: Path, is_chain: bool
) -> None:
    """Attack: a version in each answer and 4.9 s for each, and nothing that the coordinator signed was ever shown."""
    swarm = Swarm(tmp_path, rounds=ROUNDS)
    with closing(swarm.database):
        leader, versions = await swarm.begin(), swarm.bench.chain(ROUNDS)[0]
        told: list[int] = []

        async def drip(sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
            told.append(header["after"])
            await asyncio.sleep(SLOW_S)
            return items_reply([versions[min(header["after"], ROUNDS - 1) if is_chain else 0]])

        leader.scoped.serve("module.next", drip)
        await leader.lead(ROUNDS, "0" * 64)
        judged, asked = [swarm.bench.judgement(0, "0" * 64)], list[str]()

        def contributions(header: dict[str, Any]) -> Reply:
            asked.extend(header["ids"])
            return items_reply(swarm.bench.contributions)

        swarm.seed.answer("run.judgements", lambda header: items_reply(judged[header["from"] :]))
        swarm.seed.answer("archive.contributions", contributions)
        await swarm.look()
        assert swarm.collector.stages[0].judgements and asked, "the last that a poll asks for"
        assert len(told) <= (1 + collector_module.TELLER_S / SLOW_S if is_chain else 2)


async def test_a_poll_ends_in_time_whatever_happens(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector_module, "POLL_MAX_S", 3.0)
    await swarm.begin()
    await swarm.look()
    swarm.network.freeze(COORDINATOR.peer)
    before_s = swarm.clock.now_s()
    await swarm.collector.poll()
    assert 2.9 < swarm.clock.now_s() - before_s < 3.1


async def test_receipts_contributions_and_judgements_come_in(swarm: Swarm) -> None:
    bench, leader = swarm.bench, await swarm.begin()
    [sealed], _ = bench.chain(1)
    share = sealed.document.shares[0]
    await leader.lead_with(signed_by(sealed, COORDINATOR))
    leader.answer("module.round", lambda header: Reply({}, OpenRound(version=1).to_bytes()))
    leader.answer(
        "module.receipts",
        lambda header: items_reply([bench.receipt(share.contribution)] if header["after"] == "" else []),
    )
    judged = [bench.judgement(1, sealed.document.digest)]
    swarm.seed.answer("run.judgements", lambda header: items_reply(judged[header["from"] > 1 :]))
    swarm.seed.answer("archive.contributions", lambda header: items_reply(bench.contributions))
    snapshot = await swarm.look()
    [row] = [row for row in snapshot.versions if row.module == MODULE and row.version == 1]
    assert row.loss_after == 3.0 and row.shares[0].has_receipt and row.shares[0].bytes and row.shares[0].steps
    assert [(found.peer, found.contributions) for found in snapshot.contributors] == [(share.peer, 1)]


async def test_what_nobody_has_is_asked_for_less_and_less_often(swarm: Swarm) -> None:
    leader = await swarm.begin()
    [sealed], _ = swarm.bench.chain(1)
    await leader.lead_with(signed_by(sealed, COORDINATOR))
    asked: list[list[str]] = []

    def nothing(header: dict[str, Any]) -> Reply:
        asked.append(header["ids"])
        return items_reply([])

    swarm.seed.answer("archive.contributions", nothing)
    for _ in range(64):
        await swarm.look()
    assert 3 <= len(asked) <= 8


async def test_who_is_there_is_shown_without_where_it_is(swarm: Swarm) -> None:
    leader = await swarm.begin()
    path = PathId((0, 0, 0))
    await leader.presence.claim(path, since_s=swarm.clock.now_s())
    first = await swarm.look()
    assert (first.peers_alive, first.peers_training, first.paths_covered) == (1, 1, 1)
    assert first.state == "training" and first.heard_s == swarm.clock.now_s()
    [row] = [row for row in first.paths if row.path == path]
    assert (row.state, row.peers, row.covered_s) == (PathState.TRAINING, (LEADER.peer,), first.taken_s)
    swarm.network.kill(LEADER.peer)
    await asyncio.sleep(60)
    second = await swarm.look()
    assert (second.peers_alive, second.paths_covered, second.state) == (0, 0, "waiting")
    tables = [dump(swarm.database, table) for table in ("heartbeats", "path_states")]
    assert "203.0.113.7" not in repr([first, second, tables])


async def test_decrees_are_followed_written_down_and_there_again_after_a_restart(swarm: Swarm) -> None:
    await swarm.begin()
    decrees = Decrees(swarm.bench.run)
    serve_decrees(swarm.seed.scoped, decrees, swarm.seed.presence)
    orders: list[tuple[str, dict[str, Any]]] = [("ban", {"peer": STRANGER.peer})]
    orders += [(act, {}) for act in ("freeze", "unfreeze", "freeze")]
    for number, (act, values) in enumerate(orders):
        decrees.issue(COORDINATOR, act, at_s=100.0 * number, reason=f"reason {number}", **values)
    await swarm.seed.presence.beat()
    await swarm.look()
    await asyncio.sleep(1)
    first = await swarm.look()
    assert first.state == "frozen" and first.refused == {}
    assert [(row.act, row.at_s, row.reason, row.peer, row.ended_by) for row in first.decrees] == [
        ("ban", 0.0, "reason 0", STRANGER.peer, None),
        ("freeze", 100.0, "reason 1", None, 3),
        ("unfreeze", 200.0, "reason 2", None, 4),
        ("freeze", 300.0, "reason 3", None, None),
    ]
    swarm.network.kill(COORDINATOR.peer)
    swarm.collector = swarm.open()
    assert (await swarm.look()).decrees == first.decrees


async def test_a_decree_of_somebody_else_is_not_shown_and_not_read_from_a_database(swarm: Swarm) -> None:
    await swarm.begin()
    await swarm.look()
    values = {"run": swarm.bench.run.id, "previous": "", "at_s": 1.0, "act": "freeze", "reason": SCRIPT}
    forged = seal(STRANGER, Decree(number=1, author=STRANGER.peer, **values))
    record = ("decree", forged.id, swarm.bench.run.id, "", 1, text_of(forged))
    swarm.database.write([("record", record)])
    swarm.collector = swarm.open()
    snapshot = await swarm.look()
    assert snapshot.decrees == () and snapshot.state != "frozen" and snapshot.refused == {"does-not-follow": 1}


async def test_nothing_is_said_while_all_is_read(swarm: Swarm) -> None:
    await swarm.begin()
    await swarm.look()
    counts = swarm.reader.statistics()
    assert counts.records_put == counts.calls_served == 0 and counts.calls_made > 0


async def test_a_disk_that_refuses_for_a_while_loses_nothing(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = await swarm.begin()
    [sealed], _ = swarm.bench.chain(1)
    await leader.lead_with(signed_by(sealed, COORDINATOR))

    def full(writes: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(swarm.database, "write", full)
        assert shown(await swarm.look()) == [(1, Mark.VERIFIED)]
        waiting = len(swarm.collector._unwritten)
        await swarm.look()
        assert len(swarm.collector._unwritten) == waiting, "heartbeats, of which each poll brings more, do not wait"
    assert dump(swarm.database, "records") == []
    await swarm.look()
    assert [row[0] for row in dump(swarm.database, "records")] == ["manifest", "version"]


async def test_it_starts_from_its_database_while_nobody_is_there(swarm: Swarm) -> None:
    leader = await swarm.begin()
    [sealed], _ = swarm.bench.chain(1)
    await leader.lead_with(sealed)
    before = await swarm.look()
    swarm.network.kill(COORDINATOR.peer)
    swarm.network.kill(LEADER.peer)
    await asyncio.sleep(60)
    swarm.collector = swarm.open()
    after = await swarm.look()
    assert shown(after) == [(1, Mark.CLAIMED)] and after.versions == before.versions
    assert after.heard_s == before.heard_s and after.peers_alive == 0


async def test_before_the_run_is_known_nothing_is_shown(swarm: Swarm) -> None:
    swarm.network.kill(COORDINATOR.peer)
    await swarm.collector.poll()
    assert await swarm.collector.snapshot() is None


async def test_another_run_at_the_same_address_is_not_taken_for_it(swarm: Swarm, tmp_path: Path) -> None:
    await swarm.begin()
    await swarm.look()
    other = Bench(tmp_path / "other", rounds=3)
    swarm.network.kill(COORDINATOR.peer)
    seed = swarm.network.join(COORDINATOR)
    Stages(seed).add(other.run)
    swarm.collector = swarm.open()
    snapshot = await swarm.look()
    assert snapshot.run.origin == swarm.bench.run.id


async def test_snapshots_come_every_few_seconds(swarm: Swarm) -> None:
    await swarm.begin()
    work = asyncio.create_task(swarm.collector.run())
    await asyncio.sleep(31)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    times = [snapshot.taken_s for snapshot in swarm.shown]
    assert len(times) >= 10 and times == sorted(times)


async def test_a_grant_of_a_stranger_makes_no_leader(swarm: Swarm) -> None:
    await swarm.begin()
    liar = Peer(swarm, STRANGER, Heartbeat(owns=True))
    await liar.presence.beat()
    forged = granted(swarm.bench.run, MODULE, term=5, leader=LEADER.peer)  # names another peer
    head = Head(version=9, digest="0" * 64, term=5, granted_by=COORDINATOR.peer, grant=forged.signature)
    await liar.presence.lead(MODULE, head)
    sealed, _ = swarm.bench.make(leader=STRANGER)
    liar.tell_chain("module.next", sealed)
    snapshot = await swarm.look()
    assert shown(snapshot) == [] and all(row.leader != STRANGER.peer for row in snapshot.modules)
