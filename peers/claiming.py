"""A volunteer's claim: which path it trains, said to all, and given up when it is needed more elsewhere.

The rules are in protocol/claims.py; here they meet the swarm and the disk.
"""

from __future__ import annotations

import zlib
from pathlib import Path

from dipaco_p2p.protocol.claims import (
    CLAIM_TRANSITIONS,
    ClaimEvent,
    ClaimState,
    PathClaims,
    choose_path,
    ranking,
    should_yield,
)
from dipaco_p2p.protocol.machine import follow
from dipaco_p2p.runtime.node import Node
from dipaco_p2p.topology import PathId


class Claiming:
    """One volunteer's claim, from choosing a path to releasing it."""

    def __init__(self, node: Node, folder: Path) -> None:
        self._node = node
        self._folder = folder
        """Where the states of the paths are that this machine has trained."""
        self._state = ClaimState.IDLE
        self._path: PathId | None = None

    async def claim(self) -> PathId | None:
        """Choose, say so, wait, look who else did; until a path is ours to keep. None when all are finished."""
        attempt = 0
        while True:
            await self._node.watch.refresh()
            if not self.unfinished():
                return None
            path = await self._try(attempt)
            if not should_yield(self._node.peer, path, self.unfinished()):
                break
            attempt += 1
            await self.release(ClaimEvent.YIELDED)
        self._follow(ClaimEvent.STAYED)
        self._node.presence.note(path=path)
        self._node.history.add("claimed", path=str(path), round=self._node.watch.round(path))
        return path

    async def release(self, event: ClaimEvent) -> None:
        """Say that nobody here trains the path any more; nothing to do without a claim."""
        if self._state is not ClaimState.IDLE:
            self._follow(event)
            await self._node.presence.release()
            self._node.history.add("released", path=str(self._path))
            self._node.presence.note(path=None)

    async def is_needed_elsewhere(self, path: PathId) -> bool:
        """A replica of a covered path goes where nobody is."""
        await self._node.watch.read_claims()
        return should_yield(self._node.peer, path, self.unfinished())

    def unfinished(self) -> PathClaims:
        """The claims of the paths that still have rounds to train."""
        watch, last = self._node.watch, self._node.run.config.rounds.rounds
        return {path: claims for path, claims in watch.claims.items() if watch.round(path) < last}

    def replica(self, path: PathId) -> int:
        """Our place among the claimants of `path`."""
        order = ranking(path, self._node.watch.claims[path])
        return order.index(self._node.peer) if self._node.peer in order else 0

    async def _try(self, attempt: int) -> PathId:
        watch, claims = self._node.watch, self.unfinished()
        rounds = {path: watch.round(path) for path in claims}
        seed = zlib.crc32(f"{self._node.peer}|{attempt}".encode())
        path = self._path = choose_path(claims, rounds, seed=seed, preferred=self._path_of_last_time())
        self._follow(ClaimEvent.CHOSE)
        await self._node.presence.claim(path, since_s=self._node.clock.now_s(), round_number=rounds[path])
        await self._node.clock.sleep(self._node.run.config.liveness.settle_s)
        await watch.read_claims()
        return path

    def _path_of_last_time(self) -> PathId | None:
        """The path whose optimizer state is on this machine's disk."""
        files = sorted(self._folder.glob("*.inner.safetensors"), key=lambda file: file.stat().st_mtime)
        return PathId.parse(files[-1].name.split(".")[0]) if files else None

    def _follow(self, event: ClaimEvent) -> None:
        self._state = follow(CLAIM_TRANSITIONS, self._state, event)
