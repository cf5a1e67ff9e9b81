"""Nothing is routed to a path that was never trained, as long as another one was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runtime_harness import World
from tiny_run import MODEL, tiny_config
from virtual_time import eventually

from bootstrap.archives.evaluator import Evaluator
from dipaco_p2p.config import LevelConfig
from dipaco_p2p.core.model.inner import InnerResult
from dipaco_p2p.core.routing.router import Router
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.node.measuring import assign, trained_paths, witnesses
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.topology import ModuleId, PathId, Topology
from dipaco_p2p.use.served import ServedRun, _Folder
from peers.path.trainer import PathTrainer

GRID = Topology((1, 2, 2))
POINTS = np.random.default_rng(5).normal(size=(200, 6)).astype(np.float32)


def router() -> Router:
    weights = np.random.default_rng(4).normal(size=(4, 6)).astype(np.float32)
    zeros = np.zeros(4, np.float32)
    return Router(weights=weights, bias=zeros, mean=np.zeros(6, np.float32), scale=np.ones(6, np.float32))


def test_the_narrowest_level_says_it_of_all_paths() -> None:
    assert witnesses(GRID) == [ModuleId(0, 0)]
    assert witnesses(Topology((3, 2, 2))) == [ModuleId(1, 0), ModuleId(1, 1)]
    flat = Topology((4,), (True,))
    assert len(witnesses(flat)) == 4
    for topology in (GRID, Topology((3, 2, 2)), flat):
        assert {path for module in witnesses(topology) for path in topology.paths_through(module)} == set(
            topology.paths()
        )


def test_before_anything_was_counted_all_paths_are_as_good() -> None:
    assert trained_paths(GRID, []) == list(GRID.paths())


def test_with_all_paths_usable_it_is_the_router_itself() -> None:
    assert (assign(router(), POINTS, range(4)) == router().assign(POINTS)).all()


@pytest.mark.parametrize("missing", range(4))
def test_what_a_missing_path_would_get_goes_to_the_next_best(missing: int) -> None:
    usable = [number for number in range(4) if number != missing]
    order, found = router().top(POINTS, 2), assign(router(), POINTS, usable)
    is_its = order[:, 0] == missing
    assert is_its.any() and (found[is_its] == order[is_its, 1]).all()
    assert (found[~is_its] == order[~is_its, 0]).all()


async def test_a_path_that_failed_everywhere_is_neither_judged_nor_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopeless = PathId((0, 0, 1))
    honest = PathTrainer.train

    async def train(self: PathTrainer, *args: object, **changes: object) -> InnerResult:
        if self.path == hopeless:
            raise DipacoError("the loss is not finite")
        return await honest(self, *args, **changes)  # type: ignore[arg-type]

    monkeypatch.setattr(PathTrainer, "train", train)
    levels = (MODEL.levels[0], MODEL.levels[1], LevelConfig(modules=2, blocks=1))
    config = replace(tiny_config(rounds=2, min_paths=2), model=replace(MODEL, levels=levels))
    async with World(tmp_path, config=config) as world:
        ledgers = world.seed.archive.ledgers
        while any(ledger.head.version < 2 for ledger in ledgers.values()):
            for number in (1, 2, 3):
                if not any(v.number == number and v.task and not v.task.done() for v in world.volunteers):
                    world.join(number)
            before = [ledger.head.version for ledger in ledgers.values()]
            await eventually(
                lambda before=before: (
                    [ledger.head.version for ledger in ledgers.values()] != before
                    or all(v.task is not None and v.task.done() for v in world.volunteers)
                )
            )
        evaluator = Evaluator(world.run, world.seed.node.store, world.seed.archive)
        assert evaluator.usable(2) == [0, 2, 3] and evaluator.usable(0) == [0, 1, 2, 3]
        judged = evaluator.evaluate(2).paths
        assert judged[hopeless].validation is None
        served = ServedRun(world.run, _Folder(world.run, world.seed.node.store, {}))
        assert await served.usable() == [0, 2, 3]


def test_a_run_in_which_every_path_was_trained_uses_all(finished: tuple[Run, Path]) -> None:
    run, store = finished[0], Store(finished[1])
    evaluator = Evaluator(run, store, SeedArchive(run, store))
    assert [evaluator.usable(version) for version in (0, 1, 2)] == [[0, 1, 2, 3]] * 3
