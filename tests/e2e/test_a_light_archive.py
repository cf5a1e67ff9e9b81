"""A coordinator that takes no contributions: what it has not led itself it signs on the word of a quorum.

And one that takes no parameters either: volunteers measure the rounds for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from e2e_harness import Program, Programs, eventually, open_endless

pytestmark = pytest.mark.libp2p
MODULES = ("L0.M0", "L1.M0", "L1.M1")
SETTLED = 3


def settled(coordinator: Program, *, author: str) -> list[dict[str, Any]]:
    """The archive's versions by others than `author`."""
    paths = sorted(coordinator.home.glob("grid/documents/version-*.json"))
    versions = [json.loads(path.read_text())["document"] for path in paths]
    return [version for version in versions if version["author"] != author]


def test_versions_are_final_without_a_contribution_in_the_coordinators_folder(
    programs: Programs, corpus: Path, endless_prepared: tuple[Path, Path]
) -> None:
    _, coordinator = open_endless(programs, corpus, endless_prepared[1], remade=0.0)
    folder, details = coordinator.home, coordinator.wait_address()
    volunteers = [programs.volunteer(details["ticket"], name, "--grace", "10") for name in ("one", "two", "three")]

    def by_module() -> list[int]:
        made = [version["module"] for version in settled(coordinator, author=details["peer"])]
        return [made.count(module) for module in MODULES]

    # More than those of a group that has only begun: its last mirror may still have been on its way.
    eventually(lambda: min(by_module()) >= 2 * SETTLED, within_s=120, what=lambda: coordinator.complaint[-2000:])
    documents, blobs = folder / "grid" / "documents", {path.name for path in folder.glob("grid/blobs/*/*")}
    taken = {path.stem.partition("-")[2] for path in documents.glob("contribution-*.json")}
    for module in MODULES:
        made = [each for each in settled(coordinator, author=details["peer"]) if each["module"] == module]
        bare = [each for each in made if not any(share["contribution"] in taken for share in each["shares"])]
        assert len(bare) >= SETTLED, (len(bare), len(made))
        assert all(each["snapshot"]["digest"] in blobs for each in bare), "it judges them"
    assert [each.end() for each in (*volunteers, coordinator)] == [0, 0, 0, 0]
    verified = programs.run("dipaco-bootstrap", "verify", folder)
    assert verified.wait() == 0 and "as the coordinator signed them" in " ".join(verified.said.split()), verified.said


def test_volunteers_measure_for_a_coordinator_that_has_no_parameters_and_is_killed(
    programs: Programs, corpus: Path, endless_prepared: tuple[Path, Path]
) -> None:
    archive = {"keep_rounds": 1, "remade": 0.0, "measured": 0.0}
    run_file, coordinator = open_endless(programs, corpus, endless_prepared[1], **archive)
    folder, details = coordinator.home, coordinator.wait_address()
    volunteers = [
        programs.volunteer(details["ticket"], name, "--grace", "10") for name in ("one", "two", "three", "four")
    ]

    def bare(of: Program) -> list[int]:
        """How many versions of each module it has signed without ever having their parameters."""
        blobs = {path.name for path in folder.glob("grid/blobs/*/*")}
        made = [each for each in settled(of, author=details["peer"]) if each["snapshot"]["digest"] not in blobs]
        return [sum(each["module"] == module for each in made) for module in MODULES]

    def measured() -> set[str]:
        return {each.home.name for each in volunteers if each.events("measured")}

    eventually(lambda: min(bare(coordinator)) >= SETTLED, within_s=120, what=lambda: coordinator.complaint[-2000:])
    eventually(lambda: len(measured()) >= 2, within_s=120, what=lambda: str(measured()))
    before = bare(coordinator)
    coordinator.kill()
    coordinator = programs.coordinator(run_file, folder)
    coordinator.wait_address()

    def goes_on() -> bool:
        return all(now > then + SETTLED for now, then in zip(bare(coordinator), before, strict=True))

    eventually(goes_on, within_s=120, what=lambda: f"{before}, {bare(coordinator)}: {coordinator.complaint[-2000:]}")
    assert [each.end() for each in (*volunteers, coordinator)] == [0, 0, 0, 0, 0]
    assert list(folder.glob("grid/documents/judgement-*.json"))
    verified = programs.run("dipaco-bootstrap", "verify", folder)
    assert verified.wait() == 0 and "as the coordinator signed them" in " ".join(verified.said.split()), verified.said
