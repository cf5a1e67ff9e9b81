"""The limit on a home folder: no store writes beyond it, and what can be fetched again makes room."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dipaco_p2p.errors import EnvironmentUnfit
from dipaco_p2p.node.store import Store
from dipaco_p2p.program import files
from peers.governor import allowances
from peers.governor.allowances import STALE_S, Allowance, InUse, folder_bytes, limited, prune

KB = 1024


def fill(path: Path, size: int, *, age_s: float = 0.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(size))
    written_s = path.stat().st_mtime - age_s
    os.utime(path, (written_s, written_s))
    return path


def test_a_store_stays_below_the_limit_and_says_what_is_used(tmp_path: Path) -> None:
    home, limit = tmp_path / "home", 200 * KB
    kept = Store(home / "runs" / "one")
    with limited(Allowance(home, limit)), pytest.raises(EnvironmentUnfit, match="`disk_gb`") as caught:
        for _ in range(100):
            kept.put(os.urandom(10 * KB))
    assert folder_bytes(home) <= limit and folder_bytes(home) > 0.8 * limit
    assert kept.failure is caught.value and caught.value.exit_code == 5 and "raise `disk_gb`" in caught.value.hint
    assert not list(home.rglob("*.tmp"))
    kept.put(b"without the limit")


def test_unfinished_transfers_are_counted_too(tmp_path: Path) -> None:
    home = tmp_path / "home"
    kept = Store(home / "runs" / "one")
    path = kept.partial_path("peer-digest")
    with limited(Allowance(home, 100 * KB)), pytest.raises(EnvironmentUnfit, match="`disk_gb`"):
        for _ in range(100):
            kept.append_partial(path, os.urandom(8 * KB))
    assert folder_bytes(home) <= 100 * KB


def test_what_can_be_fetched_again_makes_room_the_least_needed_first(tmp_path: Path) -> None:
    home = tmp_path / "home"
    stale = fill(home / "runs" / "now" / "partial" / "a", 40 * KB, age_s=2 * STALE_S)
    fresh = fill(home / "runs" / "now" / "partial" / "b", 40 * KB)
    older = fill(home / "runs" / "before" / "blobs" / "ab" / "abc", 40 * KB)
    shard = fill(home / "runs" / "now" / "blobs" / "cd" / "cde", 40 * KB)
    needed = fill(home / "runs" / "now" / "blobs" / "ef" / "efg", 40 * KB)
    proof = fill(home / "runs" / "before" / "receipts.jsonl", 4 * KB)
    in_use = InUse(runs=frozenset({"now"}), spare=[shard])
    order = []
    for path in (stale, older, shard):
        prune(home, 1, in_use)
        order.append(not path.exists())
    assert order == [True, True, True]
    assert prune(home, 10**9, in_use) == 0
    assert fresh.exists() and needed.exists() and proof.exists()


def test_before_it_is_known_which_run_goes_on_nothing_of_a_run_is_removed(tmp_path: Path) -> None:
    blob = fill(tmp_path / "runs" / "one" / "blobs" / "ab" / "abc", KB)
    assert prune(tmp_path, 10**9, InUse()) == 0 and blob.exists()


def test_a_write_that_finds_no_room_finds_it_after_pruning(tmp_path: Path) -> None:
    home = tmp_path / "home"
    older = [fill(home / "runs" / "before" / "blobs" / "ab" / f"abc{number}", 20 * KB) for number in range(5)]
    now = Store(home / "runs" / "now")
    with limited(Allowance(home, 128 * KB, in_use=lambda: InUse(runs=frozenset({"now"})))):
        now.put(os.urandom(40 * KB))
    assert folder_bytes(home) <= 128 * KB and any(not path.exists() for path in older)


def test_what_is_left_counts_what_can_be_spared_and_looks_for_it_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, walks, now_s = tmp_path / "home", [], [1000.0]
    monkeypatch.setattr(allowances, "time", SimpleNamespace(time=time.time, monotonic=lambda: now_s[0]))
    older = fill(home / "runs" / "before" / "blobs" / "ab" / "abc", 40 * KB)
    needed = fill(home / "runs" / "now" / "blobs" / "cd" / "cde", 40 * KB)

    def in_use() -> InUse:
        walks.append(1)
        return InUse(runs=frozenset({"now"}))

    with limited(Allowance(home, 100 * KB, in_use=in_use)):
        assert files.disk.free_bytes(home, wanted=10 * KB) == 20 * KB and older.exists()
        assert files.disk.free_bytes(home, wanted=60 * KB) == 60 * KB and needed.exists() and not older.exists()
        spare = fill(home / "runs" / "before" / "blobs" / "ab" / "abd", 20 * KB)
        assert [files.disk.free_bytes(home, wanted=70 * KB) for _ in range(9)] == [60 * KB] * 9
        assert len(walks) == 1 and spare.exists()
        now_s[0] += allowances.LOOK_S
        assert files.disk.free_bytes(home, wanted=70 * KB) == 60 * KB and len(walks) == 2 and not spare.exists()


def test_files_that_others_removed_are_found_to_be_gone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    kept = Store(home / "runs" / "one")
    allowance = Allowance(home, 100 * KB)
    with limited(allowance):
        names = [kept.put(os.urandom(20 * KB)).digest for _ in range(4)]
        for name in names:
            kept.drop(name)
        kept.put(os.urandom(60 * KB))
        allowance.measure()
        assert allowance.used_bytes == folder_bytes(home)


def test_without_a_limit_the_disk_is_the_machines_own(tmp_path: Path) -> None:
    before = files.disk
    with limited(Allowance(tmp_path, KB)):
        assert files.disk is not before
    assert files.disk is before
