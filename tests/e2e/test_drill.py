"""The drill of docs/recover.md: the coordinator's host is lost, and training never stops."""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path

import pytest
from e2e_harness import (
    Program,
    Programs,
    breaches,
    copy_prepared,
    eventually,
    free_port,
    versions_of,
    write_run,
)

pytestmark = [pytest.mark.libp2p, pytest.mark.slow]
MODULES = ("L0.M0", "L1.M0", "L1.M1")


def receipts(*programs: Program) -> int:
    return sum(len(program.events("receipt")) for program in programs)


def reached(program: Program, versions: dict[str, int], *, more: int = 0) -> bool:
    """Whether an archive has these versions, and so many after them, of every module."""
    found: dict[str, int] = defaultdict(int, versions_of(program))
    return all(found[module] >= versions.get(module, 0) + more for module in MODULES)


def test_a_lost_coordinator_is_restored_elsewhere_and_training_never_stopped(
    programs: Programs, corpus: Path, endless_prepared: tuple[Path, Path]
) -> None:
    folder = programs.folder
    run_file = write_run(folder / "endless.toml", corpus, rounds=100_000, min_paths=1, port=free_port())
    lost = programs.coordinator(run_file, copy_prepared(endless_prepared[1], folder / "coordinator"))
    ticket = lost.wait_address()["ticket"]
    listen = f"/ip4/127.0.0.1/tcp/{free_port()}"
    home = folder / "second-seed"
    everything = ("--rounds", "0", "--snapshots", "0")  # as the run file says
    words = ("seed", ticket, "--dir", home, "--listen", listen, *everything)
    second = programs.start("dipaco-bootstrap", *words, home=home)
    peer = second.wait_address()["address"].rpartition("/")[2]
    assert programs.run("dipaco-bootstrap", "appoint", peer, lost.home).process.returncode == 0
    volunteers = [programs.volunteer(ticket, name) for name in ("first", "second")]
    eventually(lambda: reached(second, {}, more=2), what=lambda: second.complaint + second.said)

    backup = programs.run("dipaco-bootstrap", "backup", lost.home, "--to", folder / "safe.tar")
    assert backup.process.returncode == 0 and "key is inside" in backup.said, backup.complaint
    assert (folder / "safe.tar").stat().st_mode & 0o077 == 0
    saved = versions_of(lost)
    eventually(lambda: reached(lost, saved, more=2), what=lambda: lost.complaint)
    lost.kill()
    shutil.rmtree(lost.home)

    before = receipts(*volunteers)
    eventually(lambda: receipts(*volunteers) >= before + 6, what=lambda: volunteers[0].complaint)
    entry = second.wait_address()["ticket"]
    volunteers.append(programs.volunteer(entry, "newcomer"))
    volunteers[-1].wait_event("receipt", count=2)

    there = folder / "elsewhere"
    restored = programs.run("dipaco-bootstrap", "restore", folder / "safe.tar", "--dir", there)
    assert restored.process.returncode == 0, restored.complaint
    write_run(run_file, corpus, rounds=100_000, min_paths=1, port=free_port())
    again = programs.coordinator(run_file, there, "--through", second.wait_address()["address"])
    again.wait_event("caught_up", within_s=90)
    alone = versions_of(second)
    eventually(lambda: reached(again, alone, more=2), within_s=90, what=lambda: again.said + again.complaint)
    again.wait_event("filled", within_s=60)
    assert not (there / "restored.json").exists()
    for program in (*volunteers, second, again):
        assert program.end() == 0, program.complaint
    assert breaches(there, *volunteers) == []
    verified = programs.run("dipaco-bootstrap", "verify", home)
    assert verified.process.returncode == 0, verified.said + verified.complaint
