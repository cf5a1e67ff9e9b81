"""Rounds of these tests take time, as those of volunteers do; several look at what a run that is over has left."""

from __future__ import annotations

from pathlib import Path

import pytest
from pace import corpus, rounds_take_time
from runtime_harness import finished_run

from dipaco_p2p.node.run import Run

__all__ = ["corpus", "rounds_take_time"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A run that is complete, and the folder of its archive."""
    folder = tmp_path_factory.mktemp("finished")
    return finished_run(folder), folder / "seed"
