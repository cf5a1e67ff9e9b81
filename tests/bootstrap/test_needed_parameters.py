"""What the coordinator's archive keeps beyond its run file, since somebody reads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from bootstrap.coordinator.stage import SeedStage
from dipaco_p2p.topology import ModuleId


def test_parameters_that_somebody_still_reads_are_not_dropped() -> None:
    """Best and served rounds, the last judged one and those after it, and where a decree goes back to."""
    decree = SimpleNamespace(document=SimpleNamespace(number=2, to=1))

    def needed(module: ModuleId, *, judged: int | None = 7, done: int = 1) -> set[int]:
        due = decree if decree.document.number > done else None
        ledger = SimpleNamespace(head=SimpleNamespace(version=9), due=lambda decrees: due)
        stage: Any = SimpleNamespace(
            run=SimpleNamespace(id="run"),
            _archive=SimpleNamespace(ledgers={module: ledger}),
            _node=SimpleNamespace(decrees=None),
            _judged=None if judged is None else {"version": judged},
            _serving={"rounds": {"P0-0": 3, "P0-1": 4}},
            _best=5,
        )
        return SeedStage._needed(stage, module)

    assert needed(ModuleId(1, 1)) == {1, 4, 5, 7, 8, 9}
    assert needed(ModuleId(0, 0)) == {1, 3, 4, 5, 7, 8, 9}, "all paths go through it"
    assert needed(ModuleId(1, 0), done=2) == {3, 5, 7, 8, 9}, "the decree was carried out"
    assert needed(ModuleId(1, 0), judged=None) >= set(range(10)), "after a start nothing is known to be judged"
