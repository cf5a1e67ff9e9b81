"""What the commands print and how they end, with a volunteer at the other end of the socket that was made by hand."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from control_harness import answered, printed
from rich.console import Console

from dipaco_p2p.clock import ManualClock
from dipaco_p2p.program.control import show
from dipaco_p2p.program.control.client import Answered, not_running
from dipaco_p2p.protocol.decrees import Decreed
from dipaco_p2p.protocol.liveness import Heartbeat
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm import identity
from dipaco_p2p.swarm.api import SwarmStatistics
from dipaco_p2p.topology import ModuleId, PathId
from peers.cli import app
from peers.config import PeerConfig
from peers.control import commands
from peers.control.bugreport import collect
from peers.control.cli import add_commands
from peers.control.control import VOLUNTEER, Control, Request, report
from peers.preferences.keys import Limits, When
from peers.preferences.schedule import Span
from peers.status import Status

KEYS = {
    "schema", "version", "pid", "home", "running_s", "state", "pauses", "run", "run_id", "stage", "peer", "doing",
    "waits_for", "path", "round", "rounds", "rounds_after", "step", "steps", "is_cut", "loss", "tokens_per_s", "eta_s",
    "receipts", "last_receipt", "leads", "frozen", "modules", "peers_alive", "peers_training", "paths_covered", "paths",
    "bytes_up", "bytes_down", "name", "team", "name_hidden", "bytes_relayed", "reached", "peers_direct",
    "peers_relayed", "relay_slots", "relay_bytes", "keep_bytes", "kept_bytes", "kept_ranges", "keeping_proofs",
    "keys_read", "records_read", "records_put", "calls_made", "calls_served",
}  # fmt: skip
PATH = PathId.parse("P0-1")


class Watching:
    def reached(self, module: ModuleId) -> int:
        return 7 if module.level else 5

    def leader(self, module: ModuleId) -> str | None:
        return "12D3KooWleader" if module.level else None


@dataclass
class HandMadeTour:
    """Keeps `StageRunner`'s face, and what it was told."""

    status: Status
    node: Any
    pauses: dict[str, float | None] = field(default_factory=dict)
    is_stopping: bool = False
    is_finishing: bool = False

    def pause(self, reason: str, *, until_s: float | None = None) -> None:
        self.pauses[reason] = until_s

    def resume(self, reason: str) -> None:
        self.pauses.pop(reason, None)

    def finish(self) -> None:
        self.is_stopping = self.is_finishing = True

    def stop(self) -> None:
        self.is_stopping = True


def runner_at_work() -> HandMadeTour:
    status = Status(run="run:0123abcd", peer="12D3KooWAbCdEf", doing="waiting", waits_for="the next version of L0.M0")
    status.path, status.leads = PATH, [ModuleId.parse("L1.M1")]
    status.round, status.rounds, status.step, status.steps = 3, 9, 20, 40
    status.loss, status.tokens_per_s, status.eta_s = 4.25, 1234.5, 3700.0
    status.receipts, status.last_receipt = 6, "L0.M0 round 2 from ...aBcDeF"
    status.peers_alive, status.peers_training, status.paths_covered, status.paths = 4, 3, 2, 2
    run = SimpleNamespace(origin="0123abcd" * 8, manifest=SimpleNamespace(stage="grid"))
    told = SwarmStatistics(bytes_sent=1_234_567, bytes_received=89, bytes_relayed=1000, peers_direct=2, peers_relayed=1)
    swarm = SimpleNamespace(statistics=lambda: told, addresses=("/ip4/203.0.113.7/tcp/4001/p2p/R/p2p-circuit/p2p/me",))
    node = SimpleNamespace(
        run=run,
        swarm=swarm,
        watch=Watching(),
        decrees=SimpleNamespace(state=Decreed()),
        peer=status.peer,
        presence=SimpleNamespace(heartbeat=Heartbeat()),
    )
    return HandMadeTour(status, node)


