"""Curves: what each writer leaves, what a restart adds, and that no writer that fails is more than a line."""

from __future__ import annotations

import csv
import errno
import importlib.machinery
import logging
import os
import struct
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from dipaco_p2p.clock import ManualClock
from dipaco_p2p.errors import ConfigError, DipacoError, EnvironmentUnfit
from dipaco_p2p.program import curves as module
from dipaco_p2p.program.curves import HEADER, LOGS_MAX, Curves, Subject, open_curves
from dipaco_p2p.program.history import History

REPO = Path(__file__).parents[2]
START_S = 1_800_000_000.0  # 2027-01-15T08:00:00Z
ROUND = {"path": "P0-1", "steps": 10, "is_cut": False, "tokens": 4000, "seconds": 5.0, "training_s": 4.0}
ROUND |= {"captured": 0.25, "owed": 1.5}
JUDGED = {"loss": 2.0, "perplexity": 7.5, "path_losses": {"P0": 1.0, "P1": 4.0, "P2": None}}
OF_ROUND = {"loss/P0-1": 3.25, "tokens_per_s": 1000.0, "round_s": 5.0, "captured": 0.25, "owed": 1.5, "receipts": 2}
OF_JUDGED = {
    "validation_loss": 2.0, "validation_perplexity": 7.5, "validation_loss_mean": 2.5, "validation_loss/P0": 1.0,
    "validation_loss/P1": 4.0, "volunteers_alive": 3, "paths_covered": 2,
}  # fmt: skip


class Program:
    """One start of a program whose curves go to `texts`."""

    def __init__(self, folder: Path, *texts: str, stage: str = "grid") -> None:
        self.curves = open_curves(texts, folder=folder)
        self.told: list[dict[str, Any]] = []
        self.history = History(None, ManualClock(START_S))
        self.curves.follow(self.history, Subject(run="tiny", run_id="ab" * 32, stage=stage, peer="12D3KooWabcdefgh"))
        self.history.listen(self.told.append)

    def round(self, number: int, *, loss: float | None = 3.25) -> None:
        for name in ("one", "two"):
            self.history.add("receipt", id=name)
        self.history.add("round", round=number, loss=loss, **ROUND)

    def stopped(self) -> list[tuple[str, str]]:
        """What its history says of writers that have stopped."""
        return [(event["to"], event["detail"]) for event in self.told if event["ev"] == "curves_stopped"]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def events(folder: Path) -> list[tuple[str, float, int, float]]:
    """Of all event files: the tag, the time, the step and the value, read by the form of the records alone."""
    found = []
    for path in sorted(folder.iterdir()):
        data, records = path.read_bytes(), []
        while data:
            [length] = struct.unpack("<Q", data[:8])
            records.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
        assert records[0].file_version == "brain.Event:2"
        for event in records[1:]:
            found += [(each.tag, event.wall_time, event.step, each.simple_value) for each in event.summary.value]
    return found


# -- what is written


def test_a_csv_has_a_row_for_each_figure_of_a_volunteers_round(tmp_path: Path) -> None:
    program = Program(tmp_path, f"csv:{tmp_path / 'new' / 'curves.csv'}")
    assert not (tmp_path / "new").exists(), "nothing is made before there is a round"
    program.round(7)
    program.curves.close()
    found = rows(tmp_path / "new" / "curves.csv")
    assert {row["name"]: float(row["value"]) for row in found} == OF_ROUND
    assert {(row["time"], row["stage"], row["round"]) for row in found} == {("2027-01-15T08:00:00Z", "grid", "7")}


