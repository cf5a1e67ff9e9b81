"""Re-sharding on the seed node: who is asked for scores, which scores are believed, and what is made of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime_harness import World
from tiny_run import tiny_config
from virtual_time import end, eventually

from bootstrap.archives.evaluator import Evaluator
from bootstrap.coordinator.resharding import Resharding
from bootstrap.text.sequences import Sequences
from dipaco_p2p.config import RoutingConfig
from dipaco_p2p.core.model.shards import HeldOut, decode_held_out, decode_shard
from dipaco_p2p.core.model.transformer import path_model
from dipaco_p2p.core.routing.evaluate import encode_scores, window_nats
from dipaco_p2p.core.routing.router import decode_router
from dipaco_p2p.errors import Refused
from dipaco_p2p.node.node import Member, send
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.shardings import Work, ask_work, is_scoring_due, learn_shardings
from dipaco_p2p.node.store import Store
from dipaco_p2p.protocol.documents import BlobRef, Scores, seal
from peers.evaluation.between_rounds import Scoring

CONFIG = replace(tiny_config(rounds=2), routing=RoutingConfig(reshard_rounds=(1,)))


def sequences_of(run: Run, store: Store) -> Sequences:
    """The text of a tiny run, from its own blobs."""
    model = run.config.model

    def held_out(ref: BlobRef) -> HeldOut:
        return decode_held_out(store.get(ref.digest) or b"", vocab_size=model.vocab_size, context=model.context)

    shards = [store.get(ref.blob.digest) or b"" for ref in run.manifest.shards]
    train = np.concatenate([decode_shard(data, vocab_size=258, context=72).tokens for data in shards])
    documents = np.arange(len(train), dtype=np.int32)
    return Sequences(
        train=HeldOut(tokens=train, documents=documents),
        validation=held_out(run.manifest.validation),
        holdout=held_out(run.manifest.holdout),
        router=held_out(run.manifest.router_split),
    )


class Desk:
    """The re-sharding of a world's seed node, with all modules at version 1, and somebody who scores."""

    def __init__(self, world: World) -> None:
        self.world = world
        node = world.seed.node
        self.store = node.store
        self.evaluator = Evaluator(world.run, node.store, world.seed.archive)
        self.evaluator.complete_version = lambda: 1  # type: ignore[method-assign]
        self.evaluator.version = self._at_genesis  # type: ignore[method-assign]
        self._version = type(self.evaluator).version
        self.resharding = Resharding(node, self.evaluator, sequences=lambda: sequences_of(world.run, node.store))
        self.resharding.serve()
        self.scorer = world.peer(9)
        self._task: asyncio.Task[None] | None = None

    def _at_genesis(self, module: Any, version: int) -> Any:
        """Nobody trains in these tests: version 1 is version 0 again."""
        return self._version(self.evaluator, module, 0)

    async def open(self) -> None:
        self.beating = asyncio.create_task(self.scorer.presence.run())
        await asyncio.sleep(0.1)
        for node in (self.world.seed.node, self.scorer):
            await node.watch.refresh()
        self._task = asyncio.create_task(self.resharding.run())
        await asyncio.sleep(0.1)

    async def close(self) -> None:
        await end(self._task)
        await end(self.beating)

    def honest(self, work: Work) -> bytes:
        """What the snapshots really give."""
        model = path_model(self.world.run.config.model, self.evaluator.flats(work.path, 1))
        return encode_scores(window_nats(model, self.evaluator.router_split().tokens))

    async def offer(self, node: Member, work: Work, table: bytes, **changes: Any) -> None:
        scores = Scores(
            run=self.world.run.id,
            sharding=work.sharding,
            path=work.path,
            modules=tuple(ref.digest for ref in work.snapshots),
            table=BlobRef.of(table),
            author=node.peer,
        )
        await send(node, self.world.seed.node.peer, table)
        header = {"scores": seal(node.swarm.signer, replace(scores, **changes)).to_dict()}
        await node.swarm.call(self.world.seed.node.peer, "run.scores", header, timeout_s=5.0)


