"""Old versions outlive the archive: it forgets them once volunteers have proved that they keep them, and anybody
verifies the run with these. Without a coordinator: tests/bootstrap/test_gathered.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e_harness import Program, Programs, eventually, open_endless, refused, versions_of

pytestmark = pytest.mark.libp2p
KEPT, WANTED, FORGOTTEN = 2, 2, 4
MODULES = ("L0.M0", "L1.M0", "L1.M1")


def forgotten(coordinator: Program) -> dict[str, int]:
    """Up to which version of each module the archive has dropped the contributions."""
    documents = coordinator.home / "grid" / "documents"
    found = {module: documents / f"thinned-{module}.json" for module in MODULES}
    return {
        module: json.loads(path.read_text())["contributions"] if path.exists() else 0 for module, path in found.items()
    }


def test_a_run_is_verified_with_what_its_keepers_have_and_the_archive_has_dropped(
    programs: Programs, corpus: Path, endless_prepared: tuple[Path, Path]
) -> None:
    _, coordinator = open_endless(programs, corpus, endless_prepared[1], keep_rounds=KEPT, keepers=WANTED)
    folder, ticket = coordinator.home, coordinator.wait_address()["ticket"]
    alone = programs.volunteer(ticket, "alone", "--grace", "10")
    eventually(lambda: versions_of(coordinator).get("L1.M0", 0) > KEPT + 2, within_s=120)
    assert set(forgotten(coordinator).values()) == {0}, "nobody keeps it, so the archive does"

    names = ("first", "second", "third")
    keepers = [programs.volunteer(ticket, name, "--grace", "10", "--keep-gb", "0.2") for name in names]
    eventually(
        lambda: min(forgotten(coordinator).values()) >= FORGOTTEN,
        within_s=300,
        what=lambda: f"{forgotten(coordinator)} {versions_of(coordinator)} {coordinator.complaint[-2000:]}",
    )
    assert programs.status(keepers[0])["keep_bytes"] == 200_000_000
    # Two of the three had to prove what the archive dropped; this one may be the third.
    eventually(
        lambda: programs.status(keepers[0])["kept_ranges"] > 0,
        within_s=60,
        what=lambda: str(programs.status(keepers[0])),
    )
    listed = programs.run("dipaco-bootstrap", "peers", folder, "--json")
    rows = json.loads(listed.said)["peers"]
    assert sum(row["keeps"] > 0 and row["keeping_proofs"] > 0 for row in rows) >= WANTED, rows
    ours = programs.run("dipaco-bootstrap", "verify", folder)
    assert ours.wait() == 0 and "as the coordinator signed them" in flat(ours), ours.said + ours.complaint

    line = programs.run("dipaco-peer", "ticket", "--home", keepers[0].home)
    gathered = programs.folder / "gathered"
    seen = programs.run("dipaco-bootstrap", "verify", line.said.split()[-1], "--dir", gathered, timeout_s=300)
    assert seen.wait() == 0 and "to the bit" in flat(seen), seen.said + seen.complaint
    assert "from version" not in flat(seen), "from the first version on, which the archive has dropped"
    refused(programs.run("dipaco-bootstrap", "verify", gathered, "--dir", "x"), 2, "leave it out")
    assert [each.end() for each in (alone, *keepers)] == [0, 0, 0, 0]


def test_a_run_whose_coordinator_never_had_its_work_is_verified_with_what_keepers_have(
    programs: Programs, corpus: Path, endless_prepared: tuple[Path, Path]
) -> None:
    _, coordinator = open_endless(programs, corpus, endless_prepared[1], remade=0.0)
    folder, ticket = coordinator.home, coordinator.wait_address()["ticket"]
    names = ("first", "second", "third")
    keepers = [programs.volunteer(ticket, name, "--grace", "10", "--keep-gb", "0.2") for name in names]

    def proved() -> int:
        listed = programs.run("dipaco-bootstrap", "peers", folder, "--json")
        return sum(row["keeping_proofs"] > 0 for row in json.loads(listed.said)["peers"])

    def kept() -> list[int]:
        return [programs.status(each)["kept_ranges"] for each in keepers]

    for each in keepers:
        each.wait_event("joined")
    eventually(lambda: min(kept()) >= len(MODULES), within_s=240, what=lambda: f"{kept()} {versions_of(coordinator)}")
    eventually(lambda: proved() >= WANTED, within_s=120, what=lambda: coordinator.complaint[-2000:])
    seen = programs.run("dipaco-bootstrap", "verify", ticket, "--dir", programs.folder / "gathered", timeout_s=300)
    assert seen.wait() == 0 and "to the bit" in flat(seen), seen.said + seen.complaint
    assert [each.end() for each in keepers] == [0, 0, 0]


def flat(program: Program) -> str:
    return " ".join(program.said.replace("│", " ").split())