def test_a_coordinators_curves_are_losses_coverage_and_volunteers(tmp_path: Path) -> None:
    program = Program(tmp_path, f"csv:{tmp_path / 'curves.csv'}")
    program.history.add("judged", round=1, volunteers=3, covered=2, **JUDGED)
    program.history.add("judged", round=2, volunteers=None, covered=None, **JUDGED)
    program.history.add("archived", module="L0.M0", version=2)
    program.curves.close()
    found = rows(tmp_path / "curves.csv")
    assert {row["name"]: float(row["value"]) for row in found if row["round"] == "1"} == OF_JUDGED
    unknown = {"volunteers_alive", "paths_covered"}
    assert {row["name"] for row in found if row["round"] == "2"} == set(OF_JUDGED) - unknown


def test_tensorboard_finds_each_figure_under_its_stage_at_its_round(tmp_path: Path) -> None:
    for number in (7, 8):  # a restart writes one more file
        program = Program(tmp_path, f"tensorboard:{tmp_path / 'board'}")
        program.round(number)
        program.curves.close()
        os.rename(next((tmp_path / "board").glob("events*")), tmp_path / "board" / f"kept.{number}")
    wanted = [(f"grid/{name}", START_S, number, value) for number in (7, 8) for name, value in OF_ROUND.items()]
    assert sorted(events(tmp_path / "board")) == sorted(wanted)


def test_a_loss_that_nobody_knows_is_left_out_and_one_that_is_no_number_stays(tmp_path: Path) -> None:
    program = Program(tmp_path, f"csv:{tmp_path / 'curves.csv'}")
    program.round(1, loss=None)
    program.round(2, loss=float("nan"))
    program.curves.close()
    losses = [(row["round"], row["value"]) for row in rows(tmp_path / "curves.csv") if row["name"] == "loss/P0-1"]
    assert losses == [("2", "nan")]


# -- a restart


def test_a_restart_appends_without_a_second_header(tmp_path: Path) -> None:
    for number in (1, 2):
        program = Program(tmp_path, f"csv:{tmp_path / 'curves.csv'}")
        program.round(number)
        program.curves.close()
    assert (tmp_path / "curves.csv").read_text().count(HEADER) == 1
    assert [row["round"] for row in rows(tmp_path / "curves.csv")] == ["1"] * len(OF_ROUND) + ["2"] * len(OF_ROUND)


