"""What a coordinator says of its run: the documents, key for key, and how they look, whoever is in them."""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from view_harness import SEED, SILENT, WORKER, answering, beat, run, seen_with

from bootstrap.control import commands, view
from bootstrap.control.requests import COORDINATOR, Control, Request
from bootstrap.control.view import Seen, View, list_modules, list_paths, list_peers, summary
from dipaco_p2p.clock import ManualClock
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.program.control import show
from dipaco_p2p.program.control.client import not_running

STATUS_KEYS = [
    "schema", "version", "pid", "folder", "running_s", "state", "run", "run_id", "stage", "round", "rounds",
    "round_age_s", "judged_round", "judged_loss", "judged_perplexity", "judged_texts",
    "rounds_after", "grows_to", "volunteers_alive", "volunteers_training", "seeds_alive", "tokens_per_s", "paths",
    "paths_covered",
    "bytes_up", "bytes_down", "volunteers_direct",
    "volunteers_relayed", "relay_slots", "relay_circuits", "relay_bytes", "modules", "modules_led",
    "versions_archived", "contributions_counted", "contributions_open", "disk_used_bytes", "disk_free_bytes",
]  # fmt: skip


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """For tests that change nothing of it."""
    return seen_with(tmp_path_factory.mktemp("run"), beat())


@pytest.fixture
def running(tmp_path: Path, seen: Seen) -> Iterator[Path]:
    with answering(tmp_path, seen):
        yield tmp_path


# -- the documents


def test_status_as_json_is_the_documented_document(running: Path, seen: Seen) -> None:
    found = json.loads(run("status", running, "--json"))
    assert list(found) == STATUS_KEYS
    for name in ("version", "pid", "folder", "running_s", "disk_used_bytes", "disk_free_bytes"):
        assert found.pop(name) is not None
    assert found == {
        "schema": "dipaco.coordinator.status/1",
        "state": "training",
        "run": seen.run.name,
        "run_id": seen.run.id,
        "stage": "grid",
        "round": 1,
        "rounds": 2,
        "round_age_s": 61.0,
        "judged_round": 1,
        "judged_loss": 4.5,
        "judged_perplexity": 90.017,
        "judged_texts": [],
        "rounds_after": 0,
        "grows_to": None,
        "volunteers_alive": 1,
        "volunteers_training": 1,
        "seeds_alive": 1,
        "tokens_per_s": 1234.6,
        "paths": 4,
        "paths_covered": 1,
        "bytes_up": 1_234_567,
        "bytes_down": 89,
        "volunteers_direct": 1,
        "volunteers_relayed": 0,
        "relay_slots": 0,
        "relay_circuits": 0,
        "relay_bytes": 0,
        "modules": 5,
        "modules_led": 1,
        "versions_archived": 0,
        "contributions_counted": 0,
        "contributions_open": 0,
    }


def test_peers_as_json_name_the_volunteer_before_the_seed(running: Path, seen: Seen) -> None:
    found = json.loads(run("peers", running, "--json"))
    assert (found["schema"], found["run"], found["stage"]) == ("dipaco.coordinator.peers/1", seen.run.name, "grid")
    assert (found["run_id"], found["left_out"], len(found["peers"])) == (seen.run.id, 0, 2)
    assert found["peers"][0] == {
        "peer": WORKER.peer,
        "role": "volunteer",
        "doing": "training",
        "path": "P0-0-1",
        "round": 0,
        "tokens_per_s": 1234.6,
        "heartbeat_age_s": 2.0,
        "is_reachable": True,
        "is_relayed": False,
        "leads": ["L1.M0"],
        "name": "",
        "team": "",
        "keeps": 0.0,
        "keeping_proofs": 0,
        "is_barred_keeper": False,
    }
    assert found["peers"][1]["role"] == "seed" and not found["peers"][1]["is_reachable"]


def test_paths_as_json_tell_a_claim_of_the_living_from_one_of_the_dead(running: Path) -> None:
    found = json.loads(run("paths", running, "--json"))
    assert found["schema"] == "dipaco.coordinator.paths/1" and len(found["paths"]) == 4
    [claimed] = [each for each in found["paths"] if each["claimants"]]
    assert claimed == {
        "path": "P0-0-1",
        "round": 0,
        "is_covered": True,
        "claimants": [
            {"peer": WORKER.peer, "round": 1, "since_s": 5.0, "is_alive": True},
            {"peer": SILENT.peer, "round": 0, "since_s": 6.0, "is_alive": False},
        ],
        "claimants_left_out": 0,
        "judged_loss": 4.25,
    }


