from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, os.path.dirname(__file__))
from e2e_harness import Program, Programs, copy_prepared, programs_in, write_corpus, write_run


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl")


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    """Starts programs; all are ended with the test."""
    with programs_in(tmp_path / "programs") as started:
        yield started


@pytest.fixture(scope="session")
def session_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    started = Programs(tmp_path_factory.mktemp("session"))
    yield started
    started.end_all()


@pytest.fixture(scope="session")
def short_run(session_programs: Programs, corpus: Path) -> tuple[Path, Path]:
    """A run file of one warm-up round and four that begin when both paths are claimed, and a folder with its start."""
    folder = session_programs.folder
    run_file = write_run(folder / "short.toml", corpus, rounds=4, min_paths=2, warmup_rounds=1)
    coordinator = session_programs.coordinator(run_file, folder / "short")
    coordinator.wait_address()
    assert coordinator.end() == 0
    return run_file, copy_prepared(folder / "short", folder / "short-prepared")


@pytest.fixture(scope="session")
def endless(session_programs: Programs, corpus: Path) -> Iterator[Program]:
    """A coordinator whose run begins with the first volunteer and never ends; tests share it one after another."""
    folder = session_programs.folder
    run_file = write_run(folder / "endless.toml", corpus, rounds=100_000, min_paths=1)
    coordinator = session_programs.coordinator(run_file, folder / "endless")
    coordinator.wait_address()
    copy_prepared(folder / "endless", folder / "endless-prepared")
    yield coordinator
    assert coordinator.end() == 0, coordinator.complaint


@pytest.fixture(scope="session")
def endless_prepared(endless: Program) -> tuple[Path, Path]:
    """The run file of `endless`, and a copy of its folder from before anybody joined."""
    return endless.home.parent / "endless.toml", endless.home.parent / "endless-prepared"
