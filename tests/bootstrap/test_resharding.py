"""Re-sharding on the seed node: who is asked for scores, which scores are believed, and what is made of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from runtime_harness import World
from tiny_run import tiny_config
from virtual_time import end, eventually

from bootstrap.archives.evaluator import Evaluator
from bootstrap.coordinator.resharding import REST_SHARDINGS, Resharding
from bootstrap.text.sequences import Sequences
from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.config import RoutingConfig
from dipaco_p2p.core.model.layout import encode_module
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
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import PathId
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
        self.workers: set[PeerId] = set()
        """Whose work versions count."""
        self.resharding = self._begin()
        self.scorer = world.peer(9)
        self.workers.add(self.scorer.peer)
        self._task: asyncio.Task[None] | None = None

    def _begin(self) -> Resharding:
        run, store = self.world.run, self.store
        resharding = Resharding(
            self.world.seed.node,
            self.evaluator,
            sequences=lambda: sequences_of(run, store),
            workers=lambda: self.workers,
        )
        resharding.serve()
        return resharding

    async def restart(self) -> None:
        """What was on disk is there, and nothing else."""
        await end(self._task)
        handlers = self.world.seed.swarm._dispatcher._handlers
        for method in ("run.shardings", "run.work", "run.scores"):
            del handlers[method]
        self.resharding = self._begin()
        self._task = asyncio.create_task(self.resharding.run())
        await asyncio.sleep(0.1)

    def _at_genesis(self, module: Any, version: int) -> Any:
        """Nobody trains in these tests: version 1 is version 0 again."""
        return self._version(self.evaluator, module, 0)

    async def peer(self, number: int, *, has_worked: bool = True) -> Member:
        """Somebody who has found the seed node."""
        node = self.world.peer(number)
        await node.watch.refresh()
        if has_worked:
            self.workers.add(node.peer)
        return node

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


async def test_every_path_is_given_out_once_the_askers_own_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dear(*_: object) -> list[str]:
        raise AssertionError("a list of all documents for each who asks")

    async with at_the_desk(tmp_path) as desk:
        own = desk.world.run.topology.path(2)
        askers = [desk.scorer, *[await desk.peer(number) for number in range(10, 15)]]
        monkeypatch.setattr(Store, "documents", dear)
        given = [await ask_work(node, own) for node in askers[:5]]
        paths = [work.path for work, _ in given[:4] if work is not None]
        assert paths[0] == own and sorted(paths) == list(desk.world.run.topology.paths())
        assert given[4] == (None, True), "all are at work, and one may come back"
        assert await ask_work(askers[1], own) == given[1], "the answer may have been lost"
        await asyncio.sleep(CONFIG.rounds.deadline_s / 2)
        again, _ = await ask_work(askers[4], own)
        assert again is not None and again.path == own, "who did not deliver in time loses its work"


async def test_one_peer_does_not_take_all_paths_and_its_turn_once_it_brings_nothing(tmp_path: Path) -> None:
    """Attack: whoever asked got every path, for half a deadline, and then again before others asked."""
    config = replace(
        CONFIG, rounds=replace(CONFIG.rounds, rounds=5), routing=RoutingConfig(reshard_rounds=(1, 2, 3, 4))
    )
    async with World(tmp_path, config=config) as world:
        desk = Desk(world)
        await desk.open()
        idle = await desk.peer(8)
        taken = {work.path for work, _ in [await ask_work(idle, None) for _ in range(9)] if work is not None}
        assert len(taken) == 1
        await asyncio.sleep(CONFIG.rounds.deadline_s / 2)
        for number in range(1, 5):
            desk.evaluator.complete_version = partial(int, number)  # type: ignore[method-assign]
            await eventually(lambda: desk.resharding._wanted is not None)
            is_resting = number <= 1 + REST_SHARDINGS
            given, _ = await ask_work(idle, None)
            assert (given is None) == is_resting
            if given is not None:
                await desk.offer(idle, given, desk.honest(given))
            while (work := (await ask_work(desk.scorer, None))[0]) is not None:
                await desk.offer(desk.scorer, work, desk.honest(work))
            await eventually(lambda: desk.resharding._wanted is None)
        await desk.close()


async def test_a_path_that_is_held_until_the_end_costs_the_next_turns_unless_it_was_taken_late(tmp_path: Path) -> None:
    async with at_the_desk(tmp_path) as desk:
        idle, honest, deadline_s = await desk.peer(7), await desk.peer(8), CONFIG.rounds.deadline_s
        await asyncio.sleep(0.6 * deadline_s)
        await ask_work(idle, None)
        await asyncio.sleep(0.3 * deadline_s)
        await ask_work(honest, None)
        await eventually(desk.resharding.done.is_set)
        assert desk.resharding._rests == {idle.peer: 1 + REST_SHARDINGS}


async def test_a_path_is_given_to_those_only_whose_work_counts(tmp_path: Path) -> None:
    """Attack: a key for each path."""
    async with at_the_desk(tmp_path) as desk:
        for number in range(60, 70):
            stranger = await desk.peer(number, has_worked=False)
            assert await ask_work(stranger, None) == (None, True)
        assert (await ask_work(desk.scorer, None))[0] is not None
        desk.workers.clear()
        await eventually(desk.resharding.done.is_set, limit_s=desk.world.run.config.rounds.deadline_s)


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


def scores_in(table: bytes) -> NDArray[np.float32]:
    """Of 12 sequences of 3 windows."""
    return np.frombuffer(table[-12 * 3 * 4 :], dtype="<f4").reshape(12, 3)


async def test_made_up_scores_are_refused_and_the_path_is_given_out_again(tmp_path: Path) -> None:
    async with at_the_desk(tmp_path) as desk:
        work, _ = await ask_work(desk.scorer, None)
        assert work is not None
        with pytest.raises(Refused, match="cannot be checked"):
            await desk.offer(desk.scorer, work, b"junk")
        honest = scores_in(desk.honest(work))
        for table, words in (
            (encode_scores(honest * 0.5), "are not what its modules give"),
            (encode_scores(honest[:, ::-1]), "are not what its modules give"),  # the sums are right
            (encode_scores(honest[:5]), "cannot be checked"),
            (encode_scores(honest * np.nan), "cannot be checked"),
            (b"junk", "cannot be checked"),
        ):
            liar = await desk.peer(20 + len(desk.workers))
            assert await ask_work(liar, work.path) == (work, True), "at once"
            with pytest.raises(Refused, match=words):
                await desk.offer(liar, work, table)
            assert await ask_work(liar, None) == (None, True), "not to the same one"
        other = await desk.peer(8)
        assert await ask_work(other, work.path) == (work, True), "to whoever asks for it"
        with pytest.raises(Refused, match="another author"):
            await desk.offer(desk.scorer, work, desk.honest(work), run="ab" * 32)
        with pytest.raises(Refused, match="are wanted"):
            await desk.offer(other, work, desk.honest(work), sharding=2)
        await desk.offer(other, work, desk.honest(work))


async def test_who_is_caught_with_made_up_scores_loses_those_that_were_taken(tmp_path: Path) -> None:
    """A table that lies about few sequences may pass; nothing of whoever is caught with another one stays."""
    async with at_the_desk(tmp_path) as desk:
        first, _ = await ask_work(desk.scorer, None)
        assert first is not None
        other = await desk.peer(8)
        second, _ = await ask_work(other, None)
        assert second is not None
        await desk.offer(other, second, desk.honest(second))
        await desk.offer(desk.scorer, first, desk.honest(first))
        third, _ = await ask_work(desk.scorer, None)
        assert third is not None
        with pytest.raises(Refused, match="are not what its modules give"):
            await desk.offer(desk.scorer, third, encode_scores(scores_in(desk.honest(third)) * 1.01))
        missing = desk.resharding._missing(1)
        assert first.path in missing and third.path in missing and second.path not in missing
        assert (await ask_work(await desk.peer(7), first.path))[0] == first, "at once"


def made_up(world: World, path: PathId) -> tuple[list[bytes], bytes]:
    """Modules of somebody's own making, and what they really give."""
    layouts = [world.run.layout(module) for module in path.modules()]
    flats = [np.random.default_rng(7).normal(0, 0.02, layout.size).astype(np.float32) for layout in layouts]
    part = sequences_of(world.run, world.seed.node.store).router
    table = encode_scores(window_nats(path_model(world.run.config.model, flats), part.tokens))
    return [encode_module(flat, layout) for flat, layout in zip(flats, layouts, strict=True)], table


