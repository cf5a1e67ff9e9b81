"""The coordinator is away for longer than the disks of its volunteers last."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_harness import Program, Programs, breaches, eventually, free_port, versions_of, write_run

pytestmark = [pytest.mark.libp2p, pytest.mark.slow]
DISK_BYTES = 28_500_000
"""Of each volunteer: some rounds of this model. Before unsigned work had a limit, all three had filled it in 60 s."""


def test_volunteers_whose_disks_are_full_of_what_is_not_signed_wait_for_the_coordinator(
    programs: Programs, corpus: Path
) -> None:
    run_file = write_run(programs.folder / "full.toml", corpus, rounds=100_000, min_paths=2, port=free_port())
    text = run_file.read_text().replace("width = 16\nffn_width = 16", "width = 96\nffn_width = 384")
    run_file.write_text(text)
    wishes = programs.folder / "wishes.toml"
    wishes.write_text(f"[limits]\ndisk_gb = {DISK_BYTES / 1e9}\n")
    coordinator = programs.coordinator(run_file, programs.folder / "coordinator")
    address = coordinator.wait_address()["address"]
    volunteers = [programs.volunteer(address, f"peer-{n}", "--config", str(wishes)) for n in range(3)]
    for volunteer in volunteers:
        volunteer.wait_event("receipt", count=2)
    eventually(lambda: any(volunteer.events("version") for volunteer in volunteers))
    coordinator.kill()
    eventually(lambda: any("has no room for more" in log for log in map(log_of, volunteers)), within_s=120)
    made = {event["module"]: event["version"] for volunteer in volunteers for event in volunteer.events("version")}
    again = programs.coordinator(run_file, coordinator.home)
    eventually(
        lambda: all(versions_of(again).get(module, 0) > version + 2 for module, version in made.items()),
        within_s=120,
        what=lambda: f"{made} {versions_of(again)} {again.complaint[-1000:]}",
    )
    assert all(volunteer.process.poll() is None for volunteer in volunteers)
    assert [program.end() for program in (*volunteers, again)] == [0] * 4
    assert not breaches(again.home, *volunteers)


def log_of(volunteer: Program) -> str:
    return "".join(path.read_text(errors="replace") for path in volunteer.home.glob("runs/*/peer.log"))