@dataclass
class Running:
    home: Path
    control: Control
    runner: HandMadeTour


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """A volunteer's end of the socket, in a thread."""
    control, runner = Control(PeerConfig(home=tmp_path), ManualClock()), runner_at_work()
    control.runner = runner  # type: ignore[assignment]
    with answered(tmp_path, Request, control.answer):
        yield Running(tmp_path, control, runner)


run = partial(printed, app)


# -- status


def test_a_report_of_a_bug_has_the_settings_of_the_running_volunteer(tmp_path: Path) -> None:
    when = When(schedule=(Span.parse("mon-fri 19:00-08:00"),), only_idle=10.0)
    control = Control(PeerConfig(home=tmp_path, up_mbit=5.0, when=when, limits=Limits(cpu=0.5)), ManualClock())
    with answered(tmp_path, Request, control.answer):
        found = json.loads(collect(tmp_path)["config.json"])
    assert (found["schema"], found["home"], found["up_mbit"]) == ("dipaco.config/1", str(tmp_path), 5.0)
    assert (found["when"]["schedule"], found["when"]["only_idle"]) == (["mon-fri 19:00-08:00"], 10.0)
    assert found["limits"]["cpu"] == 0.5 and found["limits"]["gpu"] == "auto"


def test_status_as_json_has_the_same_keys_always_and_its_schema(running: Running) -> None:
    found = json.loads(run("status", "--json", "--home", running.home))
    assert found["schema"] == "dipaco.status/1" and found.keys() == KEYS
    assert found["modules"] == [
        {"module": "L0.M0", "version": 5, "leader": None},
        {"module": "L1.M1", "version": 7, "leader": "12D3KooWleader"},
    ]
    assert (found["path"], found["leads"], found["loss"]) == ("P0-1", ["L1.M1"], 4.25)
    assert (found["bytes_up"], found["bytes_down"], found["state"]) == (1_234_567, 89, "running")
    assert (found["reached"], found["bytes_relayed"], found["peers_direct"], found["peers_relayed"]) == (
        *("relay", 1000, 2, 1),
    )
    running.control.runner = None
    empty = json.loads(run("status", "--json", "--home", running.home))
    assert empty.keys() == KEYS and empty["state"] == "starting"
    assert [empty[name] for name in ("run", "run_id", "path", "loss", "eta_s", "last_receipt")] == [None] * 6


def test_status_off_a_terminal_is_plain_lines(running: Running) -> None:
    said = run("status", "--home", running.home)
    assert "\x1b" not in said and "╭" not in said
    for line in (
        "state: running",
        "doing: waiting for the next version of L0.M0",
        "path: P0-1",
        "modules: L0.M0 version 5, L1.M1 version 7",
        "leads: L1.M1",
        "round: 3 of 9, step 20 of 40",
        "loss: 4.250 nats per token",
        "last receipt: L0.M0 round 2 from ...aBcDeF",
        "reached: through a relay, or a hole in both routers; spoke with 2 peers directly, 1 through a relay",
        "line: 1.2 MB up, 89 B down since the start, 1.0 kB of it through relays",
        "time left: 1 h 01 min",
    ):
        assert line in said.splitlines(), said


def test_during_the_warm_up_the_time_left_says_what_it_rests_on(running: Running) -> None:
    running.runner.status.rounds_after = 20
    line = "time left: 1 h 01 min if the grid's rounds take as long as those of the warm-up"
    assert line in run("status", "--home", running.home).splitlines()
    running.runner.status.eta_s = None
    assert "time left: -" in run("status", "--home", running.home).splitlines()


@pytest.mark.parametrize("columns", [40, 78, 200])
@pytest.mark.parametrize("no_color", [False, True])
def test_status_on_a_terminal_is_a_panel_that_fits_it(running: Running, columns: int, no_color: bool) -> None:
    out = io.StringIO()
    found = running.control.answer(Request(ask="status"))
    color = None if no_color else "standard"
    console = Console(file=out, force_terminal=True, width=columns, no_color=no_color, color_system=color)  # type: ignore[arg-type]
    show.show(commands.SCREEN, found, console)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("╭") and max(map(len, lines)) <= columns + (0 if no_color else 40)
    assert "P0-1" in out.getvalue()
    if no_color:
        assert max(map(len, lines)) == columns - 2