def test_modules_as_json_say_who_leads_and_who_is_behind(running: Path) -> None:
    found = json.loads(run("modules", running, "--json"))
    assert found["schema"] == "dipaco.coordinator.modules/1"
    by_name = {each["module"]: each for each in found["modules"]}
    assert list(by_name) == ["L0.M0", "L1.M0", "L1.M1", "L2.M0", "L2.M1"]
    assert by_name["L1.M0"] == {
        "module": "L1.M0",
        "leader": WORKER.peer,
        "term": 1,
        "mirrors": [SILENT.peer],
        "newest": 2,
        "final": 0,
        "behind": 0,
        "leaderless_s": 0.0,
        "contributions_counted": 0,
        "paths": 2,
    }
    assert (by_name["L0.M0"]["leader"], by_name["L0.M0"]["behind"], by_name["L0.M0"]["leaderless_s"]) == (None, 2, 2.0)


def test_before_a_stage_is_open_all_is_answered_with_the_same_keys(tmp_path: Path) -> None:
    shown, control = View(tmp_path, ManualClock()), Control()
    shown.add_verbs(control)
    found = asyncio.run(shown.status())
    assert list(found) == STATUS_KEYS and found["state"] == "preparing" and found["round"] is None
    for what in ("peers", "paths", "modules"):
        answer: Any = control.answer(Request(ask=what))
        assert (answer[what], answer["left_out"], answer["run"]) == ([], 0, None)
    assert "dipaco_coordinator_info" in asyncio.run(shown.metrics())


def test_the_state_in_one_word(tmp_path: Path) -> None:
    seen = seen_with(tmp_path, beat())
    assert summary(seen)["state"] == "training"
    assert summary(replace(seen, round=2))["state"] == "complete"
    assert summary(replace(seen, is_catching_up=True))["state"] == "catching-up"
    seen.decrees.issue(SEED, "freeze", at_s=0.0, reason="a bug")
    assert summary(seen)["state"] == "frozen"
    seen.decrees.issue(SEED, "unfreeze", at_s=0.0, reason="")
    seen.watch.heartbeats.clear()
    assert summary(seen)["state"] == "waiting" and summary(seen)["paths_covered"] == 0


def test_lists_are_bounded_and_say_what_they_leave_out(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "PEERS_SHOWN_MAX", 1)
    monkeypatch.setattr(view, "CLAIMANTS_SHOWN_MAX", 1)
    peers, [claimed] = list_peers(seen), [each for each in list_paths(seen)["paths"] if each["claimants"]]
    assert [each["peer"] for each in peers["peers"]] == [WORKER.peer] and peers["left_out"] == 1
    assert len(claimed["claimants"]) == 1 and claimed["claimants_left_out"] == 1


def test_of_a_round_that_was_judged_on_several_texts_each_is_told_apart(seen: Seen) -> None:
    of_texts = [{"loss": 4.0, "perplexity": 54.6, "tokens": 9}, {"loss": 5.0, "perplexity": 148.4, "tokens": 9}]
    judged = {"version": 1, "loss": 4.5, "perplexity": 90.017, "paths": {}, "texts": of_texts}
    told = summary(replace(seen, judged=judged))
    assert told["judged_texts"] == [54.6, 148.4]
    assert commands._judged(told) == "90.0 after round 1; the first text 54.6, that of growths 148.4"


def test_figures_that_no_machine_reaches_stay_numbers(tmp_path: Path) -> None:
    seen = seen_with(tmp_path, beat(tokens_per_s=1e308))
    bad = replace(seen, judged={"version": 1, "loss": float("nan"), "perplexity": float("inf"), "paths": {}})
    found = summary(bad)
    assert (found["tokens_per_s"], found["judged_loss"], found["judged_perplexity"]) == (1e12, None, None)
    json.dumps([found, list_peers(bad), list_paths(bad), list_modules(bad)], allow_nan=False)


# -- how they look


