"""The inner states of paths: kept on this machine's disk for whoever trains the path next, and fetched from others.

Which state is a path's newest stands in the chain: the newest version of its modules that counts the path names the
state after that work, and who has it. The last two of each path are kept, since the newest may not be counted yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from dipaco_p2p.canonical import is_digest
from dipaco_p2p.errors import IntegrityError, SwarmError
from dipaco_p2p.node.node import Member, fetch
from dipaco_p2p.node.sizes import state_bytes_max
from dipaco_p2p.protocol.documents import BlobRef, Share
from dipaco_p2p.protocol.signing import PeerId, short
from dipaco_p2p.topology import PathId

from .outbox import read_checked, write_checked
from .trainer import PathTrainer

log = logging.getLogger(__name__)

KEPT = 2
PREFIX = "state-"


class InnerStates:
    """The states that are in this peer's store; anyone may read them there, like all its blobs."""

    def __init__(self, node: Member) -> None:
        self._node = node

    def held(self) -> set[PathId]:
        """The paths of which there is a state here."""
        return {PathId.parse(name.removeprefix(PREFIX)) for name in self._node.store.documents(PREFIX)}

    def keep(self, path: PathId, data: bytes) -> BlobRef:
        """Keep the newest state of `path`, and drop what is older than the last two."""
        ref = self._node.store.put(data)
        names = [name for name in self._names(path) if name != ref.digest] + [ref.digest]
        write_checked(self._node.store, f"{PREFIX}{path}", names[-KEPT:])
        for name in names[:-KEPT]:
            self._node.store.drop(name)
        return ref

    async def restore(self, trainer: PathTrainer, shares: Iterable[Share]) -> bool:
        """Bring `trainer` to its path's newest state; whether that is another volunteer's word.

        `shares` are what the newest versions count of the path. If nobody who is named there gives its state, the
        newest on this disk must do, and else the start; a history event says which.
        """
        named = sorted((share for share in shares if share.state is not None), key=self._preference)
        for share in named:
            if share.state is not None and await self._try(trainer, share.state, share.peer):
                self._say(trainer.path, "ours" if share.peer == self._node.peer else "fetched", peer=share.peer)
                return share.peer != self._node.peer
        if named and await self._from_disk(trainer):
            self._say(trainer.path, "older")
        else:
            self._say(trainer.path, "lost" if named else "start")
        return False

    def _preference(self, share: Share) -> tuple[int, bool, int, str]:
        """The newest first; of replicas our own, then the one that trained most."""
        return -share.base_version, share.peer != self._node.peer, -share.tokens, share.contribution

    async def _try(self, trainer: PathTrainer, ref: BlobRef, peer: PeerId) -> bool:
        limit = state_bytes_max(self._node.run.config, trainer.path)
        holders = [peer] if peer in self._node.watch.heartbeats else []
        try:
            if ref.size > limit:
                raise IntegrityError(f"a state of {ref.size} bytes, limit {limit}")
            data = await fetch(self._node, ref, holders=holders)
            await asyncio.to_thread(trainer.load_state, data)
        except (SwarmError, IntegrityError) as error:
            log.info("%s: no state from ...%s: %s", trainer.path, short(peer), error)
            return False
        await asyncio.to_thread(self.keep, trainer.path, data)
        return True

    async def _from_disk(self, trainer: PathTrainer) -> bool:
        for name in reversed(self._names(trainer.path)):
            try:
                data = self._node.store.get(name)
                if data is not None:
                    await asyncio.to_thread(trainer.load_state, data)
                    return True
            except IntegrityError as error:
                log.info("%s: the state %s on this disk is of no use: %s", trainer.path, name[:8], error)
        return False

    def _names(self, path: PathId) -> list[str]:
        """Digests of the states that are kept, the newest last."""
        names = read_checked(self._node.store, f"{PREFIX}{path}")
        return [name for name in names if is_digest(name)] if isinstance(names, list) else []

    def _say(self, path: PathId, source: str, *, peer: str = "") -> None:
        self._node.history.add("state", path=str(path), source=source, peer=peer)
