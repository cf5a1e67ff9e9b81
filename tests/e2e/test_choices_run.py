"""Runs with each choice that a run file offers for fewer bytes or steps, by real programs: they complete and verify,
and no honest work is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_harness import Programs, refused, write_run

from bootstrap.demo import with_keys

pytestmark = pytest.mark.libp2p

MUON = 'inner.optimizer="muon"'
CHOICES = {
    "muon": (MUON,),
    "two bits both ways": ('compression.uplink="int2"', 'compression.downlink="int2"'),
    "the largest up": ('compression.uplink="ternary640"', "outer.lr=0.9", "outer.momentum=0.7"),
    "overlap": ("rounds.overlap=true", 'compression.uplink="int2"'),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_run_with_this_choice_completes_and_verifies(programs: Programs, corpus: Path, choice: str) -> None:
    keys = CHOICES[choice]
    run_file = write_run(programs.folder / "choice.toml", corpus, rounds=3, min_paths=2, warmup_rounds=1)
    run_file.write_text(with_keys(run_file.read_text(), keys))
    folder = programs.folder / "coordinator"
    coordinator = programs.coordinator(run_file, folder)
    address = coordinator.wait_address()["address"]
    if MUON in keys:
        refused(programs.volunteer(address, "short-of-memory", "--eight-bit"), 2, "Muon", "eight_bit")
    volunteers = [programs.volunteer(address, name) for name in ("first", "second")]
    for volunteer in volunteers:
        assert volunteer.wait(240) == 0, volunteer.complaint
        assert "refused:" not in volunteer.said, "honest work"
    assert coordinator.end() == 0, coordinator.complaint
    verified = programs.run("dipaco-bootstrap", "verify", folder)
    assert verified.wait() == 0 and verified.said.count("to the bit") == 5, verified.complaint
