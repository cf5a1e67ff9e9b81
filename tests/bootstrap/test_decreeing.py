"""What a coordinator's owner types, and what becomes of it: decrees that make sense, and none of the others."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from group_harness import MODULE, make_versions, of_group
from heavy_imports import probe
from tiny_run import SEED_NUMBER, signer
from view_harness import run

from bootstrap.control.decrees import Decreeing, decrees_in, lines, offline, told_all
from bootstrap.control.requests import Request
from bootstrap.folder import write_stage
from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.errors import ConfigError, IntegrityError
from dipaco_p2p.node.authority import Decrees
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.retention import Thinned
from dipaco_p2p.program.files import folder_lock
from dipaco_p2p.protocol.decrees import REASON_CHARS_MAX
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.standing import Findings
from dipaco_p2p.swarm.identity import write
from dipaco_p2p.use.folder import RunFolder

COORDINATOR = signer(SEED_NUMBER)
BANNED = signer(71).peer
BOB, TWIN = PeerId("12D3KooWBob1abcd"), PeerId("12D3KooWBob2abcd")
"""Who is alive; the commands never look into an abbreviated id that they know."""


@asynccontextmanager
async def in_a_run(folder: Path) -> AsyncIterator[tuple[Decreeing, Decrees, PeerId]]:
    """Who may decree in a run whose module is at version 3 of 30, what was decreed, and the id of the run's author."""
    async with of_group(folder) as (world, group, author):
        await make_versions(world, group.leader, author, 3)
        decrees = Decrees(world.run, Store(folder / "decrees"))
        alive = [author.peer, signer(71).peer, BOB, TWIN]
        yield Decreeing(decrees, COORDINATOR, world.run, world.seed.archive.ledgers, alive), decrees, author.peer


async def test_each_act_is_signed_logged_and_listed(tmp_path: Path) -> None:
    async with in_a_run(tmp_path) as (decreeing, decrees, author):
        orders = [
            Request(ask="ban", peer=f"...{author[-6:]}", reason="noise"),
            Request(ask="freeze", reason="a bad shard"),
            Request(ask="rollback", module=str(MODULE), version=1, reason="diverged"),
            Request(ask="unfreeze"),
            Request(ask="admit", peer=author),
            Request(ask="ban", peer=signer(90).peer, reason="never seen here"),
            Request(ask="appoint", peer=signer(71).peer),
            Request(ask="appoint", peer=author),
            Request(ask="dismiss", peer=author),
            Request(ask="hide-name", peer=signer(71).peer, reason="an insult"),
            Request(ask="hide-name", peer=author, reason="a mistake"),
            Request(ask="show-name", peer=f"...{author[-6:]}"),
        ]
        for number, order in enumerate(orders, start=1):
            assert decreeing.issue(order, at_s=10.0 * number)["number"] == number
        listed = decreeing.listed()
        assert [row["act"] for row in listed["decrees"]] == [order.ask for order in orders]
        assert (listed["frozen"], listed["banned"]) == (None, [{"peer": signer(90).peer, "reason": "never seen here"}])
        undone = listed["decrees"][2]
        assert (undone["module"], undone["to"], undone["after"], undone["version"]) == (str(MODULE), 1, 3, None)
        assert listed["seeds"] == [signer(71).peer]
        assert listed["nameless"] == [{"peer": signer(71).peer, "reason": "an insult"}]
        said = lines(listed)
        assert "from 3 to 1 (not carried out yet): diverged" in said[2] and "banned: ..." in said[-1]
        assert f"further seed nodes: ...{signer(71).peer[-6:]}" in said[-1]
        assert said[-1].endswith(f"names hidden: ...{signer(71).peer[-6:]}")
        assert [sealed.document.author for sealed in decrees.log] == [COORDINATOR.peer] * len(orders)


