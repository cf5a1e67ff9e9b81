"""What a path is trained on and starts from: from the seed node, or while it is away from whoever has trained the path.

What was fetched is kept, and served to others like all blobs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from dipaco_p2p.core.model.shards import Shard, decode_shard
from dipaco_p2p.errors import IntegrityError, Refused, SwarmError
from dipaco_p2p.node.ledger import RemoteLedger
from dipaco_p2p.node.node import Member, fetch
from dipaco_p2p.protocol.claims import taking_part
from dipaco_p2p.protocol.documents import BlobRef
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import PathId

log = logging.getLogger(__name__)

RETRY_S = 0.5
HOLDERS_MAX = 16


class ShardSource:
    """The shards and the optimizer's start, from this disk or from others.

    While nobody gives them, both wait; but if there is a path whose shard is here, they raise BlobMissing instead: then
    there is other work. They raise IntegrityError when all that answer give other bytes: waiting is no cure.
    """

    def __init__(self, node: Member, *, on_wait: Callable[[], None]) -> None:
        """`on_wait` is told when a seed node has to be waited for."""
        self._node = node
        self._on_wait = on_wait

    def has(self, path: PathId) -> bool:
        """Whether the shard of `path` is here."""
        return self._node.store.size(self._node.run.shard(path).blob.digest) is not None

    def has_source(self, path: PathId) -> bool:
        """Whether the shard of `path` is here, or somebody lives who may give it."""
        watch = self._node.watch
        others = {peer for peer in watch.claims[path] if peer != self._node.peer}
        return self.has(path) or bool(watch.seeds()) or bool(others & watch.heartbeats.keys())

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

    async def ask_archive(self, path: PathId) -> None:
        """Learn how far the modules of `path` are while nobody leads them: a run may be over, and all have left."""
        watch = self._node.watch
        for seed in watch.seeds()[:1]:
            for module in path.modules():
                with contextlib.suppress(SwarmError, Refused, IntegrityError):
                    found = await RemoteLedger(self._node, seed, module).branch()
                    watch.seen[module] = max(watch.seen[module], found.version)

    async def optimizer(self) -> bytes:
        """AdamW's state at the stage's start."""
        return await self._fetch(self._node.run.manifest.optimizer)

    async def _fetch(self, ref: BlobRef) -> bytes:
        while True:
            try:
                return await fetch(self._node, ref, holders=self._holders(), keep=True)
            except SwarmError as error:
                log.info("nobody gave %s: %s", ref.digest[:8], error)
                if any(map(self.has, self._node.run.topology.paths())):
                    raise
            self._on_wait()
            await self._node.clock.sleep(RETRY_S)
            await self._node.watch.read_peers()

    def _holders(self) -> list[PeerId]:
        """Seed nodes have everything. Of volunteers, those that take part are likely to have some of it."""
        watch = self._node.watch
        training = sorted(taking_part(watch.claims) - {self._node.peer})
        return [*watch.seeds(), *(training if not watch.seeds() else [])][:HOLDERS_MAX]
