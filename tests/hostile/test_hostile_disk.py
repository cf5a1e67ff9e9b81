"""Finished uploads of the largest size, by many keys at one address, against a volunteer that gives little disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from e2e_harness import Programs, write_corpus, write_run
from hostile_harness import MIB, Background, Battlefield

from dipaco_p2p.canonical import digest
from dipaco_p2p.errors import IntegrityError, Refused
from dipaco_p2p.node.uploads import UNNAMED_UPLOADS, UNUSED_UPLOADS_IN_ALL_MAX, UNUSED_UPLOADS_MAX

pytestmark = pytest.mark.libp2p

DISK_BYTES = 60 * MIB
KEYS = UNUSED_UPLOADS_IN_ALL_MAX // UNUSED_UPLOADS_MAX


def test_strangers_do_not_use_up_the_disk_that_a_volunteer_gives(tmp_path: Path) -> None:
    run_file = write_run(tmp_path / "run.toml", write_corpus(tmp_path / "corpus.jsonl"), rounds=100_000, min_paths=1)
    text = run_file.read_text().replace("width = 16\nffn_width = 16", "width = 128\nffn_width = 512")
    run_file.write_text(text)
    wishes = tmp_path / "wishes.toml"
    wishes.write_text(f"[limits]\ndisk_gb = {DISK_BYTES / 1e9}\n")
    programs, background = Programs(tmp_path), Background()
    field: Battlefield | None = None
    try:
        coordinator = programs.coordinator(run_file, tmp_path / "coordinator")
        address = coordinator.wait_address()["address"]
        volunteer = programs.volunteer(address, "volunteer", "--config", str(wishes))
        volunteer.wait_event("version", count=2)
        field = Battlefield(coordinator, volunteer, background, tmp_path, address)
        size = max(map(field.run.payload_bytes_max, field.run.topology.modules()))
        names, keys = set[str](), [field.new_attacker(f"stranger-{number}") for number in range(KEYS)]
        leader = field.leader

        async def attack() -> set[str]:
            said = set[str]()
            for key in keys:
                for _ in range(UNUSED_UPLOADS_MAX):
                    data = os.urandom(size)
                    names.add(digest(data))
                    try:
                        await key.upload(leader, data)
                    except (Refused, IntegrityError) as error:  # the latter if it gave way meanwhile
                        said.add(str(error.reason) if isinstance(error, Refused) else "gone")
            return said

        assert background.run(attack(), within_s=400) <= {"busy", "gone"}
        # All uploads have one size, so their number says what they use: the volunteer deletes them while this looks.
        # This machine may have two addresses here: its own and loopback.
        whole = [name for _, _, files in os.walk(volunteer.home) for name in files if name in names]
        assert 0 < len(whole) <= UNNAMED_UPLOADS
        volunteer.wait_event("version", count=3)
        assert volunteer.process.poll() is None
    finally:
        if field is not None:
            field.close()
        programs.end_all()
        background.stop()