def test_status_off_a_terminal_is_plain_lines(running: Path, seen: Seen) -> None:
    said = run("status", running)
    assert "\x1b" not in said and "╭" not in said
    for line in (
        "state: training",
        f"run: {seen.run.name}, grid",
        "round: 1 of 2, for 1 min 01 s",
        "perplexity: 90.0 after round 1",
        "volunteers: 1 alive, 1 training",
        "paths: 1 of 4 have a volunteer",
        "modules: 1 of 5 have a leader",
        "speed: 1,235 tokens/s",
        "line: 1.2 MB up, 89 B down since the start",
        f"folder: {running}",
    ):
        assert line in said.splitlines(), said


def test_lists_off_a_terminal_are_columns_that_only_spaces_keep_apart(running: Path) -> None:
    head, first, _ = run("peers", running).splitlines()
    assert head.split() == [
        "peer",
        "role",
        "path",
        "round",
        "doing",
        "tokens/s",
        "heard",
        "reachable",
        "leads",
        "keeps",
        "name",
    ]
    assert first.split() == [
        f"...{WORKER.peer[-6:]}", "volunteer", "P0-0-1", "0", "training", "1,235", "2", "s", "yes", "L1.M0", "-", "-",
    ]  # fmt: skip
    assert head.index("doing") == first.index("training")
    paths = run("paths", running)
    assert f"...{WORKER.peer[-6:]}, ...{SILENT.peer[-6:]} (silent)" in paths and "NO" in paths and "4.2500" in paths
    modules = run("modules", running)
    assert "none for 2 s" in modules and f"...{SILENT.peer[-6:]}" in modules
    assert not any(letter in paths + modules for letter in "\x1b│╭")


@pytest.mark.parametrize("columns", [40, 78, 200])
@pytest.mark.parametrize("no_color", [False, True])
def test_on_a_terminal_all_of_it_fits(seen: Seen, tmp_path: Path, columns: int, no_color: bool) -> None:
    out = io.StringIO()
    color: Any = None if no_color else "standard"
    console = Console(file=out, force_terminal=True, width=columns, no_color=no_color, color_system=color)
    shown = View(tmp_path, ManualClock())
    shown.stage = lambda: seen
    show.show(commands.SCREEN, asyncio.run(shown.status()), console)
    assert out.getvalue().startswith("╭")
    for rows, drawn in ((list_peers(seen)["peers"], commands.PEERS), (list_modules(seen)["modules"], commands.MODULES)):
        show.show_list(rows, drawn, console, left_out=0)
    lines = out.getvalue().splitlines()
    if no_color:  # a table where there is room, else names and values below one another, with whole words
        assert any(line.split() == ["tokens/s", "1,235"] for line in lines) is (columns < 200)
        assert any("none for 2 s" in line for line in lines)
        assert "\x1b" not in out.getvalue() and max(map(len, lines)) <= columns
        assert len(lines[0]) == columns - 2


def test_a_name_stands_behind_the_id_and_a_decree_takes_it_away(tmp_path: Path) -> None:
    seen = seen_with(tmp_path, beat(name="[bold]Ada", team="Analysts"))
    with answering(tmp_path, seen):
        _, first, second = run("peers", tmp_path).splitlines()
        assert first.startswith(f"...{WORKER.peer[-6:]} ") and first.endswith(
            "  L1.M0  -      [bold]Ada, team Analysts"
        )
        assert second.startswith(f"...{SEED.peer[-6:]} ") and second.endswith(" -")
        seen.decrees.issue(SEED, "hide-name", at_s=0.0, peer=WORKER.peer, reason="an insult")
        [row, _] = json.loads(run("peers", tmp_path, "--json"))["peers"]
        assert (row["peer"], row["name"], row["team"]) == (WORKER.peer, "", "")
        assert "Ada" not in run("peers", tmp_path)
        seen.decrees.issue(SEED, "show-name", at_s=0.0, peer=WORKER.peer, reason="")
        assert "Ada" in run("peers", tmp_path)


@pytest.mark.parametrize("name", ["\x1b]0;evil\x07", "\u202egnp.exe", "x" * 100, "\u0301\u0301", "...abcdef", "a\nb"])
@pytest.mark.parametrize("columns", [40, 200])
def test_a_hostile_name_is_none_on_a_terminal(tmp_path: Path, name: str, columns: int) -> None:
    rows = list_peers(seen_with(tmp_path, beat(name=name, team="[link=evil]x[/link]")))["peers"]
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=columns, color_system=None)
    show.show_list(rows, commands.PEERS, console, left_out=0)
    said = out.getvalue()
    assert all(letter.isprintable() or letter == "\n" for letter in said), said
    assert f"...{WORKER.peer[-6:]}" in said and "team [link=evil]x[/link]" in " ".join(said.split())
    assert name.strip() not in said


