"""How many calls get no answer: `python -m benchmarks.calls`. Two processes, one call after the other over libp2p.

Every method can be called again, so a lost reply costs a second try and no more; but nothing should lose any. Run it
on a machine that is busy: that is when it showed.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.report import JsonFile, run_benchmark, write_json
from dipaco_p2p.clock import SystemClock
from dipaco_p2p.errors import SwarmError
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.swarm.hivemind.libp2p import open_libp2p

BODY = bytes(1500)
TTL_MAX_S = 60.0
TIMEOUT_S = 15.0
SERVER = "serve"


def main(
    seconds: Annotated[float, typer.Option(min=1, help="How long to call.")] = 150.0,
    json_file: JsonFile = None,
) -> None:
    """Call a second process again and again; exit code 1 if a call got no answer."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.calls", SERVER], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            figures = asyncio.run(_call(server.stdout.readline().strip(), seconds))
        finally:
            server.terminate()
    print(f"{figures['calls']} calls in {seconds:g} s, {figures['lost']} got no answer", flush=True)
    write_json(json_file, figures)
    raise typer.Exit(int(figures["lost"] > 0))


async def _call(address: str, seconds: float) -> dict[str, int]:
    calls = lost = 0
    with tempfile.TemporaryDirectory() as folder:
        swarm = await open_libp2p(
            Path(folder) / "identity.key", initial_peers=[address], ttl_max_s=TTL_MAX_S, clock=SystemClock()
        )
        try:
            peer = await swarm.connect(address, timeout_s=TIMEOUT_S)
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                calls += 1
                try:
                    await swarm.call(peer, "answer", {}, BODY, timeout_s=TIMEOUT_S, addresses=[address])
                except SwarmError as error:
                    lost += 1
                    print(f"call {calls}: {error}", flush=True)
        finally:
            await swarm.close()
    return {"calls": calls, "lost": lost}


async def _serve() -> None:
    async def answer(sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        return Reply({})

    with tempfile.TemporaryDirectory() as folder:
        swarm = await open_libp2p(Path(folder) / "identity.key", ttl_max_s=TTL_MAX_S, clock=SystemClock())
        swarm.serve("answer", answer)
        print(swarm.addresses[0], flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    if sys.argv[1:] == [SERVER]:
        asyncio.run(_serve())
    else:
        run_benchmark(main)