async def test_a_ban_may_undo_what_versions_count_of_the_peer(tmp_path: Path) -> None:
    async with in_a_run(tmp_path) as (decreeing, decrees, author):
        order = Request(ask="ban", peer=author, reason="forged", undo=True)
        row = decreeing.issue(order, at_s=1.0)
        assert row["act"] == "ban"
        row["undone"] = await decreeing.undo(order, author, now_s=lambda: 1.0)
        assert [(one["module"], one["to"], one["after"], one["others"]) for one in row["undone"]] == [
            (str(MODULE), 0, 3, 0)
        ]
        said = told_all(row).splitlines()
        assert len(said) == 2 and f"rollback {MODULE} from 3 to 0" in said[1] and "0 contributions of others" in said[1]
        assert [sealed.document.act for sealed in decrees.log] == ["ban", "rollback"]
        decreeing.issue(Request(ask="ban", peer=BANNED, reason="forged", undo=True), at_s=2.0)
        assert not await decreeing.undo(order, BANNED, now_s=lambda: 2.0)  # no version counts anything of it
        assert decrees.count == 3
        with pytest.raises(ConfigError, match="undoes no work"):
            decreeing.issue(Request(ask="freeze", reason="x", undo=True), at_s=3.0)
        assert decrees.count == 3


async def test_whom_a_modules_owners_have_expelled_the_coordinator_admits_unbanned(tmp_path: Path) -> None:
    async with in_a_run(tmp_path) as (decreeing, decrees, _):
        standings, peer = decreeing._ledgers[MODULE].standings, signer(91).peer
        standings.add(standings.next_version, authors=[], findings=Findings(forged=(peer,)), expels=(peer, 0))
        assert decreeing.issue(Request(ask="admit", peer=f"...{peer[-6:]}"), at_s=1.0)["peer"] == peer
        assert decrees.count == 1


async def test_what_makes_no_sense_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    wrong = [
        (Request(ask="ban", peer="nobody", reason="x"), "neither a peer id"),
        (Request(ask="ban", peer="ab", reason="x"), "neither a peer id"),
        (Request(ask="ban", peer="...abcd", reason="x"), "2 peers end with `abcd`"),
        (Request(ask="ban", peer=COORDINATOR.peer, reason="x"), "coordinator itself"),
        (Request(ask="ban", peer=COORDINATOR.peer[-6:], reason="x"), "coordinator itself"),
        (Request(ask="ban", peer=signer(71).peer), "needs a reason"),
        (Request(ask="ban", peer=signer(71).peer, reason="x" * (REASON_CHARS_MAX + 1)), "one line"),
        (Request(ask="ban", peer=signer(71).peer, reason="two\nlines"), "one line"),
        (Request(ask="admit", peer=signer(71).peer), "is not banned"),
        (Request(ask="appoint", peer=COORDINATOR.peer), "coordinator itself"),
        (Request(ask="dismiss", peer=signer(71).peer), "is not a seed node by decree"),
        (Request(ask="hide-name", peer=signer(71).peer), "needs a reason"),
        (Request(ask="hide-name", peer=COORDINATOR.peer, reason="x"), "coordinator itself"),
        (Request(ask="show-name", peer=signer(71).peer), "is not hidden"),
        (Request(ask="unfreeze"), "is not frozen"),
        (Request(ask="freeze"), "needs a reason"),
        (Request(ask="rollback", module="L9.M9", version=1, reason="x"), "has no L9.M9"),
        (Request(ask="rollback", module="nonsense", version=1, reason="x"), "nonsense"),
        (Request(ask="rollback", module=str(MODULE), version=3, reason="x"), "cannot go back to 3"),
        (Request(ask="rollback", module=str(MODULE), version=99, reason="x"), "is at version 3"),
        (Request(ask="rollback", module=str(MODULE), version=1), "needs a reason"),
    ]
    async with in_a_run(tmp_path) as (decreeing, decrees, author):
        for order, why in wrong:
            with pytest.raises(ConfigError, match=why):
                decreeing.issue(order, at_s=1.0)
        assert decrees.count == 0 and not list((tmp_path / "decrees" / "documents").iterdir())
        decreeing.issue(Request(ask="ban", peer=author, reason="x"), at_s=1.0)
        decreeing.issue(Request(ask="freeze", reason="why not"), at_s=1.0)
        decreeing.issue(Request(ask="hide-name", peer=signer(90).peer, reason="z"), at_s=1.0)
        for order, why in (
            (Request(ask="ban", peer=author, reason="y"), "banned already: x"),
            (Request(ask="appoint", peer=author), "is banned: x"),
            (Request(ask="freeze", reason="again"), "frozen already: why not"),
            (Request(ask="hide-name", peer=signer(90).peer[-6:], reason="y"), "hidden already: z"),
        ):
            with pytest.raises(ConfigError, match=why):
                decreeing.issue(order, at_s=1.0)
        assert decrees.count == 3


