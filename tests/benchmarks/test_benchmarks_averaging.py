"""The benchmark of averages measures what it says, on a module that takes no time."""

from __future__ import annotations

from pathlib import Path

from benchmarks.averaging import (
    AVERAGE,
    MODULE,
    PATHS,
    VERSION,
    Beside,
    Busy,
    Measured,
    Repeated,
    Wish,
    admitted,
    averages_table,
    beside,
    beside_table,
    busy,
    busy_table,
    fill,
    measure,
    memory_ratios,
    run_of,
)
from dipaco_p2p.core.outer.compress import INT4

WIDTH = 16
COUNTS = Wish(runs=1, round_s=1).counts


def test_what_is_averaged_is_what_a_leader_has_on_its_disk(tmp_path: Path) -> None:
    run = run_of(INT4, width=WIDTH)
    items = admitted(tmp_path, run, fill(tmp_path, run))
    assert len({item.sealed.document.path for item in items}) == PATHS == max(COUNTS)
    assert [item.norm for item in items] == [item.read().norm() for item in items]
    assert len({item.sealed.document.payload for item in items}) == PATHS


def test_each_kind_of_work_is_timed_with_its_memory(tmp_path: Path) -> None:
    run = run_of(INT4, width=WIDTH)
    payloads = fill(tmp_path, run)
    for what in (AVERAGE, VERSION):
        found = measure(tmp_path, run, payloads[:2], what, runs=2)
        assert found.values == run.layout(MODULE).size
        assert len(found.seconds) == 2 and found.peak_bytes >= 0


def test_memory_is_compared_between_the_most_and_the_fewest_contributions() -> None:
    def measured(peak_bytes: int) -> dict[str, Measured]:
        return {what: Measured(seconds=[1.0], peak_bytes=peak_bytes, values=10) for what in (AVERAGE, VERSION)}

    found = {INT4: {count: measured(count * 100) for count in COUNTS}}
    assert memory_ratios(found) == {INT4: {AVERAGE: 8.0, VERSION: 8.0}}
    assert list(averages_table(found, runs=1).columns[4].cells) == ["5.00", "10.00", "20.00", "40.00", "x8.00"]


def test_a_trainer_is_compared_with_itself_in_the_same_run(tmp_path: Path) -> None:
    run = run_of(INT4, width=WIDTH)
    found = beside(tmp_path, run, fill(tmp_path, run), Wish(steps=1, runs=2, round_s=0.01))
    assert len(found.alone) == len(found.averaging) == 2 and found.averages >= 2
    assert len(found.round_alone) == len(found.round_once) == 2


def test_ratios_are_of_the_runs_not_of_the_medians() -> None:
    alone, slowed = [10.0, 1.0, 4.0], [9.0, 0.5, 4.0]
    found = Beside(alone=alone, averaging=slowed, averages=3, round_alone=slowed, round_once=alone)
    assert list(beside_table(found, Wish(runs=3, round_s=30)).columns[2].cells) == ["", "0.900", "", "1.111"]


def test_a_busy_leader_takes_in_every_replica_and_finds_no_copy(tmp_path: Path) -> None:
    run = run_of(INT4, width=WIDTH)
    found = busy(tmp_path, run, fill(tmp_path, run, replicas=3))
    assert found.contributions == 3 * PATHS
    assert found.taken_in > 0 < found.version


def test_a_core_is_what_works_at_all_times_of_ten_minutes() -> None:
    table = busy_table({INT4: Busy(contributions=100, taken_in=2.0, version=4.0)})
    assert [list(column.cells) for column in table.columns] == [[INT4], ["100"], ["20"], ["40"], ["1.00%"]]


def test_a_version_is_made_once_however_long_the_round() -> None:
    done: list[int] = []
    with Repeated(lambda: done.append(1), times=1) as once:
        pass
    assert done == [1] and once.done == 1
