"""A run that an older version of these programs started, of another protocol: refused by name, and left as it is.

`archived_run.tar.gz` was written by the code of commit 563a792 (protocol 7), with `Home` of stages_harness.py: two
volunteers took the run of `run.toml` through its warm-up and two of its four rounds, then the coordinator was killed.
It holds the coordinator's folder, the home of one of the volunteers, the run file and the corpus.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from stages_harness import Home
from typer.testing import CliRunner

from bootstrap.cli import app
from bootstrap.runfile import load_run_file
from dipaco_p2p.errors import WrongRun

ARCHIVE = Path(__file__).with_name("archived_run.tar.gz")


@pytest.fixture
def archived(tmp_path: Path) -> Home:
    with tarfile.open(ARCHIVE) as tar:
        tar.extractall(tmp_path, filter="data")
    return Home(tmp_path, load_run_file(tmp_path / "run.toml"))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


def test_an_older_run_is_not_verified_by_the_rules_of_today(archived: Home) -> None:
    before = contents(archived.folder)
    done = CliRunner().invoke(app, ["verify", str(archived.folder)], env={"COLUMNS": "120"})
    assert done.exit_code == WrongRun.exit_code
    assert "the run speaks protocol 7" in done.output and "it is older; install the version" in done.output
    assert contents(archived.folder) == before


async def test_an_older_run_is_not_served(archived: Home) -> None:
    before = contents(archived.folder)
    with pytest.raises(WrongRun, match="protocol 7"):
        archived.start()
    assert contents(archived.folder) == before