def test_words_of_others_move_no_cursor(running: Running) -> None:
    running.runner.status.waits_for = "\x1b[2J\nevil"
    assert "doing: waiting for ?[2J?evil" in run("status", "--home", running.home).splitlines()


def test_status_shows_the_name_behind_the_id_and_why_others_do_not(running: Running) -> None:
    node, me = running.runner.node, PeerId(running.runner.status.peer)
    assert "peer: ...AbCdEf" in run("status", "--home", running.home).splitlines()
    node.presence.heartbeat = Heartbeat(name="[red]Ada[/red]", team="Analysts")
    assert "peer: ...AbCdEf [red]Ada[/red], team Analysts" in run("status", "--home", running.home).splitlines()
    found = json.loads(run("status", "--json", "--home", running.home))
    assert (found["name"], found["team"], found["name_hidden"]) == ("[red]Ada[/red]", "Analysts", None)
    node.decrees.state = Decreed(nameless={me: "an insult"})
    shown = run("status", "--home", running.home)
    assert "peer: ...AbCdEf (the coordinator hides its name: an insult)" in shown.splitlines() and "Ada" not in shown
    node.decrees.state = Decreed(banned={me: "noise"})
    assert "peer: ...AbCdEf" in run("status", "--home", running.home).splitlines()


def test_a_volunteer_that_was_started_before_there_were_names_is_shown_without(running: Running) -> None:
    report = running.control.answer(Request(ask="status"))
    for key in ("name", "team", "name_hidden"):
        del report[key]
    assert dict(commands.rows(report))["peer"] == "...AbCdEf"


def test_watching_ends_with_the_volunteer(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [running.control.answer(Request(ask="status"))]

    def ask(home: Path, request: Request) -> Answered:
        if not answers:
            raise not_running(home, VOLUNTEER)
        return Answered(body=answers.pop(), pid=1)

    monkeypatch.setattr(commands, "ask", ask)
    monkeypatch.setattr(show, "WATCH_PLAIN_S", 0.0)
    said = run("status", "--watch", "--json", "--home", running.home, code=3)
    assert json.loads(said.splitlines()[0])["schema"] == "dipaco.status/1" and "has ended" in said


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "running"),
        ({"pauses": {"user": None}}, "pausing"),
        ({"is_stopping": True}, "stopping"),
        ({"is_stopping": True, "is_finishing": True}, "finishing"),
    ],
)
def test_the_state_in_one_word(changes: dict[str, Any], expected: str) -> None:
    runner: Any = replace(runner_at_work(), **changes)
    assert report(runner, home=Path("x"), began_s=1.0, now_s=2.5)["state"] == expected
    if expected == "pausing":
        runner.status.doing = "paused"
        assert report(runner, home=Path("x"), began_s=1.0, now_s=2.5)["state"] == "paused"


# -- what changes something


def test_pause_resume_and_finish_reach_the_runner(running: Running) -> None:
    assert "pausing: your `pause`;" in run("pause", "--home", running.home)
    assert running.runner.pauses == {"user": None}
    assert "your `pause` until" in run("pause", "--for", "2h", "--home", running.home)
    assert running.runner.pauses == {"user": 1_000_000.0 + 7200}
    running.runner.pauses["battery"] = None
    assert "battery" in run("resume", "--home", running.home) and running.runner.pauses == {"battery": None}
    running.runner.pauses.clear()
    assert run("resume", "--home", running.home) == "running\n"
    assert "finishing: it leaves after this round" in run("finish", "--home", running.home)
    assert running.runner.is_finishing


