"""The volunteer's process at home: pushes both modules at once, waits for their next versions, and pulls them.

python -m benchmarks.line.volunteer FOLDER ADDRESS
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.transfer.helper import Handler, Values, serve
from benchmarks.transfer.volunteer import IdleVolunteer, gradients, joined
from dipaco_p2p.topology import ModuleId

from .network import line_bytes


class Home:
    """One volunteer, and what it sends and fetches."""

    def __init__(self, volunteer: IdleVolunteer) -> None:
        self._volunteer = volunteer
        self._gradient = gradients(volunteer.node.run)
        self._rounds = 0

    async def handle(self, values: Values) -> Values:
        """A round; before it everything is encoded, which takes no line."""
        if values["do"] == "open":
            return {"peer": self._volunteer.node.peer, "run": self._volunteer.node.run.id}
        volunteer, modules = self._volunteer, self._volunteer.modules
        self._rounds += 1
        payloads = {module: await asyncio.to_thread(self._encode, module) for module in modules}
        bases = {module: volunteer.version(module) for module in modules}
        before, began_s = line_bytes(), time.time()
        pushed = await asyncio.gather(*(volunteer.push(module, payloads[module]) for module in modules))
        pushed_s = time.time()
        applied_s = await volunteer.follow(bases)
        after = line_bytes()
        return {
            "began_s": began_s,
            "pushed_s": pushed_s,
            "uploaded_s": max(one.uploaded_s for one in pushed),
            "applied_s": {str(module): at_s for module, at_s in applied_s.items()},
            "payload_bytes": sum(map(len, payloads.values())),
            "up_bytes": after[0] - before[0],
            "down_bytes": after[1] - before[1],
        }

    def _encode(self, module: ModuleId) -> bytes:
        return self._volunteer.encode(module, self._gradient(module, self._rounds))


@contextlib.asynccontextmanager
async def opened(folder: Path, address: str) -> AsyncIterator[Handler]:
    """It takes part while the block runs."""
    async with joined(address, folder / "home") as volunteer:
        yield Home(volunteer).handle


def main() -> None:
    """Take part as the arguments say."""
    folder, address = sys.argv[1:]
    serve(lambda: opened(Path(folder), address))


if __name__ == "__main__":
    main()
