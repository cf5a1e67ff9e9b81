from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

sys.path.insert(0, os.path.dirname(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(__file__)), "e2e"))
from e2e_harness import Programs, write_corpus, write_run
from hostile_harness import Background, Battlefield


@pytest.fixture(scope="session")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Battlefield]:
    """A run that goes on for ever, with a volunteer that leads its modules; all attacks are against these two."""
    folder = tmp_path_factory.mktemp("hostile")
    run_file = write_run(folder / "hostile.toml", write_corpus(folder / "corpus.jsonl"), rounds=100_000, min_paths=1)
    with run_file.open("a") as file:  # the codec that packs most, so that there is most to forge
        file.write('\n[compression]\nuplink = "int4"\ndownlink = "int4"\n')
    programs, background = Programs(folder), Background()
    try:
        coordinator = programs.coordinator(run_file, folder / "coordinator")
        address = coordinator.wait_address()["address"]
        volunteer = programs.volunteer(address, "volunteer")
        volunteer.wait_event("version", count=2)
        field = Battlefield(coordinator, volunteer, background, folder, address)
        yield field
        field.close()
        assert (volunteer.end(), coordinator.end()) == (0, 0), volunteer.complaint + coordinator.complaint
    finally:
        programs.end_all()
        background.stop()
