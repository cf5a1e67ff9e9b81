"""A coordinator and volunteers as processes of their own, and what the kernel and their histories say of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bootstrap.processes import Child, Children, require_alive
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.program.history import read_history
from peers.governor.machine import cpu_of

T = TypeVar("T")

POLL_S = 0.1
START_S = 300.0
RUN = """\
[run]
name = "limits"
[warmup]
rounds = 0
[model]
context = 512
[[model.levels]]
modules = 1
embedding = true
head = true
blocks = 1
[[model.levels]]
modules = 2
blocks = 2
[inner]
steps = 10
batch = 32
[rounds]
rounds = 100000
min_paths = 1
deadline_s = 300.0
[liveness]
heartbeat_ttl_s = 15.0
[corpus]
source = {corpus}
validation_share = 0.02
holdout_share = 0.02
router_share = 0.02
[leaderboard]
serve = false
[node]
host = "127.0.0.1"
port = 0
"""


@dataclass(slots=True)
class Volunteer:
    """One volunteer's process."""

    child: Child
    home: Path

    @property
    def pid(self) -> int:
        return self.child.process.pid

    def events(self, *names: str) -> list[dict[str, Any]]:
        """What its history says under these names, in order."""
        found = [event for path in self.home.glob("runs/*/history.jsonl") for event in read_history(path)]
        return [event for event in found if event["ev"] in names]

    async def until(self, look: Callable[[], T | None], what: str, *, within_s: float = START_S) -> T:
        """The first answer of `look`; raises DipacoError when the volunteer ends before, or nothing comes."""
        deadline_s = time.monotonic() + within_s
        while (found := look()) is None:
            require_alive(self.child, f"waiting for {what}")
            if time.monotonic() > deadline_s:
                raise DipacoError(f"{self.child.name}: no {what} within {within_s:g} s", hint=f"see {self.child.log}")
            await asyncio.sleep(POLL_S)
        return found

    async def event(self, name: str, **values: Any) -> dict[str, Any]:
        """The first event like this."""

        def look() -> dict[str, Any] | None:
            matching = (e for e in self.events(name) if all(e.get(key) == value for key, value in values.items()))
            return next(matching, None)

        return await self.until(look, f"`{name}`")

    def cpu_s(self) -> float:
        """Processor time of it and its daemons so far."""
        return sum(map(cpu_of, [self.pid, *_children(self.pid)]))

    def memory_bytes(self) -> int:
        """The most that it had since it last forgot, and what its daemons have."""
        return _size(self.pid, "VmHWM") + sum(_size(pid, "VmRSS") for pid in _children(self.pid))

    def home_bytes(self) -> int:
        """What its folder takes of the disk."""
        total = 0
        for path in self.home.rglob("*"):
            with contextlib.suppress(OSError):
                total += path.lstat().st_blocks * 512
        return total


class Scene:
    """A coordinator whose run never ends, and volunteers one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._children = Children(threads=1)
        self._address = ""

    async def __aenter__(self) -> Scene:
        corpus, run_file, home = self.folder / "corpus.jsonl", self.folder / "run.toml", self.folder / "coordinator"
        _write_corpus(corpus)
        run_file.write_text(RUN.format(corpus=json.dumps(str(corpus))))
        log = self.folder / "coordinator.log"
        child = await self._children.start(
            "coordinator", "bootstrap.cli", "start", str(run_file), "--dir", str(home), log=log
        )
        deadline_s = time.monotonic() + START_S
        while not (log.exists() and "dipaco-peer join" in log.read_text(errors="replace")):
            require_alive(child, "preparing its run")
            if time.monotonic() > deadline_s:
                raise DipacoError(f"the coordinator is not ready after {START_S:g} s", hint=f"see {log}")
            await asyncio.sleep(POLL_S)
        self._address = json.loads((home / "address.json").read_text())["address"]
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._children.end_all()

    @contextlib.asynccontextmanager
    async def volunteer(self, name: str, *wishes: str) -> AsyncIterator[Volunteer]:
        """A volunteer that nobody can dial, so that it trains and leads nothing, while the block runs."""
        home = self.folder / name
        words = ["join", self._address, "--home", str(home), "--engine", "exact", "--threads", "1", "--no-listen"]
        child = await self._children.start(name, "peers.cli", *words, *wishes, log=self.folder / f"{name}.log")
        try:
            yield Volunteer(child, home)
        finally:
            await child.end()


def _write_corpus(path: Path, *, documents: int = 1500, words: int = 300) -> None:
    chance = random.Random(1)
    known = ["".join(chance.choices("abcdefghijklmnopqrst", k=chance.randint(2, 9))) for _ in range(3000)]
    texts = (" ".join(chance.choices(known, k=words)) for _ in range(documents))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                yield from map(int, (task / "children").read_text().split())


def _size(pid: int, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0