def test_stop_waits_until_the_process_has_ended(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr("peers.control.commands.wait_end", waited.append)
    assert run("stop", "--home", running.home).splitlines()[-1] == "the volunteer has ended"
    assert running.runner.is_stopping and not running.runner.is_finishing and len(waited) == 1


@pytest.mark.parametrize("words", [("status",), ("status", "--watch"), ("pause",), ("resume",), ("finish",), ("stop",)])
def test_without_a_volunteer_each_says_so_with_code_3(tmp_path: Path, words: tuple[str, ...]) -> None:
    error, hint = run(*words, "--home", tmp_path, code=3).splitlines()
    assert error == f"error: no volunteer runs in `{tmp_path}`" and hint.startswith("hint: ")


def test_a_bad_length_is_one_line_and_code_2(tmp_path: Path) -> None:
    error, hint = run("pause", "--for", "2 weeks", "--home", tmp_path, code=2).splitlines()
    assert "`2 weeks`" in error and "90s" in hint


def test_while_it_looks_for_its_run_it_can_say_so_and_no_more(running: Running) -> None:
    running.control.runner = None
    for word in ("pause", "resume", "finish"):
        assert "still looking for its run" in run(word, "--home", running.home, code=4)


def test_a_volunteer_of_another_version_is_code_6_and_ctrl_c_130(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(home: Path, request: Request) -> Answered:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Request, "program", replace(VOLUNTEER, schema="dipaco.control/2"))
        assert "dipaco.control/2" in run("status", "--home", running.home, code=6)
    monkeypatch.setattr("peers.control.commands.ask", interrupted)
    run("status", "--home", running.home, code=130)


# -- what is on the disk


def test_identity_paths_logs_and_bugreport_end_as_documented(tmp_path: Path) -> None:
    assert "no identity" in run("identity", "show", "--home", tmp_path, code=2)
    peer = identity.write(tmp_path / "identity.key", bytes([3]) * 32).peer
    assert run("identity", "show", "--home", tmp_path).splitlines()[0] == peer
    document = json.loads(run("identity", "show", "--json", "--home", tmp_path))
    assert document.keys() == {"schema", "peer", "file", "written_s"} and document["schema"] == "dipaco.identity/1"
    copy, second = tmp_path / "my.key", tmp_path / "second"
    assert peer[-6:] in run("identity", "export", copy, "--home", tmp_path)
    assert "--force" in run("identity", "export", copy, "--home", tmp_path, code=2)
    assert peer[-6:] in run("identity", "import", copy, "--home", second)
    copy.chmod(0o644)
    assert "chmod 600" in run("identity", "import", copy, "--home", second, "--force", code=5)
    copy.chmod(0o600)
    copy.write_bytes(b"no key")
    run("identity", "import", copy, "--home", second, "--force", code=8)
    assert "left a log" in run("logs", "--home", tmp_path, code=2)
    assert str(tmp_path / "identity.key") in run("paths", "--home", tmp_path)
    assert json.loads(run("paths", "--json", "--home", tmp_path))["schema"] == "dipaco.paths/1"
    assert "peer.log" in run("bugreport", "--home", tmp_path, "--to", tmp_path / "report.tar.gz")
    assert "already exists" in run("bugreport", "--home", tmp_path, "--to", tmp_path / "report.tar.gz", code=2)


def test_logs_shows_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "0123456789abcdef" / "peer.log"
    path.parent.mkdir(parents=True)
    path.write_text("one\ntwo\nthree\n")
    assert run("logs", "-n", "2", "--home", tmp_path) == "two\nthree\n"


def commands_of(group: typer.Typer, *before: str) -> list[tuple[str, ...]]:
    own = [(*before, item.name or item.callback.__name__) for item in group.registered_commands if item.callback]
    inner = [
        commands_of(each.typer_instance, *before, str(each.name))
        for each in group.registered_groups
        if each.typer_instance
    ]
    return [*own, *(words for found in inner for words in found)]


def control_commands() -> list[tuple[str, ...]]:
    group = typer.Typer()
    add_commands(group)
    return commands_of(group)


@pytest.mark.parametrize("words", control_commands(), ids=" ".join)
def test_help_has_an_example_and_the_exit_codes(words: tuple[str, ...]) -> None:
    said = " ".join(run(*words, "--help").replace("│", " ").split())
    assert f"Example: dipaco-peer {' '.join(words)}" in said and "Exit codes: 0 done" in said
    assert "--home" in said
