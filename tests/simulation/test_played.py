"""What was played is kept, and a range that was stopped is continued."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from simulation import __main__ as command
from simulation import runner
from simulation.history import Broken
from simulation.runner import Played, Result, Wish


def result(seed: int, *broken: Broken) -> Result:
    return Result(seed=seed, broken=broken, faults=Counter(crash=1), points=Counter({"write: done": 3}), cpu_s=1.5)


def test_results_are_read_as_they_were_kept(tmp_path: Path) -> None:
    kept = [result(7), result(8, Broken(6, "it stands still"))]
    first = Played(tmp_path, Wish())
    for each in kept:
        first.add(each)
    assert Played(tmp_path, Wish()).of(range(1, 10)) == kept


def test_another_wish_or_other_code_is_another_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Played(tmp_path, Wish()).add(result(7))
    assert Played(tmp_path, Wish(peers=30)).of([7]) == []
    (tmp_path / "code" / "simulation").mkdir(parents=True)
    (tmp_path / "code" / "simulation" / "new.py").write_text("A_RULE = 1")
    monkeypatch.setattr(runner, "REPO", tmp_path / "code")
    assert Played(tmp_path, Wish()).of([7]) == []


def test_a_line_that_was_cut_short_costs_its_own_seed_alone(tmp_path: Path) -> None:
    first = Played(tmp_path, Wish())
    first.add(result(7))
    first.path.write_bytes(first.path.read_bytes() + b'{"seed": 8, "bro')
    again = Played(tmp_path, Wish())
    assert again.of([7, 8]) == [result(7)]
    again.add(result(9))
    assert Played(tmp_path, Wish()).of([7, 8, 9]) == [result(7), result(9)]


def test_a_range_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def play(seed: int, wish: Wish) -> Result:
        asked.append(seed)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return result(seed, *([Broken(6, "it stands still")] if seed == 101 else []))

    monkeypatch.setattr(runner, "play_seed", play)
    monkeypatch.setattr(runner, "end_in_good_order", lambda: None)
    words = ["--first", "100", "--seeds", "5", "--workers", "1", "--record", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        command.main(words)
    assert command.main(words) == 1
    assert asked == [100, 101, 102, 102, 103, 104]
    told = capsys.readouterr().out
    assert "2 of these 5 seeds were played before" in told
    assert "python -m simulation --seed 101 --verbose" in told and "5 seeds, 1 of them broke a promise" in told


def test_a_range_outlives_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SEEDS_A_PROCESS", 2)
    told: list[Result] = []
    found = runner.play_seeds(range(1, 8), Wish(faults=()), workers=2, on_result=told.append)
    assert [each.seed for each in found] == [1, 2, 3, 4, 5, 6, 7] == sorted(each.seed for each in told)
    assert not any(each.broken for each in found)
