"""A round closes when the last contribution that it waits for is in, whenever its leader would look next."""

from __future__ import annotations

from pathlib import Path

import pytest
from runtime_harness import World, offer
from tiny_run import contribution_of, gradient_bytes, tiny_config
from virtual_time import eventually, play

from dipaco_p2p.owner import leader as owner
from dipaco_p2p.topology import ModuleId

MODULE = ModuleId(1, 0)


def test_the_last_contribution_that_a_round_waits_for_closes_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "TICK_S", 1000.0)

    async def scenario() -> None:
        async with World(tmp_path, config=tiny_config(rounds=9)) as world:
            leader = world.leader(50)
            led = await leader.lead(MODULE)
            node = world.peer(60)
            await node.watch.refresh()
            base = {"module": MODULE, "base_digest": led.head.digest}
            for seed, path in enumerate(world.run.topology.paths_through(MODULE)):
                payload = gradient_bytes(world.run, MODULE, seed=seed)
                document = contribution_of(world.run, node.swarm.signer, payload, path=path, **base)
                await offer(node, leader.peer, document, payload)
            await eventually(lambda: led.head.version == 1)

    play(scenario)
