"""A run that is still in its warm-up can be used like any other: one path, and nothing to route."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from serving_harness import COORDINATOR, PRIVATE, PROMPT, ROUNDS, TIED, Served, make_served, serve_archive
from typer.testing import CliRunner
from virtual_time import VirtualClock, play

from bootstrap import cli
from bootstrap.export import export_path
from bootstrap.generate import Request, write_on
from bootstrap.served_swarm import read_swarm
from bootstrap.serving import ServedRun
from dipaco_p2p.node.presence import Presence
from dipaco_p2p.node.stages import Stages
from dipaco_p2p.node.transfer import serve_store
from dipaco_p2p.protocol.liveness import Heartbeat
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.swarm.memory import MemoryNetwork
from dipaco_p2p.swarm.stage_scope import ScopedSwarm
from dipaco_p2p.topology import PathId

GREEDY = Request(prompt=PROMPT, tokens_max=30, temperature=0)
PATH = PathId((0, 0, 0))
HOLDOUT = {"P0-0-0": [5.0, 4.0, 3.0, 3.5]}


@pytest.fixture(scope="module", params=["tied", "private"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    model = {"tied": TIED, "private": PRIVATE}[request.param]
    found = make_served(tmp_path_factory.mktemp(request.param), model=model, stage="warmup")
    found.write_evaluations(HOLDOUT)
    return found


async def written(run: ServedRun, request: Request) -> tuple[str, list[str]]:
    pieces: list[str] = []
    said: list[str] = []
    await write_on(run, request, write=pieces.append, say=said.append)
    return "".join(pieces), said


@pytest.mark.parametrize(("best", "version"), [(False, ROUNDS), (True, 2)])
def test_its_one_path_writes(served: Served, best: bool, version: int) -> None:
    request = Request(prompt=PROMPT, tokens_max=30, temperature=0, best=best)
    text, [said] = asyncio.run(written(served.open(), request))
    assert text and said.startswith(f"P0-0-0: L0.M0 version {version}, ")


def test_its_one_path_is_exported_without_a_router(served: Served, tmp_path: Path) -> None:
    asyncio.run(export_path(served.open(), PATH, tmp_path / "out", best=True))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in served.model(PATH, 2).state_dict().items():
        np.testing.assert_array_equal(tensors[name], value.numpy())
    assert not [path for path in (tmp_path / "out").iterdir() if "router" in path.name]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "still in its warm-up" in card and "router.safetensors" not in card
    assert f"- stage: warmup, `{served.run.id}`" in card and "- round: 2 of 3" in card


@pytest.mark.parametrize(
    ("flags", "words", "hint"),
    [
        (("--path", "P0-1-1"), "has no path P0-1-1", "still in its warm-up, which has the one path P0-0-0"),
        (("--every", "16"), "has no router that can be asked inside a text", "leave --every out"),
    ],
)
def test_what_only_a_grid_has_is_one_line(served: Served, flags: tuple[str, ...], words: str, hint: str) -> None:
    result = CliRunner().invoke(cli.app, ("generate", str(served.root), PROMPT, *flags))
    [first, second] = result.stderr.splitlines()
    assert result.exit_code == 2 and words in first and hint in second


def test_a_live_warm_up_is_read_too(served: Served, tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = VirtualClock()
        network = MemoryNetwork(0, clock)
        seed = network.join(COORDINATOR)
        Stages(seed).add(served.run)
        scoped = ScopedSwarm(seed, served.run.id)
        serve_store(scoped, served.store)
        serve_archive(served, scoped, clock)
        await Presence(served.run, scoped, clock, Heartbeat(role="seed", owns=True)).beat()
        reader = network.join(Signer(bytes([9]) * 32))
        run = await read_swarm(reader, seed.peer, clock, folder=tmp_path, expected=None)
        assert await written(run, GREEDY) == await written(served.open(), GREEDY)

    play(scenario)
