"""What the coordinator prints of each round: in order, and as the swarm was when the round closed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stages_harness import Home, run_file
from virtual_time import eventually

from bootstrap.coordinator.stage import There

WARM_UP = [
    "before warm-up round 1",
    *(f"warm-up round {n} of 2, 2 volunteers alive, 1 of 1 paths covered" for n in (1, 2)),
]
GRID = ["before round 1", *(f"round {n} of 3, 2 volunteers alive, 2 of 2 paths covered" for n in (1, 2, 3))]


def told(out: str) -> list[str]:
    """The lines of rounds, without their perplexities."""
    lines = [line for line in out.splitlines() if re.match(r"(before )?(warm-up )?round", line)]
    return [re.sub(r": validation perplexity [\d.]+", "", line) for line in lines]


async def test_rounds_that_are_judged_when_all_have_left_are_told_in_order_and_as_they_closed(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, are_gone, to_thread = Home(tmp_path, run_file(corpus)), asyncio.Event(), asyncio.to_thread

    async def late(work: Callable[..., Any], *values: Any, **named: Any) -> Any:
        if getattr(work, "__name__", "") == "evaluate":
            await are_gone.wait()
        return await to_thread(work, *values, **named)

    monkeypatch.setattr(asyncio, "to_thread", late)
    home.start()
    await home.join(1, 2)
    await home.volunteers_done()
    await eventually(lambda: not volunteers(home))
    assert told(capsys.readouterr().out) == []
    are_gone.set()
    await eventually(home.is_over)
    await home.die()
    assert told(capsys.readouterr().out) == [*WARM_UP, *GRID]
    home.start()
    await asyncio.sleep(1)
    assert told(capsys.readouterr().out) == ["round 3 of 3"], "nobody remembers who was there"
    await home.close()


def volunteers(home: Home) -> set[Any]:
    """Whom the coordinator sees."""
    seen = home.seed.stage() if home.seed is not None else None
    return set() if seen is None else seen.watch.volunteers()


def test_one_volunteer_is_counted_in_the_singular() -> None:
    said = [str(There(volunteers=count, covered=1, paths=4)) for count in (0, 1, 2)]
    assert [each.partition(" alive")[0] for each in said] == ["0 volunteers", "1 volunteer", "2 volunteers"]
