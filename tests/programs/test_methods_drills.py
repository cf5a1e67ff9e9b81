"""Claims about who does the work: the drills find the same digests, and would find others."""

from __future__ import annotations

from pathlib import Path

import pytest
from methods_harness import made_up_shards, on_step, start, tiny_job

from benchmarks.methods.drills import Setting, _with_a_kill, by_workers, played, restart, rotation
from benchmarks.methods.grid import Grid
from benchmarks.methods.volunteers import VolunteerProcess
from dipaco_p2p.core.codec import encode_module
from dipaco_p2p.core.layout import module_layout
from dipaco_p2p.errors import DipacoError, IntegrityError
from dipaco_p2p.protocol.documents import BlobRef

JOB = tiny_job(steps=4, round_steps=2)


def test_the_drills_rounds_are_those_of_the_experiment() -> None:
    grid = Grid(JOB, start(), made_up_shards(JOB), fast=False)
    for number in range(JOB.rounds):
        grid.round(number, on_step)
    found = played(JOB, start(), made_up_shards(JOB), by_workers(4))
    for module, state in grid.states.items():
        snapshot = encode_module(state.params, module_layout(JOB.model, module.level))
        assert found[module][0] == BlobRef.of(snapshot).digest, module


def test_fewer_workers_give_the_same_digests_and_not_without_the_states() -> None:
    found = rotation(JOB, start(), made_up_shards(JOB))
    modules = len(JOB.model.topology.modules())
    assert (found["modules"], found["same"], found["same_without_state"]) == (modules, modules, 0)
    assert found["workers"] == [4, 2] and found["busiest_steps"] == [4, 8]


@pytest.mark.parametrize("workers", [1, 3])
def test_whatever_their_number(workers: int) -> None:
    shards = made_up_shards(JOB)
    assert played(JOB, start(), shards, by_workers(workers)) == played(JOB, start(), shards, by_workers(4))


def test_a_killed_worker_gives_the_same_digests_and_not_without_its_disk() -> None:
    found = restart(JOB, start(), made_up_shards(JOB))
    modules = len(JOB.model.topology.modules())
    assert (found["kills"], found["killed_after"], found["modules"], found["same"]) == (1, 1, modules, modules)
    # Modules that the killed worker's path has no part in are the same either way.
    assert found["same_without_state"] == modules - len(JOB.model.levels)


def test_a_process_that_ends_by_itself_is_an_error(tmp_path: Path) -> None:
    setting = Setting(JOB, start(), made_up_shards(JOB), tmp_path)
    with setting.stack:
        _with_a_kill(setting, 0, cut=1, has_state=True)
        assert isinstance(setting.process, VolunteerProcess)
        setting.process._process.terminate()
        with pytest.raises(DipacoError, match="exit status -15"):
            setting.process._said("done")


def test_a_state_that_nobody_has_is_an_error(tmp_path: Path) -> None:
    setting = Setting(JOB, start(), made_up_shards(JOB), tmp_path)
    play = by_workers(4)
    setting.step(play(setting, 0))
    for volunteer in setting.volunteers:
        for ref in setting.states.values():
            volunteer.home.drop(ref.digest)
    with pytest.raises(IntegrityError, match="nobody has the blob"):
        by_workers(2)(setting, 1)
