"""A coordinator that keeps the last rounds alone: its run goes on through restarts, takeovers and decrees, and its
folder stays small and of use."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from e2e_harness import Programs, copy_prepared, eventually, free_port, refused, versions_of, write_run

pytestmark = pytest.mark.libp2p
ROUNDS, KEPT, EVERY = 8, 2, 4


def snapshots_in(folder: Path, module: str = "L1.M0") -> set[int]:
    """Of which versions the parameters are there."""
    found = set()
    for path in (folder / "grid" / "documents").glob(f"version-{module}-*.json"):
        document = json.loads(path.read_text())["document"]
        digest = document["snapshot"]["digest"]
        if (folder / "grid" / "blobs" / digest[:2] / digest).exists():
            found.add(int(document["version"]))
    return found


def test_a_run_goes_on_when_its_archive_keeps_the_last_rounds_alone(
    programs: Programs, corpus: Path, endless_prepared: tuple[Path, Path]
) -> None:
    folder, port = copy_prepared(endless_prepared[1], programs.folder / "coordinator"), free_port()
    run_file = write_run(
        programs.folder / "endless.toml",
        corpus,
        rounds=100_000,
        min_paths=1,
        port=port,
        keep_rounds=KEPT,
        keep_snapshots=EVERY,
    )
    coordinator = programs.coordinator(run_file, folder)
    ticket = coordinator.wait_address()["ticket"]
    first, second = (programs.volunteer(ticket, name, "--grace", "10") for name in ("first", "second"))

    def reach(version: int) -> None:
        found = partial(versions_of, coordinator)
        eventually(lambda: min(found().values()) >= version, within_s=240, what=lambda: str(found()))

    first.wait_event("receipt")
    eventually(lambda: len(versions_of(coordinator)) == 3, what=lambda: coordinator.complaint[-1000:])
    reach(ROUNDS)
    # Killed in mid-run, with a leader: who takes over, and a newcomer, begin with what the archive keeps.
    coordinator.kill()
    first.kill()
    coordinator = programs.coordinator(run_file, folder)
    coordinator.wait_address()
    third = programs.volunteer(ticket, "third", "--grace", "10")
    third.wait_event("receipt", count=2)
    before = min(versions_of(coordinator).values())
    reach(before + 4)
    gone = str(max(set(range(1, before)) - snapshots_in(folder)))
    back = programs.run("dipaco-bootstrap", "rollback", "L1.M0", gone, folder, "--reason", "worse")
    refused(back, 2, f"version {gone} of L1.M0 is not kept", "the newest before it that the archive keeps is")
    done = programs.run("dipaco-bootstrap", "rollback", "L1.M0", str(EVERY), folder, "--reason", "worse")
    assert done.wait() == 0 and f"to {EVERY}" in done.said, done.complaint
    eventually(
        lambda: [row for row in listed(programs, folder) if row["to"] == EVERY and row["version"]],
        within_s=120,
        what=lambda: str(listed(programs, folder)),
    )
    # Rounds that are not judged yet stay, and on a busy machine that is a few more for a while.
    eventually(
        lambda: len(kept := snapshots_in(folder)) < max(kept) / 2, within_s=240, what=lambda: str(snapshots_in(folder))
    )
    assert [volunteer.end() for volunteer in (second, third)] == [0, 0], third.complaint
    assert coordinator.end() == 0, coordinator.complaint

    verified = programs.run("dipaco-bootstrap", "verify", folder)
    assert verified.wait() == 0, verified.said + verified.complaint
    assert "as the coordinator signed them" in " ".join(verified.said.split()).replace("│", ""), verified.said
    there = snapshots_in(folder)
    assert {max(there), max(there) - 1, EVERY} <= there
    out = programs.folder / "out"
    assert programs.run("dipaco-bootstrap", "export", folder, "--path", "P0-0", "--to", out).wait() == 0
    early = programs.run("dipaco-bootstrap", "generate", folder, "one two", "--version", gone)
    refused(early, 2, "keeps the parameters of some versions alone", "--version")
    page = programs.run("dipaco-bootstrap", "leaderboard", "export", folder, programs.folder / "page")
    assert page.wait() == 0, page.complaint


def listed(programs: Programs, folder: Path) -> list[dict[str, int]]:
    done = programs.run("dipaco-bootstrap", "decrees", folder, "--json")
    assert done.wait() == 0, done.complaint
    rows: list[dict[str, int]] = json.loads(done.said)["decrees"]
    return rows