@pytest.mark.parametrize("kept", [0, 3, len(HEADER), len(HEADER) + 1, len(HEADER) + 20, -3, -1])
def test_a_row_that_a_crash_cut_short_is_removed_by_the_next_start(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "curves.csv"
    first = Program(tmp_path, f"csv:{path}")
    first.round(1)
    first.curves.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    lines = whole[:kept].count(b"\n")
    second = Program(tmp_path, f"csv:{path}")
    second.round(2)
    second.curves.close()
    text = path.read_text().splitlines(keepends=True)
    assert text[0] == HEADER + "\n" and text[1 : -len(OF_ROUND)] == whole.decode().splitlines(keepends=True)[1:lines]
    assert [row["round"] for row in rows(path)][-len(OF_ROUND) :] == ["2"] * len(OF_ROUND)


# -- Weights & Biases, which is not installed here


class FakeRun:
    def __init__(self, log: list[Any]) -> None:
        self._log = log

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self._log.append((name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        self._log.append(values)

    def finish(self) -> None:
        self._log.append("finished")


class FakeWandb(types.ModuleType):
    """What is used of it, with what a test wants it to be like."""

    def __init__(self, *, mode: str = "online", has_key: bool = True, failure: BaseException | None = None) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.log: list[Any] = []
        self.begun: dict[str, Any] = {}
        self._mode, self._has_key, self._failure = mode, has_key, failure

    def setup(self) -> Any:
        return types.SimpleNamespace(settings=types.SimpleNamespace(mode=self._mode))

    def login(self, *, prompt: bool) -> bool:
        assert not prompt, "nobody is there to answer"
        return self._has_key

    def Settings(self, **values: Any) -> dict[str, Any]:  # noqa: N802
        return values

    def init(self, **values: Any) -> FakeRun:
        if self._failure is not None:
            raise self._failure
        self.begun = values
        return FakeRun(self.log)


def install(monkeypatch: pytest.MonkeyPatch, fake: FakeWandb) -> FakeWandb:
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_gets_one_run_for_each_peer_with_the_round_as_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = install(monkeypatch, FakeWandb())
    program = Program(tmp_path, "wandb:my-project")
    assert not fake.begun
    program.round(7)
    program.round(8)
    program.curves.close()
    [metric, first, second, end] = fake.log
    assert (metric, end) == (("grid/*", "grid/round"), "finished")
    assert first == {"grid/round": 7} | {f"grid/{name}": value for name, value in OF_ROUND.items()}
    assert second["grid/round"] == 8 and program.stopped() == []
    settings = fake.begun.pop("settings")
    assert fake.begun == {
        "project": "my-project", "id": "abababababababab-abcdefgh", "name": "tiny ...cdefgh", "resume": "allow",
        "dir": str(tmp_path),
    }  # fmt: skip
    assert settings["silent"] and settings["x_disable_meta"] and settings["x_disable_machine_info"]


def test_both_stages_are_curves_of_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, FakeWandb())
    program = Program(tmp_path, "wandb", stage="warmup")
    program.round(2)
    grid = History(None, ManualClock(START_S))
    program.curves.follow(grid, Subject(run="tiny", run_id="ab" * 32, stage="grid", peer="12D3KooWabcdefgh"))
    grid.add("round", round=1, loss=1.0, **ROUND)
    program.curves.close()
    assert fake.begun["project"] == "dipaco-p2p"
    assert [each for each in fake.log if isinstance(each, tuple)] == [
        ("warmup/*", "warmup/round"),
        ("grid/*", "grid/round"),
    ]
    assert [each.get("grid/round") for each in fake.log if isinstance(each, dict)] == [None, 1]


def test_offline_it_is_kept_for_later_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, FakeWandb(mode="offline", has_key=False))
    program = Program(tmp_path, "wandb")
    program.round(1)
    program.curves.close()
    assert fake.log[-1] == "finished"


@pytest.mark.parametrize(
    ("fake", "why"),
    [
        (FakeWandb(has_key=False), "`wandb login`"),
        (FakeWandb(failure=OSError("network is\nunreachable")), "network is unreachable"),
        (FakeWandb(failure=KeyboardInterrupt()), "KeyboardInterrupt"),
    ],
)
def test_wandb_that_cannot_begin_is_told_once_and_others_go_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fake: FakeWandb,
    why: str,
) -> None:
    install(monkeypatch, fake)
    program = Program(tmp_path, "wandb", f"csv:{tmp_path / 'curves.csv'}")
    with caplog.at_level(logging.WARNING):
        program.round(1)
        program.curves.close()
        program.round(2)
        program.round(3)
    [(to, detail)] = program.stopped()
    assert to == "wandb" and why in detail and "\n" not in detail
    assert [record.levelname for record in caplog.records] == ["WARNING"] and why in caplog.text
    assert len(rows(tmp_path / "curves.csv")) == len(OF_ROUND)


# -- writers that fail


