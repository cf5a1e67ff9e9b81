"""A run from outside: only the one that was asked for, of this protocol, whose parts fit its model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime_harness import SEED_NUMBER, World, make_run, signer, tiny_config
from virtual_time import play

from dipaco_p2p.core.compress import compress, encode_compressed
from dipaco_p2p.errors import IntegrityError, WrongRun
from dipaco_p2p.protocol.documents import BlobRef, GenesisRef, seal
from dipaco_p2p.runtime.join import fetch_run, serve_manifest
from dipaco_p2p.runtime.run import Run, open_run
from dipaco_p2p.runtime.store import Store
from dipaco_p2p.swarm.api import Reply


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(Store(tmp_path / "seed"), tiny_config())


def test_a_run_survives_the_wire(run: Run) -> None:
    again = open_run(run.sealed.to_dict(), expected=run.name)
    assert again.id == run.id and again.manifest == run.manifest


def test_another_run_than_the_expected_one_is_refused(run: Run) -> None:
    with pytest.raises(WrongRun, match="00000000"):
        open_run(run.sealed.to_dict(), expected="run:00000000")


def test_another_protocol_is_named_before_anything_else(run: Run) -> None:
    value = run.sealed.to_dict()
    value["document"] = {"protocol": 99}
    with pytest.raises(WrongRun, match="protocol 99"):
        open_run(value)


@pytest.mark.parametrize("value", [None, [], {}, {"document": 3, "signature": ""}, "run"])
def test_something_else_is_no_run(value: Any) -> None:
    with pytest.raises((IntegrityError, WrongRun)):
        open_run(value)


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


def test_bounds_hold_every_honest_payload(run: Run) -> None:
    import numpy as np

    for module in run.topology.modules():
        values = np.ones(run.layout(module).size, dtype=np.float32)
        assert len(encode_compressed(compress(values)[0])) <= run.payload_bytes_max(module)


def test_a_newcomer_gets_the_run_of_the_address(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path) as world:
            newcomer = world.network.join(signer(9))
            found = await fetch_run(newcomer, world.seed.node.peer, expected=None)
            assert found.id == world.run.id

    play(scenario)


def test_without_the_runs_name_only_its_author_is_believed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path) as world:
            other, newcomer = world.network.join(signer(8)), world.network.join(signer(9))
            serve_manifest(other, world.run.sealed)
            with pytest.raises(WrongRun, match="another peer"):
                await fetch_run(newcomer, other.peer, expected=None)
            assert (await fetch_run(newcomer, other.peer, expected=world.run.id[:12])).id == world.run.id

    play(scenario)


def test_an_address_of_something_else_is_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path) as world:
            silent, odd = world.network.join(signer(7)), world.network.join(signer(8))
            newcomer = world.network.join(signer(9))

            async def answer(*_: Any) -> Reply:
                return Reply({}, b"hello")

            odd.serve("run.manifest", answer)
            with pytest.raises(WrongRun, match="another program"):
                await fetch_run(newcomer, silent.peer, expected=None)
            with pytest.raises(WrongRun, match="no run"):
                await fetch_run(newcomer, odd.peer, expected=None)

    play(scenario)
