"""One peer of hivemind's `DecentralizedAverager`, on a machine of a town.

    python -m benchmarks.town.rival VALUES MODULES PEERS NUMBER [ADDRESS]     ADDRESS is the first one's

Its tensors are those of our path. A group is found before the clock starts: what counts is the all-reduce alone, from
the trigger until this peer has the average in its tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from types import FrameType
from typing import Any

import numpy as np
import torch

from benchmarks.processes import Handler, Values, serve
from benchmarks.transfer.owner import WEIGHT_STD, model_of
from dipaco_p2p.core.model.layout import module_layout
from dipaco_p2p.errors import DipacoError

MATCHMAKING_S, REQUEST_S = 5.0, 3.0
GROUP_S, SENDER_S = 400.0, 150.0
"""Of a sender that is slower than 30 s for a part it makes an average without that part."""
POLL_S = 0.005


class Averager:
    """One peer."""

    def __init__(self, values: int, modules: int, peers: int, number: int, address: str | None) -> None:
        from hivemind.averaging import DecentralizedAverager  # takes seconds
        from hivemind.compression import BlockwiseQuantization
        from hivemind.dht import DHT

        model = model_of(values, modules=modules)
        self._number, self._mean, self._peers = number, (peers + 1) / 2, peers
        self._start = []
        for level in range(modules):
            layout = module_layout(model, level)
            flat = np.random.default_rng(level).standard_normal(layout.size, dtype=np.float32) * np.float32(WEIGHT_STD)
            self._start += [torch.from_numpy(view) for view in layout.split(flat).values()]
        place = {"host_maddrs": ["/ip4/0.0.0.0/tcp/0"], "nat_port_map": False, "auto_nat": False, "use_relay": False}
        self._dht = DHT(initial_peers=[address] if address else None, start=True, **place)
        self._averager = DecentralizedAverager(
            [torch.zeros_like(tensor) for tensor in self._start],
            self._dht,
            start=True,
            prefix="town",
            target_group_size=peers,
            min_group_size=peers,
            min_matchmaking_time=MATCHMAKING_S,
            request_timeout=REQUEST_S,
            sender_timeout=SENDER_S,
            reducer_timeout=2 * SENDER_S,
            compression=BlockwiseQuantization(),
        )
        self._step: Any = None

    async def handle(self, values: Values) -> Values:
        """Say where we are, look for a group, or reduce with it."""
        return await asyncio.to_thread(
            {"open": self._places, "prepare": self._meet, "round": self._reduce}[values["do"]]
        )

    def _places(self) -> Values:
        return {"addresses": [str(place) for place in self._dht.get_visible_maddrs()]}

    def _meet(self) -> Values:
        from hivemind.averaging.control import AveragingStage

        with self._averager.get_tensors() as tensors:
            for tensor, start in zip(tensors, self._start, strict=True):
                torch.mul(start, self._number, out=tensor)
        self._step = self._averager.step(wait=False, require_trigger=True, timeout=GROUP_S)
        until_s = time.monotonic() + GROUP_S
        while self._step.stage != AveragingStage.AWAITING_TRIGGER:
            if time.monotonic() > until_s:
                raise DipacoError(f"hivemind found no group of {self._peers} within {GROUP_S:.0f} s")
            time.sleep(POLL_S)
        return {}

    def _reduce(self) -> Values:
        began_s = time.time()
        self._step.allow_allreduce()
        group = self._step.result(GROUP_S)
        ended_s = time.time()
        if len(group) != self._peers:
            raise DipacoError(f"hivemind averaged in a group of {len(group)}")
        with self._averager.get_tensors() as tensors:
            pairs = [(tensor, start * self._mean) for tensor, start in zip(tensors, self._start, strict=True)]
            off = max(((tensor - mean).norm() / mean.norm()).item() for tensor, mean in pairs)
        return {"began_s": began_s, "ended_s": ended_s, "off": off}


@contextlib.asynccontextmanager
async def opened(values: int, modules: int, peers: int, number: int, address: str | None) -> AsyncIterator[Handler]:
    """One peer while the block runs; its processes outlive ours, and the benchmark kills the whole group."""
    yield Averager(values, modules, peers, number, address).handle


def _end_all(number: int, frame: FrameType | None, *, us: int = os.getpid()) -> None:
    if os.getpid() == us:
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    *counts, last = sys.argv[1:] if sys.argv[-1].startswith("/") else [*sys.argv[1:], ""]
    size, modules_, peers_, number_ = map(int, counts)
    signal.signal(signal.SIGTERM, _end_all)
    serve(lambda: opened(size, modules_, peers_, number_, last or None))
