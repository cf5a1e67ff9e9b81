"""A card that plays games: a volunteer trains, another program wants the GPU, and is done.

The other program says itself when it has the card: products of matrices in a loop, counted in quarters of a second.
The volunteer is a whole one, `dipaco-peer` with a coordinator; what it says is read from its history.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dipaco_p2p.errors import DipacoError

from .case import Bench, Figures
from .swarm import config

if TYPE_CHECKING:
    from bootstrap.demo import Demo

WANTED_S = 2.0
PLAYED_S = 15.0
ROUND_STEPS = 3000
"""Half a minute of an H200."""
WINDOW_S = 0.25
ITS_OWN = 0.9
"""Of its best speed: then it has the card for itself."""
START_LIMIT_S, RESUME_LIMIT_S = 150.0, 90.0
POLL_S = 0.1
GAME = f"""
import json, sys, time, torch
device, played_s = sys.argv[1], float(sys.argv[2])
size = 4096 if device.startswith("cuda") else 256
left, right = (torch.randn(size, size, device=device) for _ in range(2))
wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
began_s, rates = time.perf_counter(), []
while time.perf_counter() - began_s < played_s:
    window_s, done = time.perf_counter(), 0
    while time.perf_counter() - window_s < {WINDOW_S}:
        left @ right
        wait()
        done += 1
    rates.append(done / (time.perf_counter() - window_s))
print(json.dumps(rates))
"""


def games(bench: Bench) -> Figures:
    """Seconds until the other program has the card, whether the volunteer says so, and until it trains again."""
    return asyncio.run(_played(bench))


async def _played(bench: Bench) -> Figures:
    from bootstrap.demo import Demo, run_text
    from bootstrap.processes import Children

    folder = bench.folder / "games"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    # Rounds that outlast the game: else the volunteer would wait for judges, not train, most of that time.
    steps = config(bench).steps if bench.is_small else ROUND_STEPS
    wanted = replace(config(bench), peers=1, grid="1x2", rounds=500, steps=steps, kills=0)
    run_file = folder / "run.toml"
    run_file.write_text(run_text(wanted), "utf-8")
    demo = Demo(wanted, folder, children=Children(threads=wanted.threads))
    try:
        await demo.start_coordinator(run_file)
        name = await demo.start_volunteer()
        await _until(lambda: _trains(demo, name, since_s=0.0), START_LIMIT_S)
        began_s = time.time()
        rates = await _play(bench.device, 2.0 if bench.is_small else PLAYED_S)
        ended_s = time.time()
        said = [event["detail"] for event in demo.events(name) if event["ev"] == "paused" and event["t"] >= began_s]
        await _until(lambda: _trains(demo, name, since_s=ended_s) or not said, RESUME_LIMIT_S)
        resumed_s = time.time() - ended_s
    finally:
        await demo.end()
    has_it_s = own_after_s(rates)
    return {
        "has_it_s": has_it_s,
        "said": said,
        "resumed_s": resumed_s if said else None,
        "ok": has_it_s <= WANTED_S and any("yielding" in words for words in said),
    }


def own_after_s(rates: Sequence[float]) -> float:
    """Seconds until a program is as quick as at its best, and stays so."""
    shared = [place for place, rate in enumerate(rates) if rate < ITS_OWN * max(rates)]
    return WINDOW_S * (shared[-1] + 1) if shared else 0.0


def _trains(demo: Demo, name: str, *, since_s: float) -> bool:
    """Whether the last thing that it did since then is training."""
    doing: list[dict[str, Any]] = [event for event in demo.events(name) if event["ev"] in ("doing", "paused")]
    return bool(doing) and doing[-1]["t"] >= since_s and doing[-1].get("doing") == "training"


async def _play(device: str, played_s: float) -> list[float]:
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-c", GAME, device, str(played_s))
    game = await asyncio.create_subprocess_exec(*command, stdout=pipe)
    said, _ = await game.communicate()
    if game.returncode:
        raise DipacoError(f"the other program ended with {game.returncode}", hint="see the log of this part")
    rates: list[float] = json.loads(said)
    return rates


async def _until(holds: Callable[[], bool], limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        while not holds():
            await asyncio.sleep(POLL_S)