async def test_scores_of_other_modules_than_the_rounds_are_refused(tmp_path: Path) -> None:
    """Attack: before anything was wanted a fresh key gave the scores of all paths, by modules of its own making."""
    async with World(tmp_path, config=CONFIG) as world:
        desk, stranger, paths = Desk(world), world.peer(99), list(world.run.topology.paths())
        blobs, table = made_up(world, paths[0])
        for blob in blobs:
            await send(stranger, world.seed.node.peer, blob)
        snapshots = tuple(BlobRef.of(blob) for blob in blobs)
        work = Work(sharding=1, path=paths[0], snapshots=snapshots)
        with pytest.raises(Refused, match="wanted now") as caught:
            await desk.offer(stranger, work, table)
        assert caught.value.reason == Reason.OTHER
        await desk.open()
        await stranger.watch.refresh()
        desk.workers.add(stranger.peer)
        asked, _ = await ask_work(stranger, paths[0])
        assert asked is not None and asked.path == paths[0]
        with pytest.raises(Refused, match="other versions") as caught:
            await desk.offer(stranger, work, table)
        assert caught.value.reason == Reason.OTHER and desk.resharding._missing(1) == paths
        await desk.offer(stranger, asked, desk.honest(asked))
        assert desk.resharding._missing(1) == paths[1:]
        await desk.close()


