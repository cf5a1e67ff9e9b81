"""Curves of a whole run, read from the files: of its coordinator and of a volunteer, over both stages and a restart."""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from stages_harness import Home, play_whole, run_file
from typer.testing import CliRunner
from virtual_time import eventually

from bootstrap.cli import app
from bootstrap.runfile import load_run_file, template
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.program.curves import Curves, open_curves
from dipaco_p2p.use.best_rounds import read_evaluations


class Kept:
    """Curves in CSV files, one for each program."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: list[Curves] = []

    def open(self, name: str) -> Curves:
        self._opened.append(open_curves([f"csv:{self._folder / name}.csv"], folder=self._folder))
        return self._opened[-1]

    def read(self, name: str) -> dict[str, dict[int, float]]:
        """The curves by stage and name, each by round."""
        for curves in self._opened:
            curves.close()
        found: dict[str, dict[int, float]] = defaultdict(dict)
        with (self._folder / f"{name}.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                found[f"{row['stage']}/{row['name']}"][int(row["round"])] = float(row["value"])
        return dict(found)


def test_a_run_leaves_the_curves_of_its_coordinator_and_of_each_volunteer(tmp_path: Path, corpus: Path) -> None:
    kept = Kept(tmp_path)
    home = Home(tmp_path, run_file(corpus), curves=kept.open)
    play_whole(home)
    found = kept.read("coordinator")
    for stage in ("warmup", "grid"):
        rows = read_evaluations(home.folder / stage / "evaluations.jsonl")
        assert found[f"{stage}/validation_perplexity"] == {row["version"]: row["perplexity"] for row in rows}
        for path in rows[0]["paths"]:
            losses = {row["version"]: row["paths"][path]["loss"] for row in rows}
            told = {number: loss for number, loss in losses.items() if loss is not None}
            assert found.get(f"{stage}/validation_loss/{path}", {}) == told
    assert found["grid/volunteers_alive"] == {1: 2.0, 2: 2.0, 3: 2.0} == found["grid/paths_covered"]
    one, two = kept.read("volunteer-1"), kept.read("volunteer-2")
    losses = {name: curve for name, curve in (*one.items(), *two.items()) if name.startswith("grid/loss/")}
    assert set(losses) == {"grid/loss/P0-0", "grid/loss/P0-1"} and all(curve[0] > 0 for curve in losses.values())
    assert set(one) - set(losses) <= {
        *("warmup/loss/P0-0", "warmup/receipts", "warmup/round_s", "warmup/tokens_per_s"),
        *("grid/receipts", "grid/round_s", "grid/tokens_per_s"),
        *(f"{stage}/{name}" for stage in ("warmup", "grid") for name in ("captured", "owed")),
    }
    assert max(one["grid/receipts"].values()) == 2, "one of each module of a path"


async def test_a_coordinator_that_died_goes_on_with_its_curves(tmp_path: Path, corpus: Path) -> None:
    kept = Kept(tmp_path)
    home = Home(tmp_path, run_file(corpus), curves=kept.open)
    home.start()
    await home.join(1, 2)
    await eventually(lambda: home.heads("grid") and min(home.heads("grid").values()) >= 1)
    await home.die()
    home.start()
    await home.volunteers_done()
    await eventually(home.is_over)
    await home.close()
    found = kept.read("coordinator")
    assert sorted(found["grid/validation_loss"]) == [0, 1, 2, 3]
    assert (tmp_path / "coordinator.csv").read_text().count("time,stage") == 1


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [("mlflow:x", 2, ("`mlflow:x`", "csv:FILE")), ("wandb", 5, ("`wandb`", "dipaco-p2p[wandb]"))],
)
def test_start_refuses_a_place_for_curves_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int, words: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]  # what Python itself takes for missing
    (tmp_path / "run.toml").write_text(template("tiny"))
    command = ["start", str(tmp_path / "run.toml"), "--dir", str(tmp_path / "run"), "--log", text]
    done = CliRunner().invoke(app, command)
    [error, hint] = done.stderr.splitlines()
    assert done.exit_code == code and all(word in error + hint for word in words), done.stderr
    assert not (tmp_path / "run").exists()


def test_the_run_file_says_where_curves_go(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(template("tiny").replace("log = []", 'log = ["csv:curves.csv", "wandb"]'))
    assert load_run_file(path).node.log == ("csv:curves.csv", "wandb")
    path.write_text(template("tiny").replace("log = []", 'log = ["mlflow"]'))
    with pytest.raises(ConfigError, match=r"run.toml: `mlflow` is not a place for curves"):
        load_run_file(path)