@pytest.mark.parametrize("kind", ["csv", "tensorboard"])
def test_a_writer_that_the_disk_refuses_stops_and_training_goes_on(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    program = Program(tmp_path, f"{kind}:{tmp_path / 'lost' / 'curves'}")
    (tmp_path / "lost").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            program.round(number)
        program.curves.close()
        program.history.add("left")
    [(to, detail)] = program.stopped()
    assert to == f"{kind}:{tmp_path / 'lost' / 'curves'}" and detail
    assert len(caplog.records) == 1
    assert [event["ev"] for event in program.told].count("round") == 3


def test_a_full_disk_stops_tensorboard_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboardX import record_writer

    synced: list[int] = []

    def full_at_first(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(record_writer.os, "fsync", full_at_first)
    program = Program(tmp_path, f"tensorboard:{tmp_path / 'board'}")
    program.round(1)
    program.curves.close()
    program.history.add("left")
    assert program.stopped() == [(f"tensorboard:{tmp_path / 'board'}", "No space left on device")]


def test_a_writer_that_hangs_is_given_up_and_the_program_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "POINTS_MAX", 2)
    monkeypatch.setattr(module, "CLOSE_S", 0.01)
    never = threading.Event()
    fake = install(monkeypatch, FakeWandb())
    monkeypatch.setattr(fake, "setup", never.wait)
    slow, behind = Program(tmp_path, "wandb"), Program(tmp_path, "wandb")
    slow.round(1)
    for number in range(9):
        behind.round(number)
    assert "2 rounds wait" in behind.stopped()[0][1]
    slow.curves.close()
    behind.curves.close()
    assert "too long to end" in caplog.text
    never.set()
    for thread in threading.enumerate():
        if thread.name.startswith("curves "):
            thread.join(10)


# -- what is refused before anything happens


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tensorboard", ("`tensorboard` is not a place", "tensorboard:DIR, wandb")),
        ("tensorboard:", ("not a place", "csv:FILE")),
        ("csv", ("not a place",)),
        ("wandb:", ("not a place",)),
        ("", ("not a place",)),
        ("mlflow:x", ("`mlflow:x` is not a place",)),
        ("csv:a\nb", ("not a place",)),
        ("wandb:a/b", ("`a/b` is not the name of a project",)),
        ("csv:{folder}", ("is a folder", "csv:curves.csv")),
        ("csv:{folder}/other.csv", ("another file than one of curves", "new")),
        ("csv:{folder}/short.csv", ("another file",)),
        ("tensorboard:{folder}/other.csv", ("is not a folder",)),
    ],
)
def test_a_bad_place_is_one_line_and_a_hint(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    (tmp_path / "other.csv").write_text("name,age\nme,7\n")
    (tmp_path / "short.csv").write_text("my diary")
    with pytest.raises(ConfigError) as refused:
        open_curves([text.format(folder=tmp_path)], folder=tmp_path)
    said = f"{refused.value}\n{refused.value.hint}"
    assert all(word in said for word in words) and said.count("\n") == 1 + text.count("\n"), said
    assert (tmp_path / "other.csv").read_text() == "name,age\nme,7\n"


@pytest.mark.parametrize(("extra", "library"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_library_that_is_not_there_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)  # type: ignore[arg-type]  # what Python itself takes for missing
    text = f"{extra}:{tmp_path / 'curves'}" if extra == "tensorboard" else extra
    with pytest.raises(EnvironmentUnfit) as refused:
        open_curves([text], folder=tmp_path)
    assert f"extra `{extra}`" in str(refused.value) and f"dipaco-p2p[{extra}]" in refused.value.hint
    assert f"\n{extra} = [\n" in (REPO / "pyproject.toml").read_text()


def test_too_many_places_are_refused_and_the_same_one_counts_once(tmp_path: Path) -> None:
    with pytest.raises(DipacoError, match=f"limit {LOGS_MAX}"):
        open_curves([f"csv:{number}" for number in range(LOGS_MAX + 1)], folder=tmp_path)
    program = Program(tmp_path, *[f"csv:{tmp_path / 'curves.csv'}"] * 2)
    program.round(1)
    program.curves.close()
    assert len(rows(tmp_path / "curves.csv")) == len(OF_ROUND)


# -- without a place


def test_without_a_place_no_library_of_curves_is_imported() -> None:
    programs = "import sys, peers.joining.join, bootstrap.coordinator.seed"
    check = "found = {'tensorboardX', 'tensorboard', 'wandb'} & set(sys.modules); assert not found, found"
    done = subprocess.run(
        [sys.executable, "-c", f"{programs}\n{check}"], cwd=REPO, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr


def test_without_a_place_nothing_listens() -> None:
    history = History(None, ManualClock())
    Curves().follow(history, Subject(run="", run_id="", stage="", peer=""))
    history.add("round")  # of which no figure could be read
