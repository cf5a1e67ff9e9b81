"""A stranger that wants to lead: it asks the coordinator for every module, and never stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_harness import Program, Programs, eventually, write_corpus, write_run
from hostile_harness import HONEST, Attacker, Background, Target

from dipaco_p2p.clock import SystemClock
from dipaco_p2p.errors import SwarmError
from dipaco_p2p.node.items import read_items
from dipaco_p2p.node.stages import fetch_stages
from dipaco_p2p.protocol.documents import Grant
from dipaco_p2p.protocol.liveness import Heartbeat
from dipaco_p2p.protocol.records import peers_key
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.strict import plain
from dipaco_p2p.swarm.hivemind.libp2p import open_libp2p

pytestmark = pytest.mark.libp2p

MODULES = ("L0.M0", "L1.M0", "L1.M1")
TTL_S = 8.0
"""Long, so that whoever should lead has its time on a busy machine, too."""
ASK_EVERY_S = 0.02


@contextlib.contextmanager
def greedy(coordinator: Program, folder: Path) -> Iterator[Counter[str]]:
    """What a stranger hears that asks the coordinator for each next term of every module, while the block runs."""
    address = coordinator.wait_address()["address"]
    heard: Counter[str] = Counter()
    background = Background()

    async def live() -> None:
        swarm = await open_libp2p(folder / "greedy.key", initial_peers=[address], ttl_max_s=60, clock=SystemClock())
        try:
            target = Target("coordinator", coordinator, PeerId(address.rpartition("/")[2]), address)
            [run] = await fetch_stages(swarm, target.peer, expected=None)
            attacker = Attacker(swarm, run)
            await asyncio.gather(_beat(attacker), *(_ask(attacker, target, module, heard) for module in MODULES))
        finally:
            await swarm.close()

    living = background.start(live())
    try:
        yield heard
    finally:
        assert not living.done(), living.exception()
        living.cancel()
        background.run(asyncio.sleep(1.0))
        background.stop()


async def _beat(attacker: Attacker) -> None:
    heartbeat = plain(Heartbeat(addresses=attacker.swarm.addresses, owns=True))
    while True:
        await attacker.scoped.put(peers_key(attacker.run.id), heartbeat, ttl_s=TTL_S)
        await asyncio.sleep(TTL_S / 3)


async def _ask(attacker: Attacker, target: Target, module: str, heard: Counter[str]) -> None:
    while True:
        with contextlib.suppress(SwarmError):
            shown = await read_items(Grant, await attacker.call(target, "module.mandate", {"module": module}))
            term = shown[-1].document.term + 1 if shown else 1
            header = {"module": module, "term": term, "mirrors": [], "mandate": []}
            heard[await attacker.ask(target, "archive.adopt", header)] += 1
        await asyncio.sleep(ASK_EVERY_S)


def has_worked(author: Program, leader: Program) -> bool:
    """Whether a version of `leader` counts a contribution of `author`."""
    counted = {id_ for event in leader.events("version") for id_ in event["contributions"]}
    return any(event["id"] in counted for event in author.events("receipt"))


def leads(volunteer: Program) -> set[str]:
    """The modules that it leads, or once did, by its own history."""
    return {event["module"] for event in volunteer.events("leads")}


def test_a_stranger_takes_no_module_from_those_who_work_when_a_leader_dies(tmp_path: Path) -> None:
    """Attack: three of four modules were a stranger's 3.8 s after a leader died, ahead of two volunteers."""
    run_file = write_run(
        tmp_path / "run.toml",
        write_corpus(tmp_path / "corpus.jsonl"),
        rounds=100_000,
        min_paths=1,
        heartbeat_ttl_s=TTL_S,
    )
    programs = Programs(tmp_path)
    try:
        coordinator = programs.coordinator(run_file, tmp_path / "coordinator")
        address = coordinator.wait_address()["address"]
        first = programs.volunteer(address, "first")
        first.wait_event("leads", count=len(MODULES))
        second = programs.volunteer(address, "second")
        eventually(lambda: has_worked(second, first), what=lambda: second.complaint[-2000:])
        with greedy(coordinator, tmp_path) as heard:
            eventually(lambda: heard["not-leader"] >= len(MODULES), what=lambda: f"{heard}")
            led = leads(first)
            first.kill()
            eventually(lambda: heard[HONEST] or leads(second) >= led, what=lambda: f"{heard} {led} {leads(second)}")
            versions = len(second.events("version"))
            second.wait_event("version", count=versions + 2)
        assert heard[HONEST] == 0, heard
    finally:
        programs.end_all()
