"""What a simulated run stands on: processes that freeze and die, and disks that lose what was not synced."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from dipaco_p2p.node.store import Store
from dipaco_p2p.program.files import listening, write_atomically
from simulation.disk import Crashed, SimulatedDisk, installed
from simulation.faults import fault_points
from simulation.virtual_time import Process, VirtualClock


async def beat(beats: list[float]) -> None:
    clock = VirtualClock()
    try:
        while True:
            beats.append(asyncio.get_running_loop().time())
            await clock.sleep(1.0)
    finally:
        beats.append(-1.0)


async def test_a_frozen_process_gets_no_turn_and_others_do() -> None:
    frozen, free = [], []
    process, other = Process("frozen"), Process("free")
    tasks = [process.start(beat(frozen)), other.start(beat(free))]
    await asyncio.sleep(2.5)
    process.freeze()
    await asyncio.sleep(5.0)
    assert frozen == [0.0, 1.0, 2.0]
    process.thaw()
    await asyncio.sleep(1.1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert free[:8] == [float(second) for second in range(8)]
    assert frozen == [0.0, 1.0, 2.0, 7.5, 8.5, -1.0]


async def test_a_dead_process_runs_no_finally_block() -> None:
    beats: list[float] = []
    kept: list[Process] = []
    process = Process("dead")
    kept.append(process)
    task = process.start(beat(beats))
    await asyncio.sleep(1.5)
    process.kill()
    await asyncio.sleep(5.0)
    assert beats == [0.0, 1.0]
    process.is_dead, process.is_running = False, True  # else the loop of this test would wait for it for ever
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_power_cut_takes_only_what_was_not_synced(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    with installed(disk):
        store = Store(tmp_path)
        for seed in range(20):
            store.write_document("kept", b"first")
            store.write_document("kept", b"second")
            disk.of("").cut_power(random.Random(seed))
            assert store.read_document("kept") == b"second"


def test_without_syncs_a_power_cut_takes_names_or_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedDisk, "sync", lambda self, file: None)
    monkeypatch.setattr(SimulatedDisk, "sync_folder", lambda self, path: None)
    found = set()
    for seed in range(20):
        disk = SimulatedDisk()
        with installed(disk):
            store = Store(tmp_path / str(seed))
            store.write_document("kept", b"first")
            disk.of("").cut_power(random.Random(seed))
            found.add(store.read_document("kept"))
    assert {None, b"first"} < found, "gone, whole, and cut short"


def test_a_crash_in_a_write_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    points = [point for point in fault_points() if point.startswith("write: ")]
    assert len(points) >= 6
    for point in points:
        path = tmp_path / "document.json"
        path.write_bytes(b"old")

        def strike(reached: str, point: str = point) -> None:
            if reached == point:
                raise Crashed(point)

        with installed(SimulatedDisk()), listening(strike), pytest.raises(Crashed):
            write_atomically(path, b"new")
        assert path.read_bytes() in (b"old", b"new"), point


async def test_a_dead_machine_writes_nothing(tmp_path: Path) -> None:
    process = Process("dead")
    process.end()
    with installed(SimulatedDisk()), pytest.raises(Crashed):
        process.context.run(Store(tmp_path).write_document, "late", b"x")
    assert Store(tmp_path).read_document("late") is None
