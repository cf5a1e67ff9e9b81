"""A grid grows in a live run of real processes, twice, and a volunteer is killed in the middle of each change."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_harness import Program, Programs, eventually, refused, write_corpus, write_run

from dipaco_p2p.use.folder import RunFolder

pytestmark = pytest.mark.libp2p
ROUNDS = 10


def deep_run(path: Path, corpus: Path) -> Path:
    """As `write_run`, with a third level: 1x2x2."""
    text = write_run(path, corpus, rounds=ROUNDS, min_paths=1, warmup_rounds=1).read_text()
    level = "[[model.levels]]\nmodules = 2\nblocks = 1\n"
    path.write_text(text.replace(level, 2 * level))
    return path


def newest(coordinator: Program, stage: str) -> int:
    """The version that all modules of a stage have; 0 before it is open."""
    reached: dict[str, int] = {}
    for event in coordinator.events("archived", stage=stage):
        reached[event["module"]] = event["version"]
    run = RunFolder(coordinator.home, is_read_only=True).open(stage) if reached else None
    return min(reached.values()) if run is not None and len(reached) == len(run.topology.modules()) else 0


def wait_for(coordinator: Program, stage: str, version: int) -> None:
    def complaint() -> str:
        return f"{stage}: {coordinator.said[-600:]} {coordinator.complaint[-1500:]}"

    eventually(lambda: newest(coordinator, stage) >= version, within_s=400, what=complaint)


@pytest.mark.timeout(580)
def test_a_run_grows_to_more_paths_and_modules_without_a_restart_and_all_chains_verify(
    programs: Programs, corpus: Path
) -> None:
    folder = programs.folder / "coordinator"
    coordinator = programs.coordinator(deep_run(programs.folder / "deep.toml", corpus), folder)
    address = coordinator.wait_address()["address"]
    first, second, third = (programs.volunteer(address, name) for name in ("first", "second", "third"))
    wait_for(coordinator, "grid", 1)
    grown = programs.run("dipaco-bootstrap", "grow", folder, "--levels", "1,2,4", "--reason", "more volunteers")
    assert grown.wait() == 0 and "decree 1: grow to 1x2x4 after round " in grown.said, grown.said + grown.complaint
    refused(programs.run("dipaco-bootstrap", "grow", folder, "--levels", "1,4,4"), 2, "decreed already")
    status = programs.run("dipaco-bootstrap", "status", folder)
    assert "then the grid grows to 1x2x4" in status.said or "grid-2" in status.said, status.said
    first.kill()
    wait_for(coordinator, "grid-2", 1)
    assert "has grown: 1x2x4 modules, 8 paths" in coordinator.said
    fourth = programs.volunteer(address, "fourth")
    more = ("dipaco-bootstrap", "grow", folder, "--levels", "1x4x4", "--corpus")
    refused(programs.run(*more, programs.folder / "missing.jsonl"), 2, "missing.jsonl` does not exist")
    text = write_corpus(programs.folder / "more.jsonl", documents=120, words=230)
    text.write_text(text.read_text().replace("a", "y").replace("o", "w"))
    grown = programs.run(*more, text)
    assert grown.wait() == 0 and " sequences for 8 new paths, " in grown.said, grown.said + grown.complaint
    text.unlink()
    second.kill()
    last = "the run is complete: "
    eventually(lambda: last in coordinator.said, within_s=400, what=lambda: coordinator.said + coordinator.complaint)
    assert (third.wait(), fourth.wait()) == (0, 0), third.complaint + fourth.complaint
    for stage in ("warmup", "grid", "grid-2", "grid-3"):
        assert [event["complete"] for event in third.events("left", stage=stage)] == [True], "it never restarted"
    assert coordinator.end() == 0, coordinator.complaint
    assert "the text that is held out has grown with the run" in coordinator.said
    stages = RunFolder(folder).stages()
    assert [str(run.topology) for run in stages] == ["1x1x1", "1x2x2", "1x2x4", "1x4x4"]
    assert sum(run.rounds for run in stages[1:]) == ROUNDS
    verified = programs.run("dipaco-bootstrap", "verify", folder, timeout_s=150)
    chains = sum(len(run.topology.modules()) for run in stages)
    assert verified.wait() == 0 and verified.said.count("to the bit") == chains, verified.said + verified.complaint
