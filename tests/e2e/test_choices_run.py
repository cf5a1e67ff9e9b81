"""A run with Muon, by real programs: it completes and verifies, and refuses a volunteer that asks for 8-bit moments."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_harness import Programs, refused, write_run

pytestmark = pytest.mark.libp2p


def test_a_run_with_muon_completes_and_verifies(programs: Programs, corpus: Path) -> None:
    run_file = write_run(programs.folder / "muon.toml", corpus, rounds=2, min_paths=2, warmup_rounds=1)
    run_file.write_text(run_file.read_text().replace("[inner]", '[inner]\noptimizer = "muon"'))
    folder = programs.folder / "coordinator"
    coordinator = programs.coordinator(run_file, folder)
    address = coordinator.wait_address()["address"]
    refused(programs.volunteer(address, "short-of-memory", "--eight-bit"), 2, "Muon", "eight_bit")
    volunteers = [programs.volunteer(address, name) for name in ("first", "second")]
    for volunteer in volunteers:
        assert volunteer.wait(240) == 0, volunteer.complaint
    assert coordinator.end() == 0, coordinator.complaint
    verified = programs.run("dipaco-bootstrap", "verify", folder)
    assert verified.wait() == 0 and verified.said.count("to the bit") == 5, verified.complaint