HOSTILE = "\x1b[2J\x9b2J\u202eevil\n"


def test_words_of_others_move_no_cursor(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    row = {**list_peers(seen)["peers"][0], "doing": HOSTILE, "peer": "x" * 8 + HOSTILE, "leads": [HOSTILE]}
    row |= {"name": HOSTILE, "team": HOSTILE}
    claim = {"peer": HOSTILE, "round": 0, "since_s": 0.0, "is_alive": False}
    path = {**list_paths(seen)["paths"][0], "claimants": [claim]}
    module = {**list_modules(seen)["modules"][0], "leader": HOSTILE, "mirrors": [HOSTILE]}
    for rows, columns in (([row], commands.PEERS), ([path], commands.PATHS), ([module], commands.MODULES)):
        for is_terminal in (False, True):
            out = io.StringIO()
            show.show_list(
                rows, columns, Console(file=out, force_terminal=is_terminal, width=60, color_system=None), left_out=0
            )
            said = out.getvalue() + capsys.readouterr().out
            assert said and all(letter.isprintable() or letter == "\n" for letter in said), said
    commands.print_json({"doing": HOSTILE})
    said = capsys.readouterr().out
    assert said.isascii() and "\x1b" not in said and json.loads(said) == {"doing": HOSTILE}


# -- whom it asks, and how it ends


@pytest.mark.parametrize(
    "words", [("status",), ("status", "--watch"), ("peers",), ("paths", "--json"), ("modules",)], ids=" ".join
)
def test_without_a_coordinator_each_says_so_with_code_3(tmp_path: Path, words: tuple[str, ...]) -> None:
    error, hint = run(words[0], tmp_path, *words[1:], code=3).splitlines()
    assert error == f"error: no coordinator runs in `{tmp_path}`" and "dipaco-bootstrap start" in hint


@pytest.fixture
def nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user that has no runs, in an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path


def test_the_folder_is_named_by_a_run_file_or_by_standing_in_it(
    running: Path, nobodys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = nobodys / "run.toml"
    file.write_text(f'[node]\ndirectory = "{running}"\n')
    assert "state: training" in run("status", file)
    run("status", code=3)
    monkeypatch.chdir(running)
    assert "state: training" in run("status")
    file.write_text("[nod]\n")
    assert "node" in run("status", file, code=2)


def test_the_only_coordinator_of_a_user_needs_no_name_and_two_do(
    nobodys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "dipaco-bootstrap start" in run("peers", code=3)
    folder = commands.runs_folder()
    found = {folder / "one": folder / "one" / "control.sock"}
    (folder / "one").mkdir(parents=True)
    (folder / "two").mkdir()
    monkeypatch.setattr(commands, "find_socket", found.get)
    assert commands.chosen_folder(None) == folder / "one"
    found[folder / "two"] = folder / "two" / "control.sock"
    assert "2 coordinators" in run("peers", code=2)


def test_a_coordinator_of_another_version_is_code_6_and_ctrl_c_130(
    running: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*words: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Request, "program", replace(COORDINATOR, schema="dipaco.coordinator/2"))
        assert "dipaco.coordinator/2" in run("status", running, code=6)
    monkeypatch.setattr(commands, "ask", interrupted)
    run("status", running, code=130)


def test_watching_ends_with_the_coordinator(running: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = commands.asked(running, "status")
    answers: list[Callable[[], dict[str, Any]]] = [lambda: first, _gone]
    monkeypatch.setattr(commands, "asked", lambda folder, what: answers.pop(0)())
    monkeypatch.setattr(show, "WATCH_PLAIN_S", 0.0)
    said = run("status", running, "--watch", "--json", code=3)
    assert json.loads(said.splitlines()[0])["pid"] == os.getpid() and "has ended" in said and "seed.log" in said


def _gone() -> dict[str, Any]:
    error: DipacoError = not_running(Path("x"), COORDINATOR)
    raise error
