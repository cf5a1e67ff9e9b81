"""The benchmark of `dipaco-peer serve` measures what it says, on a run that takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from serving_harness import make_served
from typer.testing import CliRunner

from benchmarks.report import run_benchmark
from benchmarks.serve import main


@pytest.mark.slow
@pytest.mark.libp2p
def test_streams_and_the_same_path_elsewhere_are_measured(tmp_path: Path) -> None:
    served, figures = make_served(tmp_path / "run"), tmp_path / "figures.json"
    app = typer.Typer()
    app.command()(main)
    wish = ["--tokens", "6", "--turns", "2", "--streams", "3", "--json", str(figures)]
    result = CliRunner().invoke(app, [str(served.root), *wish], catch_exceptions=False)
    found = json.loads(figures.read_text())
    assert result.exit_code == 0 and "3 streams" in result.output
    assert (found["errors"], len(found["first_token_s"]), len(found["together_first_s"])) == (0, 8, 3)
    for name in ("served", "transformers", "plain"):
        assert len(found[name]) == 2 and min(found[name]) > 0


def test_a_folder_without_a_run_is_one_line_and_a_hint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks.serve", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        run_benchmark(main)
    assert end.value.code == 2 and capfd.readouterr().err.startswith(f"error: `{tmp_path}` holds no run\nhint: ")
