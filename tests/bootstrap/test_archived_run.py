"""A run that was started by an older version of these programs opens, verifies, and goes on to its end.

`archived_run.tar.gz` was written by the code of commit 563a792, with `Home` of stages_harness.py: two volunteers took
the run of `run.toml` through its warm-up and two of its four rounds, then the coordinator was killed. It holds the
coordinator's folder, the home of one of the volunteers, the run file and the corpus. Never write it anew to make a test
pass: if such a folder cannot be opened any more, the protocol's version has to say so.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from stages_harness import Home
from tiny_run import SEED_NUMBER, signer
from typer.testing import CliRunner
from virtual_time import eventually, play

from bootstrap.cli import app
from bootstrap.folder import GRID, WARMUP
from bootstrap.runfile import load_run_file
from dipaco_p2p.swarm.identity import load_or_create

ARCHIVE = Path(__file__).with_name("archived_run.tar.gz")
MODULES = ("L0.M0", "L1.M0", "L1.M1")


@pytest.fixture
def archived(tmp_path: Path) -> Home:
    with tarfile.open(ARCHIVE) as tar:
        tar.extractall(tmp_path, filter="data")
    return Home(tmp_path, load_run_file(tmp_path / "run.toml"))


def verify(home: Home) -> str:
    done = CliRunner().invoke(app, ["verify", str(home.folder)], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    return done.output


def test_the_chains_of_an_older_run_verify(archived: Home) -> None:
    assert load_or_create(archived.folder / "identity.key").peer == signer(SEED_NUMBER).peer
    assert archived.heads(WARMUP) == {"L0.M0": 1, "L1.M0": 1}
    assert archived.heads(GRID) == dict.fromkeys(MODULES, 2)
    assert verify(archived).count("to the bit") == 5


def test_an_older_run_goes_on_with_an_old_volunteer_and_a_new_one(archived: Home) -> None:
    documents = archived.folder / GRID / "documents"
    before = {path.name: path.read_bytes() for path in documents.glob("version-*.json")}

    async def scenario() -> None:
        archived.start()
        await archived.join(1, engine="exact")  # the one whose home is in the archive
        await archived.join(3, engine="exact")
        await archived.volunteers_done()
        await eventually(archived.is_over)
        await archived.close()

    play(scenario)
    assert len(before) == 6 and all((documents / name).read_bytes() == data for name, data in before.items())
    assert archived.heads(GRID) == dict.fromkeys(MODULES, 4)
    assert verify(archived).count("to the bit") == 5
    finished = json.loads((archived.folder / GRID / "finished.json").read_text())
    assert finished["version"] == 4 and finished["routing"]["routed once"]["perplexity"] > 1
