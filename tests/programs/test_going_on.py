"""With top128 a path goes on from where it is, not from the versions, which know little of it yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime_harness import World
from tiny_run import initial, make_run, tiny_config
from virtual_time import play

from dipaco_p2p.config import CompressionConfig, RunConfig
from dipaco_p2p.core.codec import decode_module
from dipaco_p2p.core.compress import compress
from dipaco_p2p.core.shards import Shard
from dipaco_p2p.node.store import Store
from dipaco_p2p.topology import ModuleId, PathId
from peers.contribute import Contributor
from peers.tenure import Tenure
from peers.trainer import Flat, PathTrainer
from peers.work import Work

PATH = PathId((0, 1, 0))
FIRST = initial()[0]


def config_of(uplink: str, *, decay: float = 1.0, **changes: Any) -> RunConfig:
    compression = CompressionConfig(uplink=uplink, error_decay=decay)
    return replace(tiny_config(rounds=3, **changes), compression=compression)


def trainer_of(folder: Path, config: RunConfig) -> PathTrainer:
    store = Store(folder)
    run = make_run(store, config)
    optimizer = store.get(run.manifest.optimizer.digest)
    assert optimizer is not None
    shard = Shard(tokens=np.zeros((2, config.model.context), dtype=np.int32))
    return PathTrainer(run, PATH, shard, optimizer=optimizer, device="cpu")


def trained(flats: list[Flat]) -> list[Flat]:
    lots = np.random.default_rng(3)
    return [flat + lots.standard_normal(flat.size).astype(np.float32) for flat in flats]


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_a_round_begins_where_the_path_is(tmp_path: Path, decay: float) -> None:
    trainer = trainer_of(tmp_path, config_of("top128", decay=decay))
    assert all(begun is flat for begun, flat in zip(trainer.beginning(FIRST), FIRST, strict=True)), "nothing is owed"
    sent = trainer.outer_gradients(FIRST, trained(FIRST))
    assert all(begun is flat for begun, flat in zip(trainer.beginning(FIRST), FIRST, strict=True)), "nobody took it"
    for gradient in sent:
        trainer.keep(gradient)
    for begun, flat, gradient in zip(trainer.beginning(FIRST), FIRST, sent, strict=True):
        np.testing.assert_array_equal(begun, flat - gradient.residual * np.float32(decay))


def test_standing_still_owes_what_was_owed(tmp_path: Path) -> None:
    """What a path did counts once: a round without a step sends and owes, together, what was owed before."""
    trainer = trainer_of(tmp_path, config_of("top128"))
    first = trainer.outer_gradients(FIRST, trained(FIRST))
    for gradient in first:
        trainer.keep(gradient)
    begun = trainer.beginning(FIRST)
    for gradient, before in zip(trainer.outer_gradients(begun, begun), first, strict=True):
        is_sent = gradient.residual != before.residual
        assert 0 < is_sent.sum() <= before.residual.size / 32 + 1
        assert np.abs(gradient.residual).max() <= np.abs(before.residual).max()


def test_codecs_that_lose_little_begin_at_the_version(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, config_of("int4"))
    for gradient in trainer.outer_gradients(FIRST, trained(FIRST)):
        assert gradient.residual.any()
        trainer.keep(gradient)
    assert all(begun is flat for begun, flat in zip(trainer.beginning(FIRST), FIRST, strict=True))


def test_volunteers_of_a_run_go_on_from_where_their_paths_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works: dict[tuple[PathId, int], Work] = {}
    versions: dict[tuple[ModuleId, int], Flat] = {}
    honest = Contributor.contribute

    async def noting(self: Contributor, tenure: Tenure, work: Work, **changes: Any) -> set[str]:
        works[tenure.path, work.round_number] = work
        return await honest(self, tenure, work, **changes)

    async def scenario() -> None:
        async with World(tmp_path, config=config_of("top128")) as world:
            for number in (1, 2, 3, 4):
                world.join(number)
            for volunteer in world.volunteers:
                await volunteer.done()
            for module, ledger in world.seed.archive.ledgers.items():
                for version in (sealed.document for sealed in ledger.versions):
                    data = world.seed.node.store.get(version.snapshot.digest)
                    if data is not None:
                        versions[module, version.version] = decode_module(data, world.run.layout(module))

    monkeypatch.setattr(Contributor, "contribute", noting)
    play(scenario)
    seen = 0
    for path in {path for path, _ in works}:
        owed: list[Flat | None] = [None] * len(FIRST)
        for number in range(3):
            work = works[path, number]
            for level, module in enumerate(path.modules()):
                before, after, residual = work.before[level], work.result.flats[level], owed[level]
                version = FIRST[level] if number == 0 else versions.get((module, number))
                if version is not None:
                    np.testing.assert_array_equal(before, version if residual is None else version - residual)
                    seen += residual is not None
                owed[level] = compress(before - after, residual, codec="top128")[1]
    assert seen >= 4 * len(FIRST)
