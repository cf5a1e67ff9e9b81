"""Evaluation work: composing a path from snapshots and scoring the router split with it, between rounds.

The seed node fits the next routers on these scores (DiPaCo, arXiv 2403.10616, section 2.4.2).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import numpy as np

from dipaco_p2p.core.codec import decode_module
from dipaco_p2p.core.heldout import HeldOut, decode_held_out
from dipaco_p2p.core.model import PathModel, load_modules
from dipaco_p2p.core.scores import encode_scores, window_nats
from dipaco_p2p.errors import IntegrityError, Interrupted, SwarmError
from dipaco_p2p.node.node import Member
from dipaco_p2p.node.shardings import Work, ask_work, is_scoring_due, learn_shardings, send_scores
from dipaco_p2p.node.transfer import fetch
from dipaco_p2p.protocol.documents import BlobRef
from dipaco_p2p.topology import PathId

log = logging.getLogger(__name__)

WAIT_S = 1.0
BATCH = 32
"""Sequences between two looks whether we are to stop."""


class Scoring:
    """What one volunteer scores."""

    def __init__(self, node: Member, *, device: str, is_stopping: Callable[[], bool] = lambda: False) -> None:
        """`is_stopping` is asked between batches: nobody waits for the scores then."""
        self._node = node
        self._device = device
        self._is_stopping = is_stopping
        self._part: HeldOut | None = None

    async def between_rounds(self, path: PathId, *, round_number: int, say: Callable[[PathId], None]) -> None:
        """Score one path if a sharding waits for it, our own before others, and learn what was published."""
        if is_scoring_due(self._node, round_number):
            work, _ = await ask_work(self._node, path)
            if work is not None:
                await self._do(work, say)
            await learn_shardings(self._node)

    async def at_the_end(self, *, say: Callable[[PathId], None]) -> None:
        """When training is over: score until nothing is wanted any more, or others have had time enough."""
        clock, rounds = self._node.clock, self._node.run.config.rounds
        until_s = clock.now_s() + rounds.deadline_s
        while is_scoring_due(self._node, rounds.rounds) and clock.now_s() < until_s:
            work, may_come = await ask_work(self._node, None)
            if work is not None:
                await self._do(work, say)
            elif may_come:
                await clock.sleep(WAIT_S)
            else:
                return

    async def _do(self, work: Work, say: Callable[[PathId], None]) -> None:
        say(work.path)
        try:
            table = await asyncio.to_thread(self._score, work, [await self._blob(ref) for ref in work.snapshots])
            is_taken = await send_scores(self._node, work, table)
            self._node.history.add("scored", path=str(work.path), sharding=work.sharding, taken=is_taken)
        except (SwarmError, IntegrityError, Interrupted) as error:
            log.info("%s was not scored: %s", work.path, error)

    def _score(self, work: Work, snapshots: list[bytes]) -> bytes:
        run = self._node.run
        layouts = [run.layout(module) for module in work.path.modules()]
        model = PathModel(run.config.model).to(self._device)
        load_modules(model, [decode_module(data, layout) for data, layout in zip(snapshots, layouts, strict=True)])
        assert self._part is not None
        tokens, found = self._part.tokens, []
        for first in range(0, max(len(tokens), 1), BATCH):
            if self._is_stopping():
                raise Interrupted("the scores are not wanted any more")
            found.append(window_nats(model, tokens[first : first + BATCH], batch=BATCH))
        return encode_scores(np.concatenate(found))

    async def _blob(self, ref: BlobRef) -> bytes:
        if self._part is None:
            model = self._node.run.config.model
            data = await fetch(self._node, self._node.run.manifest.router_split, holders=self._node.watch.seeds())
            self._part = decode_held_out(data, vocab_size=model.vocab_size, context=model.context)
        return await fetch(self._node, ref, holders=self._node.watch.seeds())
