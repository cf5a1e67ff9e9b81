"""The benchmark of attacks plays a real run beside a real stranger."""

from __future__ import annotations

import asyncio
from pathlib import Path

from benchmarks.attack.twins import Game, Options, play, prepare


def test_a_stranger_beside_three_volunteers_is_heard_and_gets_nothing(tmp_path: Path, corpus: Path) -> None:
    options = Options(rounds=2, steps=2, warmup=1, corpus=str(corpus), limit_s=90.0)

    async def run() -> None:
        prepared = await prepare(tmp_path, options, seed=0)
        left = await play(prepared, tmp_path / "tiny", options, Game(attack="tiny"))
        assert left.versions == 2 and left.signed == 0 and len(left.strangers) == 1
        assert left.perplexity(2) > 1 and left.gap_s < options.limit_s
        assert (tmp_path / "tiny" / "stranger.log").read_text() == ""

    asyncio.run(run())
