"""Inner states of paths: what is kept, what is fetched from whom, and what is believed of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runtime_harness import World
from virtual_time import play

from dipaco_p2p.core.shards import decode_shard
from dipaco_p2p.node.node import Member
from dipaco_p2p.node.sizes import state_bytes_max
from dipaco_p2p.node.transfer import serve_store
from dipaco_p2p.protocol.documents import BlobRef, Share
from dipaco_p2p.topology import PathId
from peers.states import KEPT, PathStates
from peers.trainer import PathTrainer

PATH = PathId((0, 1, 0))


class Stage:
    """Somebody who has trained the path, and somebody who takes it over."""

    def __init__(self, world: World, author: Member, taker: Member) -> None:
        self.world, self.author, self.taker = world, author, taker
        self.events: list[str] = []
        taker.history.listen(lambda event: self.events.append(event["source"]))

    def trainer(self) -> PathTrainer:
        run, store = self.world.run, self.world.seed.node.store
        data, optimizer = store.get(run.shard(PATH).blob.digest), store.get(run.manifest.optimizer.digest)
        assert data is not None and optimizer is not None
        shard = decode_shard(data, vocab_size=run.config.model.vocab_size, context=run.config.model.context)
        return PathTrainer(run, PATH, shard, optimizer=optimizer, device="cpu")

    def state(self, seed: int) -> bytes:
        """A good one; states of different seeds differ."""
        trainer = self.trainer()
        for module in PATH.modules():
            trainer._residuals[module] = np.full(self.world.run.layout(module).size, seed, np.float32)
        return trainer.state_bytes()

    def share(self, state: BlobRef | None, *, author: Member | None = None, base: int = 0, tokens: int = 100) -> Share:
        peer = (author or self.author).peer
        return Share(
            contribution="0" * 64,
            path=PATH,
            peer=peer,
            base_version=base,
            weight=1.0,
            tokens=tokens,
            loss=1.0,
            state=state,
        )

    async def restored(self, *shares: Share) -> tuple[bytes, bool]:
        """The state that the taker goes on with, and whether it is another's word."""
        trainer = self.trainer()
        is_foreign = await PathStates(self.taker).restore(trainer, shares)
        return trainer.state_bytes(), is_foreign


def on_stage(folder: Path, scene: Callable[[Stage], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with World(folder) as world:
            author, taker = world.peer(60), world.peer(61)
            serve_store(author.swarm, author.store)
            await author.presence.say()
            await taker.watch.refresh()
            await scene(Stage(world, author, taker))

    play(scenario)


def test_nobody_has_trained_the_path_yet(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        PathStates(stage.taker).keep(PATH, stage.state(1))  # trained, but never counted: it must be trained again
        assert await stage.restored() == (stage.trainer().state_bytes(), False)
        assert stage.events == ["start"]

    on_stage(tmp_path, scene)


def test_the_newest_state_is_fetched_from_its_author_and_kept(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        refs = [PathStates(stage.author).keep(PATH, stage.state(seed)) for seed in (1, 2)]
        shares = [stage.share(ref, base=base) for base, ref in enumerate(refs)]
        assert await stage.restored(*shares) == (stage.state(2), True)
        assert stage.events == ["fetched"]
        assert stage.taker.store.get(refs[1].digest) == stage.state(2)
        assert PathStates(stage.taker).held() == {PATH}

    on_stage(tmp_path, scene)


def test_of_replicas_ones_own_state_comes_first_and_then_the_one_that_trained_most(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        small, great = (PathStates(stage.author).keep(PATH, stage.state(seed)) for seed in (1, 2))
        mine = PathStates(stage.taker).keep(PATH, stage.state(3))
        shares = [stage.share(small, tokens=10), stage.share(great, tokens=90)]
        assert await stage.restored(*shares) == (stage.state(2), True)
        assert await stage.restored(*shares, stage.share(mine, author=stage.taker, tokens=1)) == (stage.state(3), False)
        assert stage.events == ["fetched", "ours"]

    on_stage(tmp_path, scene)


def test_without_its_author_an_older_state_must_do_and_else_the_start(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        share = stage.share(PathStates(stage.author).keep(PATH, stage.state(1)))
        await stage.author.presence.leave()
        await stage.taker.watch.refresh()
        assert await stage.restored(share) == (stage.trainer().state_bytes(), False)
        PathStates(stage.taker).keep(PATH, stage.state(9))
        assert await stage.restored(share) == (stage.state(9), False)
        assert stage.events == ["lost", "older"]

    on_stage(tmp_path, scene)


def test_a_contribution_without_a_state_is_passed_over(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        ref = PathStates(stage.author).keep(PATH, stage.state(1))
        assert await stage.restored(stage.share(None, base=3), stage.share(ref)) == (stage.state(1), True)

    on_stage(tmp_path, scene)


@pytest.mark.parametrize("kind", ["junk", "another path", "too large", "not there"])
def test_a_bad_state_is_refused_and_the_next_best_taken(tmp_path: Path, kind: str) -> None:
    async def scene(stage: Stage) -> None:
        good = PathStates(stage.author).keep(PATH, stage.state(1))
        bad = stage.author.store.put({"junk": b"no tensors", "another path": stage.state(1)[:-4]}.get(kind, b"x"))
        if kind == "too large":
            bad = replace(bad, size=state_bytes_max(stage.world.run.config, PATH) + 1)
        if kind == "not there":
            stage.author.store.drop(bad.digest)
        assert await stage.restored(stage.share(bad, base=1), stage.share(good)) == (stage.state(1), True)
        assert stage.taker.store.get(bad.digest) is None, "what is of no use is not kept"

    on_stage(tmp_path, scene)


def test_the_last_two_are_kept_and_older_ones_leave_the_disk(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        states = PathStates(stage.taker)
        refs = [states.keep(PATH, stage.state(seed)) for seed in range(5)]
        states.keep(PATH, stage.state(3))  # again: it is the newest now
        here = [stage.taker.store.get(ref.digest) is not None for ref in refs]
        assert here == [False] * (5 - KEPT) + [True] * KEPT
        other = PathId((0, 0, 0))
        assert states.held() == {PATH} and PathStates(stage.taker).held() == {PATH}
        states.keep(other, stage.state(7))
        assert states.held() == {PATH, other}

    on_stage(tmp_path, scene)


@pytest.mark.parametrize("damage", [b"", b"junk", b"{}", b'["../etc", 5]'])
def test_a_damaged_list_of_states_is_forgotten(tmp_path: Path, damage: bytes) -> None:
    async def scene(stage: Stage) -> None:
        states = PathStates(stage.taker)
        states.keep(PATH, stage.state(1))
        stage.taker.store.write_document(f"state-{PATH}", damage)
        assert await stage.restored(stage.share(BlobRef.of(b"gone"))) == (stage.trainer().state_bytes(), False)
        ref = states.keep(PATH, stage.state(2))
        assert stage.taker.store.get(ref.digest) is not None

    on_stage(tmp_path, scene)
