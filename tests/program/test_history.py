"""The history: one line per event, readable after a crash, bounded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from dipaco_p2p.clock import ManualClock
from dipaco_p2p.program import history
from dipaco_p2p.program.history import History, read_history


def test_events_are_told_and_can_be_read_again(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    kept = History(tmp_path / "history.jsonl", ManualClock(5.0))
    kept.listen(told.append)
    kept.add("claimed", path="P0-1", round=3)
    assert told == [{"ev": "claimed", "t": 5.0, "path": "P0-1", "round": 3}]
    assert list(read_history(tmp_path / "history.jsonl")) == told


def test_a_history_without_a_file_only_tells() -> None:
    told: list[dict[str, Any]] = []
    kept = History(None, ManualClock())
    kept.listen(told.append)
    kept.add("left")
    assert [event["ev"] for event in told] == ["left"]


def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    kept = History(path, ManualClock())
    kept.add("one")
    with path.open("a") as file:
        file.write('{"ev":"tw')
    assert [event["ev"] for event in read_history(path)] == ["one"]


def test_what_follows_a_cut_line_is_not_lost_with_it(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    History(path, ManualClock()).add("one")
    with path.open("a") as file:
        file.write('{"ev":"tw')
    History(path, ManualClock()).add("three")
    assert [event["ev"] for event in read_history(path)] == ["one", "three"]


def test_a_long_history_is_rotated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "HISTORY_BYTES_MAX", 200)
    kept = History(tmp_path / "history.jsonl", ManualClock())
    for number in range(30):
        kept.add("step", number=number)
    found = [event["number"] for event in read_history(tmp_path / "history.jsonl")]
    assert found == list(range(found[0], 30)) and 5 <= len(found) < 20
    assert len(list(tmp_path.iterdir())) == 2


def test_no_history_yet_is_an_empty_one(tmp_path: Path) -> None:
    assert list(read_history(tmp_path / "history.jsonl")) == []


def test_a_lost_folder_loses_events_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "peer"
    folder.mkdir()
    heard: list[str] = []
    history = History(folder / "history.jsonl", ManualClock())
    history.listen(lambda event: heard.append(event["ev"]))
    history.add("before")
    shutil.rmtree(folder)
    history.add("after")
    assert heard == ["before", "after"]
