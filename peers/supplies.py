"""What a path is trained on and starts from: blobs that only the seed node has, kept here once they were fetched."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dipaco_p2p.core.shards import Shard, decode_shard
from dipaco_p2p.errors import SwarmError
from dipaco_p2p.protocol.documents import BlobRef
from dipaco_p2p.runtime.node import Node
from dipaco_p2p.runtime.transfer import fetch
from dipaco_p2p.topology import PathId

log = logging.getLogger(__name__)

RETRY_S = 0.5


class Supplies:
    """The shards and the optimizer's start, from this disk or from the seed node.

    While no seed node answers, both wait; but if there is a path whose shard is here, they raise BlobMissing instead:
    then there is other work. They raise IntegrityError when all that answer give other bytes: waiting is no cure.
    """

    def __init__(self, node: Node, *, on_wait: Callable[[], None]) -> None:
        """`on_wait` is told when a seed node has to be waited for."""
        self._node = node
        self._on_wait = on_wait

    def has(self, path: PathId) -> bool:
        """Whether the shard of `path` is here."""
        return self._node.store.size(self._node.run.shard(path).blob.digest) is not None

    async def shard(self, path: PathId, sharding: int) -> Shard:
        """All sequences of `path` in a sharding that this peer has learnt of."""
        model = self._node.run.config.model
        data = await self._fetch(self._node.run.shard(path, sharding).blob)
        return decode_shard(data, vocab_size=model.vocab_size, context=model.context)

    async def newest_shard(self, path: PathId, sharding: int) -> tuple[Shard, int]:
        """The shard of `sharding`, or while no seed node answers the newest before it that is here; and its number."""
        try:
            return await self.shard(path, sharding), sharding
        except SwarmError:
            if not sharding:
                raise
            return await self.newest_shard(path, sharding - 1)

    async def optimizer(self) -> bytes:
        """AdamW's state at the stage's start."""
        return await self._fetch(self._node.run.manifest.optimizer)

    async def _fetch(self, ref: BlobRef) -> bytes:
        while True:
            try:
                return await fetch(self._node, ref, holders=self._node.watch.seeds(), keep=True)
            except SwarmError as error:
                log.info("no seed node gave %s: %s", ref.digest[:8], error)
                if any(map(self.has, self._node.run.topology.paths())):
                    raise
            self._on_wait()
            await self._node.clock.sleep(RETRY_S)
            await self._node.watch.read_peers()
