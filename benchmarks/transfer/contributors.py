"""The contributors' process: some volunteers, each with a swarm, a disk and a daemon of its own, in one program.

python -m benchmarks.transfer.contributors FOLDER ADDRESS NUMBER...      one volunteer for each number
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path

from dipaco_p2p.core.arrays import Floats

from .helper import Handler, Values, serve
from .volunteer import IdleVolunteer, gradients, joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One contributor's part of a round; times in seconds since the epoch."""

    bytes: int
    encoded_s: float
    uploaded_s: float
    receipt_s: float
    applied_s: float
    kept_s: float
    """Its chain on its disk says so, too."""


class Contributors:
    """Those of one process."""

    def __init__(self, volunteers: dict[int, IdleVolunteer]) -> None:
        self._volunteers = volunteers
        run = next(iter(volunteers.values())).node.run
        [self._module] = run.topology.modules()
        self._gradient = gradients(run)
        self._prepared: dict[int, Floats] = {}
        self._encoding = asyncio.Lock()
        """As many processes as cores: more than one at a time would only wait for each other."""

    async def handle(self, values: Values) -> Values:
        """Prepare the next round's outer gradients, as the rival's tensors are there before its clock starts, or play
        that round."""
        if values["do"] == "prepare":
            await asyncio.to_thread(self._prepare)
            return {}
        began_s = time.time()
        turns = await asyncio.gather(*(self._round(*item) for item in self._volunteers.items()))
        return {"began_s": began_s, "turns": [asdict(turn) for turn in turns]}

    def _prepare(self) -> None:
        self._prepared = {number: self._gradient(self._module, number) for number in self._volunteers}

    async def _round(self, number: int, volunteer: IdleVolunteer) -> Turn:
        module, base = self._module, volunteer.version(self._module)
        async with self._encoding:
            payload = await asyncio.to_thread(self._encode, volunteer, number)
        encoded_s = time.time()
        pushed = await volunteer.push(module, payload)
        applied_s = (await volunteer.follow({module: base}))[module]
        return Turn(
            bytes=pushed.bytes,
            encoded_s=encoded_s,
            uploaded_s=pushed.uploaded_s,
            receipt_s=pushed.receipt_s,
            applied_s=applied_s,
            kept_s=time.time(),
        )

    def _encode(self, volunteer: IdleVolunteer, number: int) -> bytes:
        return volunteer.encode(self._module, self._prepared.pop(number))


@contextlib.asynccontextmanager
async def opened(folder: Path, address: str, numbers: list[int]) -> AsyncIterator[Handler]:
    """These volunteers take part while the block runs."""
    async with contextlib.AsyncExitStack() as stack:
        volunteers = {}
        for number in numbers:
            volunteers[number] = await stack.enter_async_context(joined(address, folder / f"contributor-{number}"))
        yield Contributors(volunteers).handle


def main() -> None:
    """Take part as the arguments say."""
    folder, address, *numbers = sys.argv[1:]
    serve(lambda: opened(Path(folder), address, [int(number) for number in numbers]))


if __name__ == "__main__":
    main()
