"""What folders of tests share that play whole runs in memory: their pace, and a text to train on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_harness import write_corpus

from dipaco_p2p.program import tasks


@contextlib.contextmanager
def slow_rounds() -> Iterator[None]:
    """Tiny volunteers train in no time, and a run would be over before a test could do anything to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "SOON_S", 0.5)
        yield


@pytest.fixture(autouse=True, scope="module")  # runs that are played once for all tests of a file are meant, too
def rounds_take_time() -> Iterator[None]:
    with slow_rounds():
        yield


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus.jsonl")
