"""The rival's process: hivemind's `DecentralizedAverager`, one per peer, each with a DHT process and a daemon.

    python -m benchmarks.transfer.rival VALUES PEERS COMPRESSION

Tensors are those of our module. A group is found before the clock starts: what counts is the all-reduce alone, from the
trigger until every peer has the average in its tensors. Its processes outlive their parent, so that the benchmark kills
the whole group at the end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch

from benchmarks.processes import Values, serve_plainly, spent
from dipaco_p2p.core.model.layout import module_layout
from dipaco_p2p.errors import DipacoError

from .runs import model_of

BLOCKWISE, UNIFORM, HALF, NONE = "8-bit blockwise", "8-bit uniform", "float16", "float32"
COMPRESSIONS = {
    BLOCKWISE: "BlockwiseQuantization",
    UNIFORM: "Uniform8BitQuantization",
    HALF: "Float16Compression",
    NONE: "NoCompression",
}
"""What the averager may do to tensors on the wire, both ways: its names in `hivemind.compression`."""
MATCHMAKING_S = 2.0
REQUEST_TIMEOUT_S = 1.5
"""It must be below the time of matchmaking."""
GROUP_S = 180.0
POLL_S = 0.005
ERROR_MAX = 0.1
"""Of the average's length: 8 bits lose a few per cent."""


class Averagers:
    """All peers of one group."""

    def __init__(self, values: int, count: int, compression: str) -> None:
        import hivemind
        from hivemind import compression as codecs

        layout = module_layout(model_of(values), 0)
        lots = np.random.default_rng(0)
        flat = lots.standard_normal(layout.size, dtype=np.float32) * np.float32(1e-3)
        self._start = [torch.from_numpy(view) for view in layout.split(flat).values()]
        self._dhts: list[Any] = []
        for _ in range(count):
            known = self._dhts[0].get_visible_maddrs() if self._dhts else None
            dht = hivemind.DHT(initial_peers=known, start=True, nat_port_map=False, auto_nat=False, use_relay=False)
            self._dhts.append(dht)
        self._averagers = [
            hivemind.DecentralizedAverager(
                [torch.zeros_like(tensor) for tensor in self._start],
                dht,
                start=True,
                prefix="transfer",
                target_group_size=count,
                min_group_size=count,
                min_matchmaking_time=MATCHMAKING_S,
                request_timeout=REQUEST_TIMEOUT_S,
                compression=getattr(codecs, COMPRESSIONS[compression])(),
            )
            for dht in self._dhts
        ]

    def handle(self, values: Values) -> Values:
        """One all-reduce, of values that differ from peer to peer."""
        if values["do"] == "open":
            return {}
        for number, averager in enumerate(self._averagers, start=1):
            with averager.get_tensors() as tensors:
                for tensor, start in zip(tensors, self._start, strict=True):
                    torch.mul(start, number, out=tensor)
        reduced = self._reduce()
        self._check()
        return reduced

    def _reduce(self) -> Values:
        steps = [averager.step(wait=False, require_trigger=True, timeout=GROUP_S) for averager in self._averagers]
        self._wait_group(steps)
        began_s, before = time.perf_counter(), spent(os.getpid())
        for step in steps:
            step.allow_allreduce()
        groups = [step.result(GROUP_S) for step in steps]
        seconds, used = time.perf_counter() - began_s, spent(os.getpid()).since(before)
        if any(len(group) != len(steps) for group in groups):
            raise DipacoError(f"hivemind averaged in groups of {[len(group) for group in groups]}")
        return {"seconds": seconds, "programs_s": used.programs_s, "daemons_s": used.daemons_s}

    def _wait_group(self, steps: Sequence[Any]) -> None:
        from hivemind.averaging.control import AveragingStage

        until_s = time.monotonic() + GROUP_S
        while not all(step.stage == AveragingStage.AWAITING_TRIGGER for step in steps):
            if time.monotonic() > until_s:
                raise DipacoError(f"hivemind found no group of {len(steps)} within {GROUP_S:.0f} s")
            time.sleep(POLL_S)

    def _check(self) -> None:
        """That it did what was asked: all have the mean, as far as its codec can say it."""
        mean = (len(self._averagers) + 1) / 2
        for averager in self._averagers:
            with averager.get_tensors() as tensors:
                wanted = self._start[0] * mean
                error = ((tensors[0] - wanted).norm() / wanted.norm()).item()
            if not error < ERROR_MAX:
                raise DipacoError(f"hivemind's average is {100 * error:.1f} % off")

    def close(self) -> None:
        """End its processes, as far as they do."""
        for part in (*self._averagers, *reversed(self._dhts)):
            part.shutdown()


@contextlib.contextmanager
def opened(values: int, count: int, compression: str) -> Iterator[Callable[[Values], Values]]:
    """Averagers while the block runs."""
    averagers = Averagers(values, count, compression)
    try:
        yield averagers.handle
    finally:
        averagers.close()


def _end_all(number: int, frame: FrameType | None, *, us: int = os.getpid()) -> None:
    if os.getpid() == us:
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    size, peers, wish = sys.argv[1:]
    signal.signal(signal.SIGTERM, _end_all)
    serve_plainly(lambda: opened(int(size), int(peers), wish))
