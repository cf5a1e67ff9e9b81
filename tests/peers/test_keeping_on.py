"""A volunteer that keeps old versions stays when the run is complete, and leaves when it is told to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from e2e_harness import write_corpus
from stages_harness import RESHARDED_ONCE, Home, run_file
from virtual_time import eventually

from dipaco_p2p.config import WarmupConfig
from dipaco_p2p.use.folder import GRID
from peers.preferences.keys import Limits
from peers.stages import StageRunner


async def test_keepers_stay_after_the_last_round_and_are_challenged_until_they_leave(
    tmp_path: Path, monkeypatch: Any
) -> None:
    runners: list[StageRunner] = []
    begin = StageRunner.take_part

    async def take_part(self: StageRunner, stages: Any) -> None:
        runners.append(self)
        await begin(self, stages)

    monkeypatch.setattr(StageRunner, "take_part", take_part)
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    home = Home(tmp_path, run_file(corpus, routing=RESHARDED_ONCE, warmup=WarmupConfig(rounds=0)))

    def proofs() -> int:
        path = home.folder / GRID / "documents" / "keepers.json"
        keepers = json.loads(path.read_text())["document"]["keepers"] if path.exists() else []
        return min((int(one["proofs"]) for one in keepers), default=0) if len(keepers) == 2 else 0

    home.start()
    await home.join(1, 2, limits=Limits(keep_gb=0.5))
    await eventually(lambda: len(runners) == 2 and all(each.status is not None for each in runners))
    await eventually(lambda: all(each.status and each.status.doing == "keeping" for each in runners))
    before = proofs()
    await eventually(lambda: proofs() >= before + 3, limit_s=400)
    assert all(each.status and each.status.kept_ranges == 3 for each in runners), "one of each module"
    assert home.seed is not None and (seen := home.seed.stage()) is not None
    assert sum(beat.doing == "keeping" for beat in seen.watch.heartbeats.values()) == 2
    for each in runners:
        each.stop()
    await home.volunteers_done()
    await home.close()
