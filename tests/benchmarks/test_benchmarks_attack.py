"""The benchmark of attacks: which games it plays, and what it reads off a run that a stranger took part in."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer

from benchmarks.attack.__main__ import Figures, _is_kept, _table, games
from benchmarks.attack.honest import KINDS, checking
from benchmarks.attack.other_text import Pair
from benchmarks.attack.strangers import ATTACKS
from benchmarks.attack.twins import Game, Left, honest_refused, longest_gap_s
from benchmarks.attack.volunteers import noise
from benchmarks.report import COLUMNS
from benchmarks.swarm_faults.churn import write_run_file
from benchmarks.swarm_faults.swarm import LocalSwarm
from bootstrap.runfile import load_run_file


def left(**changes: object) -> Left:
    known = {"folder": Path(), "seconds": 30.0, "versions": 6, "gap_s": 7.0, "counted": {}, "signed": 0, "heard": {}}
    rest = {"strangers": frozenset({"x", "y"}), "weight": 0.0, "taken": 9, "refused": {}, "late": 0}
    return Left(**(known | rest | changes))  # type: ignore[arg-type]


def figures(**changes: object) -> Figures:
    known = {"game": "copy", "seed": 0, "version": 6, "perplexity": 101.0, "twin": 100.0, "seconds": 40.0}
    rest = {"twin_seconds": 32.0, "gap_s": 7.0, "twin_gap_s": 6.0, "stolen": 0.0, "signed": 0, "heard": {"norm": 3}}
    more = {"weight": 0.0, "taken": 9, "refused": {"little-gain": 1}}
    return Figures(**(known | rest | more | changes))  # type: ignore[arg-type]


def test_without_names_every_attack_is_played_and_a_leader_also_from_the_start() -> None:
    played = games([])
    assert {game.attack for game in played} == set(ATTACKS)
    assert [game.name for game in played if game.attack == "leader"] == ["leader under churn", "leader first"]
    assert games(["tiny"]) == [Game(attack="tiny")]


def test_an_attack_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(typer.BadParameter, match=r"no attack `floods`; there are .*claims-50-herd"):
        games(["tiny", "floods"])


def test_what_strangers_got_is_told_beside_the_best_honest_volunteer() -> None:
    assert left().stolen == 0
    assert left(counted={"a": 10, "b": 8}).stolen == 0
    assert left(counted={"a": 10, "b": 8, "x": 3, "y": 2}).stolen == 0.5


def test_what_leaders_refused_of_honest_work_is_counted_with_what_they_had_taken(tmp_path: Path) -> None:
    swarm = LocalSwarm(tmp_path, tmp_path / "run.toml")
    swarm.members = dict.fromkeys(("seed", "volunteer-1", "volunteer-2"))  # type: ignore[assignment]
    told = {
        "volunteer-1/runs/a": [{"ev": "receipt", "id": "a"}, {"ev": "expired", "id": "x", "reason": "harmful"}],
        "volunteer-2/runs/a": [{"ev": "receipt", "id": "b"}, {"ev": "expired", "id": "a", "reason": "complete"}],
        "stranger/runs/a": [{"ev": "receipt", "id": "x"}, {"ev": "expired", "id": "b", "reason": "harmful"}],
        "seed/grid": [],
    }
    for folder, events in told.items():
        (tmp_path / folder).mkdir(parents=True)
        lines = "".join(json.dumps(event | {"t": 0.0}) + "\n" for event in events)
        (tmp_path / folder / "history.jsonl").write_text(lines)
    assert honest_refused(swarm) == (2, {"harmful": 1})


@pytest.mark.parametrize(
    ("changes", "is_kept"),
    [({}, True), ({"perplexity": 103.5}, False), ({"signed": 1}, False), ({"perplexity": float("inf")}, False)],
)
def test_a_run_is_kept_within_three_percent_and_while_nothing_of_a_stranger_is_signed(
    changes: dict[str, object], is_kept: bool
) -> None:
    assert _is_kept(figures(**changes)) == is_kept


@pytest.mark.parametrize(
    ("times", "gap_s"),
    [([20.0, 30.0, 45.0], 20.0), ([5.0, 30.0, 45.0], 25.0), ([20.0, 30.0], 70.0), ([], 100.0)],
)
def test_a_module_that_stands_still_at_first_or_to_the_end_has_a_gap(times: list[float], gap_s: float) -> None:
    """A stranger that led from the first moment on, and made nothing, had no gap at all."""
    assert longest_gap_s(times, 0.0, 100.0, rounds=3) == gap_s


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_honest_work_is_a_run_of_its_own(tmp_path: Path, name: str) -> None:
    kind, path = KINDS[name], tmp_path / "run.toml"
    settings = {"inner": {"batch": "16"}, **kind.settings}
    write_run_file(path, peers=3, seed=0, corpus="found", rounds=10, warmup=kind.warmup, settings=settings)
    config = load_run_file(path).run
    assert (config.inner.batch, config.warmup.rounds) == (16, kind.warmup)
    assert (config.rounds.overlap, config.compression.uplink, config.rounds.deadline_s) == (
        name == "overlapped",
        "top128" if name == "sparse" else "int4",
        5.0 if name == "late" else 20.0,
    )
    assert config.routing.reshard_rounds == ((3, 6) if name == "re-sharded" else ())


def test_time_of_judges_and_auditors_is_a_share_of_the_training_of_the_same_half(tmp_path: Path) -> None:
    def say(member: str, *events: dict[str, object]) -> None:
        (tmp_path / member).mkdir(parents=True)
        (tmp_path / member / "history.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))

    say(
        "volunteer-1/runs/a",
        {"ev": "round", "t": 10.0, "training_s": 2.0},
        {"ev": "audited", "t": 11.0, "seconds": 2.0},
        {"ev": "round", "t": 30.0, "training_s": 4.0},
    )
    say("seed/grid", {"ev": "appraised", "t": 12.0, "seconds": 1.0}, {"ev": "appraised", "t": 28.0, "seconds": 1.0})
    assert checking(tmp_path / "seed") == (1.5, 0.25)


def test_the_other_shard_gains_more_by_so_many_standard_errors() -> None:
    assert Pair(own=(1.0, 0.3), other=(2.0, 0.4)).excess == pytest.approx(2.0)
    assert Pair(own=(2.0, 0.0), other=(1.0, 0.5)).excess == pytest.approx(-2.0)


@pytest.mark.parametrize(("factor", "length"), [(1.0, 5.0), (3.0, 15.0)])
def test_random_work_is_as_long_as_what_the_steps_came_to(factor: float, length: float) -> None:
    old, new = np.zeros(8, dtype=np.float32), np.array([3, 4, 0, 0, 0, 0, 0, 0], dtype=np.float32)
    made = noise(factor)(old, new)
    assert float(np.linalg.norm(made)) == pytest.approx(length, rel=1e-5)
    assert abs(float(made @ new)) < 0.95 * length * 5


def test_the_table_has_a_row_for_each_attack_with_the_mean_of_its_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    found = [figures(), figures(seed=1, perplexity=103.0, version=5), figures(game="tiny", heard={})]
    Console(width=COLUMNS).print(_table(found))
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:1] in (["copy"], ["tiny"])]
    assert rows[0][:5] == ["copy", "5", "100.0", "+2.0%", "1.25"] and rows[0][-2:] == ["norm", "3"]
    assert len(rows) == 2