# -- without a coordinator that runs


@pytest.fixture
def folder(finished: tuple[Run, Path], tmp_path: Path) -> Path:
    """A coordinator's folder, with a run that is complete."""
    root = tmp_path / "run"
    shutil.copytree(finished[1], root / "grid")
    write_stage(Store(root / "grid"), finished[0].sealed)
    write(root / "identity.key", bytes([SEED_NUMBER]) * 32)
    return root


def test_without_a_running_coordinator_the_command_writes_for_its_next_start(folder: Path) -> None:
    said = run("freeze", folder, "--reason", "a bad shard")
    assert "decree 1: freeze: a bad shard" in said and "is not running" in said
    open_run, _ = RunFolder(folder).require()
    assert decrees_in(RunFolder(folder), open_run).state.frozen == "a bad shard"
    run("unfreeze", folder)
    said = run("decrees", folder)
    assert said.count("decree ") == 2 and "nothing is frozen" in said
    assert "decree 3: hide-name" in run("hide-name", signer(71).peer, folder, "--reason", "an insult")
    assert "names hidden: " in run("decrees", folder)
    assert "decree 4: show-name" in run("show-name", signer(71).peer[-6:], folder)


@pytest.mark.parametrize(
    "words", [["decrees"], ["freeze", "--reason", "a bad shard"], ["ban", BANNED, "--reason", "x"]]
)
def test_neither_listing_nor_making_decrees_imports_what_takes_seconds(folder: Path, words: list[str]) -> None:
    place = 2 if words[0] == "ban" else 1
    result, heavy = probe("bootstrap.cli", *words[:place], str(folder), *words[place:])
    assert result.returncode == 0 and not set(heavy) & {"torch", "hivemind"}, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["unfreeze"], "is not frozen"),
        (["ban", "nobody", "--reason", "x"], "neither a peer id"),
        (["rollback", "L0.M0", "1", "--reason", "x"], "has its last version"),
    ],
)
def test_a_command_that_makes_no_sense_has_one_line_and_an_exit_code(folder: Path, words: list[str], why: str) -> None:
    place = 2 if words[0] == "ban" else 3 if words[0] == "rollback" else 1
    assert why in run(*words[:place], folder, *words[place:], code=2)
    assert not list((folder / "decrees" / "documents").iterdir())


def test_a_folder_without_a_run_is_left_as_it_is(tmp_path: Path) -> None:
    said = run("freeze", tmp_path / "nothing", "--reason", "x", code=2)
    assert "holds no run" in said and not (tmp_path / "nothing").exists()


def test_a_folder_in_use_is_not_written_to(folder: Path) -> None:
    with folder_lock(folder, hint=""):
        assert "in use" in run("freeze", folder, "--reason", "x", code=5)


def test_only_the_runs_own_coordinator_decrees(folder: Path) -> None:
    (folder / "identity.key").unlink()
    write(folder / "identity.key", bytes([7]) * 32)
    with pytest.raises(IntegrityError, match="not this run's coordinator's"):
        offline(folder)


def test_a_damaged_log_is_not_signed_over(folder: Path) -> None:
    run("freeze", folder, "--reason", "x")
    (folder / "decrees" / "documents" / "decree-00000001.json").write_bytes(canonical_bytes({}))
    assert "decree-00000001.json was damaged" in run("unfreeze", folder, code=8)


async def test_what_the_archive_does_not_keep_cannot_be_gone_back_to(tmp_path: Path) -> None:
    """A decree that nobody could carry out would hold the module up; a ban goes back a little further instead."""
    async with in_a_run(tmp_path) as (decreeing, decrees, _):
        decreeing._thinned = lambda module: Thinned(contributions=2, versions=2)
        with pytest.raises(ConfigError, match=f"version 1 of {MODULE} is not kept") as caught:
            decreeing.issue(Request(ask="rollback", module=str(MODULE), version=1, reason="x"), at_s=1.0)
        assert caught.value.hint == "the newest before it that the archive keeps is 0" and not decrees.log
        row = decreeing.issue(Request(ask="rollback", module=str(MODULE), version=0, reason="x"), at_s=1.0)
        assert row["to"] == 0
