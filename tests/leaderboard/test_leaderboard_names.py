"""A volunteer's name on its way to the page: said with its heartbeat, kept when it is gone, hidden by decree."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from collector_harness import Peer, Swarm
from e2e_harness import write_corpus
from leaderboard_harness import COORDINATOR, STRANGER, dump
from stages_harness import Home, run_file
from test_web_pages import column
from tiny_run import signer
from virtual_time import end, eventually, play
from web_harness import site

from dipaco_p2p.node.authority import Decrees
from dipaco_p2p.node.decree_news import serve_decrees
from dipaco_p2p.protocol.liveness import Heartbeat
from dipaco_p2p.protocol.records import peers_key
from dipaco_p2p.strict import plain
from dipaco_p2p.topology import PathId
from leaderboard.collector import Collector
from leaderboard.database import Database
from leaderboard.model import Snapshot
from peers.config import PeerConfig
from peers.preferences.layers import resolve


async def peer_of(swarm: Swarm, **said: Any) -> Peer:
    """A volunteer that claims a path, so that it is listed."""
    peer = Peer(swarm, STRANGER, Heartbeat(doing="training", **said))
    await peer.presence.beat()
    await peer.presence.claim(PathId((0, 0, 0)), since_s=swarm.clock.now_s())
    return peer


def names(snapshot: Snapshot) -> list[tuple[str, str]]:
    return [(row.name, row.team) for row in snapshot.contributors if row.peer == STRANGER.peer]


async def test_the_last_name_that_was_signed_is_shown(swarm: Swarm) -> None:
    await swarm.begin()
    peer = await peer_of(swarm, name="Ada", team="Analysts")
    assert names(await swarm.look()) == [("Ada", "Analysts")]
    await peer.presence.say(name="Ada L.", team="")
    assert names(await swarm.look()) == [("Ada L.", "")]
    await peer.presence.say(name="")
    assert names(await swarm.look()) == [("", "")], "whoever takes its name back has none"
    assert [row[-2:] for row in dump(swarm.database, "heartbeats") if row[0] == STRANGER.peer] == [("", "")]


async def test_a_name_is_still_known_when_its_peer_is_gone_and_after_a_restart(swarm: Swarm) -> None:
    await swarm.begin()
    peer = await peer_of(swarm, name="Ada", team="Analysts")
    await swarm.look()
    await peer.presence.leave()
    await asyncio.sleep(120)
    await swarm.look()
    for _ in range(2):
        assert swarm.collector._live.names == {STRANGER.peer: ("Ada", "Analysts")}
        assert STRANGER.peer not in swarm.collector._live.volunteers
        swarm.collector = swarm.open()


async def test_a_decree_hides_a_name_and_gives_it_back_and_a_ban_hides_it_too(swarm: Swarm) -> None:
    await swarm.begin()
    await peer_of(swarm, name="Ada", team="Analysts")
    decrees = Decrees(swarm.bench.run)
    serve_decrees(swarm.seed.scoped, decrees, swarm.seed.presence)

    async def after(act: str, reason: str = "") -> list[tuple[str, str]]:
        decrees.issue(COORDINATOR, act, at_s=1.0, reason=reason, peer=STRANGER.peer)
        await swarm.seed.presence.beat()
        await swarm.look()
        await asyncio.sleep(1)
        return names(await swarm.look())

    assert await after("hide-name", "an insult") == [("", "")]
    assert [row.act for row in (await swarm.look()).decrees] == ["hide-name"]
    swarm.collector = swarm.open()  # it has the decree on disk, and the name
    assert names(await swarm.look()) == [("", "")]
    assert await after("show-name") == [("Ada", "Analysts")]
    assert await after("ban", "noise") in ([], [("", "")])
    live = swarm.collector._live
    assert live.names == {STRANGER.peer: ("Ada", "Analysts")}, "it is kept for when it is admitted again"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"name": "\x1b[2J", "team": "Analysts"}, [("", "Analysts")]),
        ({"name": "\u202egnp.exe"}, [("", "")]),
        ({"name": "x" * 100}, [("", "")]),
        ({"name": "<b>Ada</b>"}, [("<b>Ada</b>", "")]),
    ],
    ids=str,
)
async def test_a_hostile_name_is_none_and_its_peer_is_still_there(
    swarm: Swarm, said: dict[str, str], shown: list[tuple[str, str]]
) -> None:
    await swarm.begin()
    await peer_of(swarm, **said)
    snapshot = await swarm.look()
    assert names(snapshot) == shown and snapshot.peers_alive == 2


@pytest.mark.parametrize("name", ["x" * 5_000, 7, ["Ada"], None])
async def test_a_heartbeat_with_something_else_for_a_name_is_not_heard(swarm: Swarm, name: object) -> None:
    await swarm.begin()
    liar = Peer(swarm, STRANGER, Heartbeat())
    body = {**plain(Heartbeat()), "name": name}
    await liar.scoped.put(peers_key(swarm.bench.run.id), body, ttl_s=60.0)
    assert (await swarm.look()).peers_alive == 1


def test_a_name_given_to_join_reaches_the_rows_of_the_page(tmp_path: Path) -> None:
    """From the flags on: two volunteers and the coordinator as they are, a collector, and the site."""
    flags = {"home": tmp_path / "any", "name": " Zoe\u0308 <Smith> ", "team": "The  Analysts"}
    config = PeerConfig.of(resolve(flags, environment={}).preferences)
    home = Home(tmp_path, run_file(write_corpus(tmp_path / "corpus.jsonl")))
    snapshots: list[Snapshot] = []

    async def scenario() -> None:
        home.start()
        await home.join(1, name=config.name, team=config.team)
        await home.join(2)
        reader, database = home.network.join(signer(150)), Database.open(tmp_path / "db.sqlite")
        collector = Collector(
            reader, home.coordinator, home.clock, database, expected=None, on_snapshot=snapshots.append, poll_s=0.1
        )
        task = asyncio.create_task(collector.run())
        await eventually(lambda: any(row.name and row.credit for shown in snapshots for row in shown.contributors))
        await home.volunteers_done()
        await eventually(home.is_over)
        last = await collector.snapshot()
        assert last is not None
        snapshots.append(last)
        await end(task)
        database.close()
        await home.close()

    play(scenario)
    said = {row.peer: (row.name, row.team) for row in snapshots[-1].contributors}
    assert said == {signer(1).peer: ("Zoë <Smith>", "The Analysts"), signer(2).peer: ("", "")}
    with site(snapshots[-1]) as (client, _):
        rows = client.get("/api/v1/contributors.json").json()["rows"]
        assert {(row["peer"], row["name"]) for row in rows} == {(peer, name) for peer, (name, _) in said.items()}
        shown = column(client.get("/contributors").text, 1)
    assert sorted(shown) == sorted([f"...{signer(1).peer[-6:]} Zoë <Smith> The Analysts", f"...{signer(2).peer[-6:]}"])
