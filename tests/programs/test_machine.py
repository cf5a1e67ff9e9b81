"""What a machine gives to training: threads, memory, and what the flags say about both."""

from __future__ import annotations

from pathlib import Path

import pytest

from dipaco_p2p.core.microbatch import Fit
from peers.config import PeerConfig
from peers.machine import free_bytes, trainer_settings, training_threads

MEMINFO = "MemTotal:       8000 kB\nMemFree:         500 kB\nMemAvailable:   3000 kB\n"


@pytest.mark.parametrize(
    ("wanted", "offered", "cores", "expected"),
    [
        (0, 8, 8, 7),
        (0, 3, 3, 2),
        (0, 2, 2, 2),
        (0, 1, 1, 1),
        (0, 1, 8, 1),  # OMP_NUM_THREADS says it, and leaves cores free already
        (0, 4, 8, 4),
        (5, 8, 8, 5),
        (8, 1, 8, 8),
    ],
)
def test_of_more_than_two_cores_one_is_left_unless_the_user_says(
    wanted: int, offered: int, cores: int, expected: int
) -> None:
    assert training_threads(wanted, offered=offered, cores=cores) == expected


def place(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)
    return folder


def test_free_memory_is_what_machine_and_container_leave(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(MEMINFO)
    assert free_bytes(meminfo=meminfo, cgroup=tmp_path / "none") == 3000 * 1024
    unlimited = place(tmp_path, max="max\n", current="700000\n", stat="inactive_file 1000\n")
    assert free_bytes(meminfo=meminfo, cgroup=unlimited) == 3000 * 1024
    tight = place(tmp_path, max="1000000\n", current="700000\n", stat="anon 5\ninactive_file 100000\n")
    assert free_bytes(meminfo=meminfo, cgroup=tight) == 400_000
    over = place(tmp_path, max="1000\n", current="700000\n", stat="anon 5\n")
    assert free_bytes(meminfo=meminfo, cgroup=over) == 0


def test_where_nobody_says_what_is_free_it_is_not_known(tmp_path: Path) -> None:
    assert free_bytes(meminfo=tmp_path / "none", cgroup=tmp_path) is None


def test_the_flags_decide_what_every_trainer_gets(tmp_path: Path) -> None:
    asked = PeerConfig(home=tmp_path, micro_batch=3, checkpoint=True, eight_bit=False)
    settings = trainer_settings(asked)
    assert settings["micro"].fit(8) == Fit(3, is_checkpointed=True) and settings["eight_bit"] is False
    assert trainer_settings(PeerConfig(home=tmp_path))["eight_bit"] is None