async def test_scores_are_taken_from_the_peer_that_was_asked(tmp_path: Path) -> None:
    async with at_the_desk(tmp_path) as desk:
        work, _ = await ask_work(desk.scorer, None)
        stranger = await desk.peer(99, has_worked=False)
        assert work is not None
        unasked = replace(work, path=desk.world.run.topology.path(3))
        unasked = replace(unasked, snapshots=desk.resharding._snapshots(unasked.path, 1))
        for each in (work, unasked):
            with pytest.raises(Refused, match="another peer is asked") as caught:
                await desk.offer(stranger, each, desk.honest(each))
            assert caught.value.reason == Reason.UNKNOWN_PEER
        await asyncio.sleep(CONFIG.rounds.deadline_s / 2 + 1)
        for _ in range(2):
            await desk.offer(desk.scorer, work, desk.honest(work))  # late, and nobody else was asked; and once more
        assert len(desk.resharding._missing(1)) == 3


async def test_a_coordinator_that_restarts_takes_what_it_had_asked_for(tmp_path: Path) -> None:
    async with at_the_desk(tmp_path) as desk:
        scorers = [desk.scorer, await desk.peer(10), await desk.peer(11)]
        works = [work for work, _ in [await ask_work(node, None) for node in scorers] if work is not None]
        await desk.offer(desk.scorer, works[0], desk.honest(works[0]))
        _, table = made_up(desk.world, works[1].path)
        lie = Scores(
            run=desk.world.run.id,
            sharding=1,
            path=works[1].path,
            modules=("ab" * 32,) * len(works[1].snapshots),
            table=BlobRef.of(table),
            author=desk.scorer.peer,
        )
        name = f"scores-1-{lie.path}"
        desk.store.write_document(name, canonical_bytes(seal(desk.scorer.swarm.signer, lie).to_dict()))
        await desk.restart()
        assert works[0].path not in desk.resharding._missing(1), "what was taken stays"
        assert works[1].path in desk.resharding._missing(1), "but for what a former program took"
        stranger = await desk.peer(99, has_worked=False)
        with pytest.raises(Refused, match="another peer is asked"):
            await desk.offer(stranger, works[1], desk.honest(works[1]))
        await desk.offer(scorers[1], works[1], desk.honest(works[1]))
        other = await desk.peer(8)
        again, _ = await ask_work(other, works[2].path)
        assert again == works[2]
        with pytest.raises(Refused, match="another peer is asked"):
            await desk.offer(scorers[2], works[2], desk.honest(works[2]))
        await desk.offer(other, works[2], desk.honest(works[2]))
        assert len(desk.resharding._missing(1)) == 1


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
