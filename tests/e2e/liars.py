"""Seeds that lie, inside the test process: they show the right run, and another time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from hivemind.proto import dht_pb2

from dipaco_p2p.clock import SystemClock
from dipaco_p2p.node.stages import Stages, fetch_stages
from dipaco_p2p.swarm.hivemind.libp2p import Libp2pSwarm, open_libp2p

START_S = 60.0


@contextlib.contextmanager
def clock_liar(folder: Path, honest: str, *, ahead_s: float) -> Iterator[str]:
    """The address of a peer that shows the run of `honest`, and says that it is `ahead_s` later."""
    ready, leave, loop = threading.Event(), asyncio.Event(), asyncio.new_event_loop()
    found: list[str] = []

    async def live() -> None:
        swarm = await open_libp2p(folder / "liar.key", ttl_max_s=60, clock=SystemClock())
        try:
            host = await swarm.connect(honest, timeout_s=10)
            stages = Stages(swarm)
            for run in await fetch_stages(swarm, host, expected=None):
                stages.add(run)
            _lie(swarm, ahead_s)
            found.append(swarm.addresses[0])
            ready.set()
            await leave.wait()
        finally:
            await swarm.close()

    thread = threading.Thread(target=loop.run_until_complete, args=[live()])
    thread.start()
    try:
        assert ready.wait(START_S), "the liar did not start"
        yield found[0]
    finally:
        loop.call_soon_threadsafe(leave.set)
        thread.join()
        loop.close()


def _lie(swarm: Libp2pSwarm, ahead_s: float) -> None:
    node = swarm._node
    assert node is not None

    async def ping(data: bytes, caller: object) -> bytes:
        answer = dht_pb2.PingResponse(peer=node.protocol.node_info, dht_time=time.time() + ahead_s, available=True)
        return bytes(answer.SerializeToString())

    swarm._p2p._client.control.unary_handlers["DHTProtocol.rpc_ping"] = ping
