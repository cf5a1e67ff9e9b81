"""A soak finds what grows and leaves alone what only wanders; and reads what processes hold from the kernel."""

from __future__ import annotations

import json
import os
import random
import socket
from pathlib import Path

import pytest

from benchmarks.processes import memory_bytes
from benchmarks.swarm_faults.growth import (
    BOUNDS,
    MIB,
    SEEDS,
    Bound,
    bound_of,
    disk_bytes,
    family,
    open_files,
    slope,
    take,
    threads,
    trend,
    trends,
)

HOUR_S = 3600.0


def samples(per_hour: float, *, noise: float, seed: int = 1) -> list[tuple[float, float]]:
    """An hour of a measure: a level, a growth, and uniform noise."""
    chance = random.Random(seed)
    return [(t, 250.0 + per_hour * t / HOUR_S + chance.uniform(-noise, noise)) for t in range(0, int(HOUR_S), 30)]


def test_the_line_of_points_without_noise_is_theirs() -> None:
    assert slope([(float(t), 3.0 * t + 5) for t in range(50)]) == pytest.approx(3.0)
    assert slope([(0.0, 1.0)]) == slope([]) == 0.0


def test_a_few_outliers_do_not_move_the_line() -> None:
    points = [(float(t), 2.0 * t) for t in range(100)]
    points[97:] = [(float(t), 1e6) for t in range(97, 100)]
    assert slope(points) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_in_noise_is_found_and_noise_alone_is_flat(seed: int) -> None:
    bound = Bound(rise=24, share=0.08)
    assert trend("memory", samples(60, noise=40, seed=seed), bound).grows
    assert not trend("memory", samples(0, noise=40, seed=seed), bound).grows
    assert not trend("memory", samples(-60, noise=40, seed=seed), bound).grows


def test_what_is_kept_of_every_round_is_allowed_and_more_is_not() -> None:
    bound = Bound(rise=1, per_round=2)
    assert not trend("kept", samples(190, noise=0), bound, rounds=100).grows
    assert trend("kept", samples(230, noise=0), bound, rounds=100).grows


def test_the_warm_up_does_not_count() -> None:
    filling = [(float(t), {"threads a": min(t, 30) * 10.0}) for t in range(100)]
    assert [found.grows for found in trends(filling, rounds_per_s=0, warm_up=0.3)] == [False]
    assert [found.grows for found in trends(filling, rounds_per_s=0, warm_up=0.0)] == [False]
    leaking = [(float(t), {"threads a": 10.0 * t}) for t in range(100)]
    assert [found.grows for found in trends(leaking, rounds_per_s=0, warm_up=0.3)] == [True]


def test_every_measure_has_a_bound_and_the_archive_one_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    measures = take({"seed": os.getpid(), "volunteer-1": os.getpid()}, {"seed": tmp_path, "volunteer-1": tmp_path})
    assert {measure.split()[0] for measure in measures} | {"heartbeats", "claims", "heads"} == set(BOUNDS)
    among_others = take({"seed": os.getpid()}, {"seed": tmp_path}, is_alone=False)
    assert {measure.partition(" ")[2] for measure in among_others} == {"seed"}, "nothing of the machine's"
    assert bound_of("blob_bytes seed") is SEEDS["blob_bytes"]
    assert bound_of("blob_bytes volunteer-1") is BOUNDS["blob_bytes"]


def test_the_kernel_says_what_this_process_holds(tmp_path: Path) -> None:
    me = os.getpid()
    assert family(me)[0] == me and family(2**30) == []
    for figure, file in (("Pss", "smaps_rollup"), ("VmRSS", "status")):
        assert 10 * MIB < memory_bytes(me, figure, file=file) and memory_bytes(2**30, figure, file=file) == 0
    assert threads(me) >= 1 and threads(2**30) == 0
    files, sockets = open_files(me)
    with socket.socket(), (tmp_path / "file").open("w"):
        assert open_files(me) == (files + 2, sockets + 1)


def test_blobs_are_told_from_what_is_kept(tmp_path: Path) -> None:
    for name, size in {"runs/x/blobs/ab/abc": 100, "runs/x/documents/one.json": 7, "runs/x/history.jsonl": 3}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    assert disk_bytes(tmp_path) == (100, 10)


@pytest.mark.parametrize("document", ["manifest.json", "state-P0-1.json"])
def test_what_is_kept_for_each_path_does_not_count(tmp_path: Path, document: str) -> None:
    (tmp_path / "documents").mkdir()
    (tmp_path / "blobs").mkdir()
    for name in ("a" * 64, "b" * 64):
        (tmp_path / "blobs" / name).write_bytes(bytes(100))
    text = json.dumps({"shards": ["a" * 64]})
    (tmp_path / "documents" / document).write_text(text)
    assert disk_bytes(tmp_path) == (100, len(text))
