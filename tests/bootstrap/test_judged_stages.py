"""Who has worked in the warm-up judges the first round of the grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stages_harness import Home, play_whole, run_file

from dipaco_p2p.config import JudgingConfig
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.program import tasks
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.verdicts import read_appraisals
from dipaco_p2p.use.folder import GRID, WARMUP, open_stage


def auditors(folder: Path) -> dict[int, set[PeerId]]:
    """Who repeated a work, as the versions of each number say."""
    store = Store(folder)
    archive = SeedArchive(open_stage(store), store)
    found: dict[int, set[PeerId]] = {}
    for version in (sealed.document for ledger in archive.ledgers.values() for sealed in ledger.versions):
        said = read_appraisals(archive.blob(version.appraisals.digest)) if version.appraisals else []
        repeated = {sealed.document.author for sealed in said if sealed.document.repeated is not None}
        found.setdefault(version.version, set()).update(repeated)
    return found


def test_work_of_the_grids_first_round_is_repeated_by_those_who_worked_in_the_warm_up(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "SOON_S", 3.0)  # longer than heartbeats take: who audits is who is known by then
    changes: dict[str, Any] = {"judging": JudgingConfig(judges=2, sequences=8, audited=100)}
    home = Home(tmp_path, run_file(corpus, **changes))
    play_whole(home, volunteers=3)
    warm_up, grid = auditors(home.folder / WARMUP), auditors(home.folder / GRID)
    assert not warm_up[1], "nobody had worked before"
    assert grid[1] and home.coordinator not in grid[1]