@asynccontextmanager
async def at_the_desk(folder: Path) -> AsyncIterator[Desk]:
    async with World(folder, config=CONFIG) as world:
        desk = Desk(world)
        await desk.open()
        try:
            yield desk
        finally:
            await desk.close()


async def test_every_path_is_given_out_once_the_askers_own_first(tmp_path: Path) -> None:
    async with at_the_desk(tmp_path) as desk:
        own = desk.world.run.topology.path(2)
        given = [await ask_work(desk.scorer, own) for _ in range(5)]
        paths = [work.path for work, _ in given[:4] if work is not None]
        assert paths[0] == own and sorted(paths) == list(desk.world.run.topology.paths())
        assert given[4] == (None, True), "all are at work, and one may come back"
        await asyncio.sleep(CONFIG.rounds.deadline_s / 2)
        again, _ = await ask_work(desk.scorer, own)
        assert again is not None, "who did not deliver in time loses its work"


async def test_volunteers_score_and_the_sharding_follows_from_it(tmp_path: Path) -> None:
    async with at_the_desk(tmp_path) as desk:
        scoring, said = Scoring(desk.scorer, device="cpu"), []
        assert is_scoring_due(desk.scorer, 1) and not is_scoring_due(desk.scorer, 0)
        for _ in range(4):
            await scoring.between_rounds(desk.world.run.topology.path(0), round_number=1, say=said.append)
        await eventually(desk.resharding.done.is_set)
        assert sorted(said) == list(desk.world.run.topology.paths())
        await learn_shardings(desk.scorer)
        [sealed] = desk.scorer.run.shardings
        run, sharding = desk.world.run, sealed.document
        assert not is_scoring_due(desk.scorer, 1) and run.sharding_at(1) == 1
        train = sequences_of(run, desk.store).train.tokens
        sizes = [ref.sequences for ref in sharding.shards]
        assert sum(sizes) == len(train) and min(sizes) > 0
        for ref, width in ((sharding.router, 16), (sharding.token_router, 32)):
            decode_router(desk.evaluator.blob(ref.digest), path_count=4, width=width)


async def test_made_up_scores_are_refused_and_the_path_is_given_out_again(tmp_path: Path) -> None:
    async with at_the_desk(tmp_path) as desk:
        work, _ = await ask_work(desk.scorer, None)
        assert work is not None
        honest = np.frombuffer(desk.honest(work)[-12 * 3 * 4 :], dtype="<f4").reshape(12, 3)
        for table, words in (
            (encode_scores(honest * 0.5), "are not what its modules give"),
            (encode_scores(honest[:5]), "cannot be checked"),
            (encode_scores(honest * np.nan), "cannot be checked"),
            (b"junk", "cannot be checked"),
        ):
            with pytest.raises(Refused, match=words):
                await desk.offer(desk.scorer, work, table)
        other = desk.world.peer(8)
        with pytest.raises(Refused, match="another author"):
            await desk.offer(desk.scorer, work, desk.honest(work), run="ab" * 32)
        with pytest.raises(Refused, match="are wanted"):
            await desk.offer(other, work, desk.honest(work), sharding=2)
        await desk.offer(other, work, desk.honest(work))


async def test_without_volunteers_the_seed_node_scores_itself(tmp_path: Path) -> None:
    async with at_the_desk(tmp_path) as desk:
        await end(desk.beating)
        await desk.scorer.presence.leave()
        await desk.world.seed.node.watch.refresh()
        await eventually(desk.resharding.done.is_set, limit_s=5.0)
        assert len(desk.world.run.shardings) == 1


async def test_volunteers_that_never_deliver_hold_it_up_for_one_deadline_only(tmp_path: Path) -> None:
    async with at_the_desk(tmp_path) as desk:
        began_s = desk.world.clock.now_s()

        async def ask() -> None:
            while True:
                await ask_work(desk.scorer, None)
                await asyncio.sleep(1)

        asking = asyncio.create_task(ask())
        await eventually(desk.resharding.done.is_set)
        await end(asking)
        assert desk.world.clock.now_s() - began_s <= CONFIG.rounds.deadline_s + 2
