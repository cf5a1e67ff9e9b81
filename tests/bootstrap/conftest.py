"""Rounds of these tests take time, as those of volunteers do; several look at what a run that is over has left."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_harness import write_corpus
from pace import corpus, rounds_take_time, slow_rounds
from runtime_harness import finished_run
from stages_harness import Home, play_whole, run_file
from tiny_run import SEED_NUMBER

from dipaco_p2p.node.run import Run
from dipaco_p2p.swarm.identity import write as write_key

__all__ = ["corpus", "rounds_take_time"]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """The folder of a run of two volunteers, from its corpus to its end, with the coordinator's key."""
    folder = tmp_path_factory.mktemp("made")
    home = Home(folder, run_file(write_corpus(folder / "corpus.jsonl")))
    with slow_rounds():
        play_whole(home)
    write_key(home.folder / "identity.key", bytes([SEED_NUMBER]) * 32)
    return home


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A run that is complete, and the folder of its archive."""
    folder = tmp_path_factory.mktemp("finished")
    with slow_rounds():
        return finished_run(folder), folder / "seed"
