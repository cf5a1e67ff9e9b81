"""More paths than volunteers, and more volunteers than paths: who trains what changes nothing of what comes out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from runtime_harness import TinyVolunteer, World
from tiny_run import MODEL, tiny_config
from virtual_time import VirtualLoop, end, eventually, play

from dipaco_p2p.canonical import Parts, digest
from dipaco_p2p.core.model.inner import InnerResult
from dipaco_p2p.core.tensor_file import decode, encode
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.protocol.documents import BlobRef, Contribution, Share
from dipaco_p2p.protocol.rounds import notice_s
from dipaco_p2p.topology import ModuleId, PathId
from peers.path.contribute import Contributor
from peers.path.kept import InnerStates
from peers.path.trainer import OuterGradient, PathTrainer
from peers.status import Status

ROUNDS = 3


def shares(world: World) -> list[tuple[ModuleId, int, tuple[Share, ...]]]:
    return [
        (module, sealed.document.version, sealed.document.shares)
        for module, ledger in world.seed.archive.ledgers.items()
        for sealed in ledger.versions
    ]


def sources(volunteer: TinyVolunteer) -> list[str]:
    """Where the inner states came from that it went on with."""
    return [event["source"] for event in volunteer.said("state")]


def require_every_path_once(world: World) -> None:
    for module, version, found in shares(world):
        assert [share.path for share in found] == list(world.run.topology.paths_through(module)), (module, version)
        assert {share.base_version for share in found} == {version - 1}


@pytest.fixture(scope="module")
def digests_of_four(tmp_path_factory: pytest.TempPathFactory) -> dict[ModuleId, str]:
    """With a volunteer for every path, where nobody ever rotates."""
    found: dict[ModuleId, str] = {}

    async def scenario() -> None:
        async with World(tmp_path_factory.mktemp("four"), config=tiny_config(rounds=ROUNDS)) as world:
            world.join_all()
            await world.finish()
            require_every_path_once(world)
            assert all(sources(volunteer) == ["start"] for volunteer in world.volunteers)
            found.update(world.digests())

    play(scenario)
    return found


@pytest.mark.parametrize("volunteers", [1, 2, 3])
async def test_fewer_volunteers_than_paths_give_the_digests_of_one_for_each(
    tmp_path: Path, digests_of_four: dict[ModuleId, str], volunteers: int
) -> None:
    async with World(tmp_path, config=tiny_config(rounds=ROUNDS, min_paths=volunteers)) as world:
        for number in range(1, volunteers + 1):
            world.join(number)
        await world.finish()
        require_every_path_once(world)
        assert world.digests() == digests_of_four


async def test_two_volunteers_over_four_paths_go_on_with_their_own_when_they_can(tmp_path: Path) -> None:
    async with World(tmp_path, config=tiny_config(rounds=ROUNDS, min_paths=2), delay_s=(0.0, 0.05)) as world:
        world.join_all((1, 2))
        await world.finish()
        for volunteer in world.volunteers:
            # Who is free first takes what is left, be it the other's.
            assert sources(volunteer).count("fetched") <= 1 < sources(volunteer).count("ours")


async def test_a_path_that_changes_hands_gives_the_same_digests(
    tmp_path: Path, digests_of_four: dict[ModuleId, str]
) -> None:
    """Volunteers come one by one, over a slow network, and take paths that others have trained before."""
    config = tiny_config(rounds=ROUNDS, min_paths=1)
    async with World(tmp_path, config=config, delay_s=(0.0, 0.2)) as world:
        ledger = world.seed.archive.ledgers[ModuleId(0, 0)]
        for number in (1, 2, 3):
            world.join(number)
            await eventually(lambda number=number: ledger.head.version >= number - 1)
        await world.finish()
        require_every_path_once(world)
        assert "fetched" in [source for volunteer in world.volunteers for source in sources(volunteer)]
        assert world.digests() == digests_of_four


async def test_work_that_was_lost_in_the_middle_of_its_push_is_completed_not_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Contributor._push

    async def stuck(self: Contributor, contribution: Contribution, payload: bytes) -> str | None:
        if self._node.peer == victims[0].peer and contribution.module.level == 1:
            await asyncio.Event().wait()
        return await honest(self, contribution, payload)

    monkeypatch.setattr(Contributor, "_push", stuck)
    victims: list[TinyVolunteer] = []
    async with World(tmp_path, config=tiny_config(rounds=ROUNDS, min_paths=2)) as world:
        victims.append(world.join(1))
        world.join(2)
        await eventually(lambda: len(victims[0].said("receipt")) == 2)
        await world.kill(victims[0])
        await world.finish()
        require_every_path_once(world)
        # Which versions the rest is trained from, depends on how far the others were when the claim expired.
        first = [share.peer for module, version, found in shares(world) if version == 1 for share in found]
        assert first.count(victims[0].peer) == 2


async def test_the_paths_of_a_volunteer_that_is_gone_go_on_without_its_state(tmp_path: Path) -> None:
    async with World(tmp_path, config=tiny_config(rounds=4)) as world:
        world.join_all()
        await eventually(lambda: all(volunteer.said("round") for volunteer in world.volunteers))
        victim = world.volunteers[0]
        await world.kill(victim)
        await world.finish()
        survivors = world.volunteers[1:]
        assert "lost" in [source for volunteer in survivors for source in sources(volunteer)]
        path = PathId.parse(victim.said("claimed")[-1]["path"])
        last = [{share.path for share in found} for module, version, found in shares(world) if version == 4]
        assert sum(path in found for found in last) == len(path.modules())


def test_replicas_of_one_path_train_disjoint_parts_and_all_count(tmp_path: Path) -> None:
    """Plain DiLoCo: all K_l = 1, four volunteers."""
    parts: dict[int, list[tuple[int, int]]] = {}

    async def scenario() -> None:
        config = replace(tiny_config(rounds=4, min_paths=1), model=MODEL.one_path())
        async with World(tmp_path, config=config) as world:
            world.join_all()
            await world.finish()
            everybody = {volunteer.peer for volunteer in world.volunteers}
            for _, version, found in shares(world):
                assert {share.peer for share in found} == everybody and len(found) == 4, version
                assert all(share.weight == pytest.approx(0.25) for share in found)

    honest = PathTrainer.train

    async def noting(self: PathTrainer, flats: Any, **changes: Any) -> InnerResult:
        parts.setdefault(changes["round_number"], []).append(changes["replica"])
        return await honest(self, flats, **changes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PathTrainer, "train", noting)
        play(scenario)
    assert {number: sorted(found) for number, found in parts.items()} == {
        number: [(index, 4) for index in range(4)] for number in range(4)
    }


async def test_of_more_replicas_than_a_version_counts_those_train_that_are_drawn(tmp_path: Path) -> None:
    config = replace(tiny_config(rounds=12, min_paths=1), model=MODEL.one_path())
    config = replace(config, rounds=replace(config.rounds, contributions_max=4))  # of which three are drawn for
    async with World(tmp_path, config=config) as world:
        world.join_all()
        await world.finish()
        authors = [sorted(share.peer for share in found) for _, _, found in shares(world)]
        assert {len(found) for found in authors} == {3}
        assert {peer for found in authors for peer in found} == {volunteer.peer for volunteer in world.volunteers}
        assert sum(len(volunteer.said("sat_out")) for volunteer in world.volunteers) == 12
        assert not any(volunteer.said("refused") for volunteer in world.volunteers)


async def test_a_newcomer_to_a_path_that_is_in_does_not_hold_its_round_up(tmp_path: Path) -> None:
    """It begins with the next round, and who made this one needs not wait for it."""
    config = replace(tiny_config(rounds=30, min_paths=1), model=MODEL.one_path())
    async with World(tmp_path, config=config) as world:
        first = world.join(1)
        await eventually(lambda: len(first.said("round")) == 2)
        newcomer = world.join(2)
        await eventually(lambda: len(newcomer.said("round")) == 3)
        times = [event["t"] for event in first.said("round")]
        assert max(after - before for before, after in zip(times, times[1:], strict=False)) < 5.0


def failing(path: PathId, *, from_round: int) -> Callable[..., Any]:
    honest = PathTrainer.train

    async def train(self: PathTrainer, flats: Any, **changes: Any) -> InnerResult:
        if self.path == path and changes["round_number"] >= from_round:
            raise DipacoError("the loss is not finite")
        return await honest(self, flats, **changes)

    return train


async def test_a_path_that_nobody_can_train_costs_one_deadline_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopeless = PathId((0, 0, 1))
    monkeypatch.setattr(PathTrainer, "train", failing(hopeless, from_round=1))
    async with World(tmp_path, config=tiny_config(rounds=4, min_paths=2)) as world:
        world.join_all((1, 2))
        ledgers = world.seed.archive.ledgers
        await eventually(lambda: all(ledger.head.version == 1 for ledger in ledgers.values()))
        healthy = [ledgers[module] for module in PathId((0, 1, 0)).modules()]
        began_s, rounds = world.clock.now_s(), world.run.config.rounds
        await eventually(lambda: all(ledger.head.version == 4 for ledger in healthy), limit_s=300)
        waited_s = world.clock.now_s() - began_s
        assert waited_s < 3 * (rounds.deadline_s + rounds.grace_s + 10.0)
        for volunteer in world.volunteers:
            assert [event["path"] for event in volunteer.said("failed")] == [str(hopeless)]
        await world.finish()


async def test_leaders_learn_not_to_wait_long_for_a_path_that_never_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopeless = PathId((0, 0, 1))
    monkeypatch.setattr(PathTrainer, "train", failing(hopeless, from_round=1))
    config = tiny_config(rounds=6, min_paths=2)
    config = replace(config, rounds=replace(config.rounds, deadline_s=100.0))
    async with World(tmp_path, config=config) as world:
        world.join_all((1, 2))
        healthy = [world.seed.archive.ledgers[module] for module in hopeless.modules()]
        times: list[float] = []
        for version in range(2, 7):
            await eventually(lambda: all(ledger.head.version >= version for ledger in healthy), limit_s=900)  # noqa: B023
            times.append(world.clock.now_s())
        waits_s = [after - before for before, after in zip(times, times[1:], strict=False)]
        assert min(waits_s) >= notice_s(config.liveness), "the path might be taken over until then"
        assert max(waits_s[1:]) < 50.0, f"the run file says 100 s: {waits_s}"
        for volunteer in world.volunteers:
            told = [volunteer.node.watch.rounds[module].deadline_s for module in hopeless.modules()]
            assert all(notice_s(config.liveness) <= deadline_s < 100.0 for deadline_s in told)


async def test_a_path_that_fails_at_once_ends_the_volunteer_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PathTrainer, "train", failing(PathId((0, 0, 0)), from_round=0))
    config = replace(tiny_config(min_paths=1), model=MODEL.one_path())
    async with World(tmp_path, config=config) as world:
        with pytest.raises(DipacoError, match="not finite"):
            await world.join(1).done()


ENDLESS = {"exp_avg": 127, "exp_avg_scales": 3e38, "exp_avg_sq": 0, "exp_avg_sq_scales": 0.0}
"""Moments of a state that no check can refuse: they are finite, and make the first step endless."""
COUNTLESS = {"step": 2**63 - 1}
"""Attack: the state was taken, the steps went well, and what came of them could not be written down."""


class Brittle(PathTrainer):
    """A fault of ours that one peer's states have found: what comes of them cannot be written down."""

    hits: ClassVar[set[str]] = set()

    def start_over(self) -> None:
        super().start_over()
        self.is_hit = False

    def load_state(self, data: bytes) -> None:
        super().load_state(data)
        self.is_hit = digest(data) in self.hits

    def state_parts(self, sent: Sequence[OuterGradient] = ()) -> Parts:
        if self.is_hit:
            raise OverflowError("Python int too large to convert to C long")
        return super().state_parts(sent)


def poisoned(data: bytes, lies: dict[str, float]) -> bytes:
    tensors, _ = decode(data)
    return encode(
        {
            name: np.full_like(tensor, lies[kind]) if (kind := name.rpartition("/")[2]) in lies else tensor
            for name, tensor in tensors.items()
        }
    )


@pytest.mark.parametrize(("lies", "source"), [(ENDLESS, "dropped"), ({}, "dropped"), (COUNTLESS, "lost")])
async def test_a_malicious_state_is_dropped_and_the_path_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lies: dict[str, float], source: str
) -> None:
    honest, attackers = InnerStates.keep, []

    def keep(self: InnerStates, path: PathId, *parts: bytes | memoryview) -> BlobRef:
        if self._node.peer not in attackers:
            return honest(self, path, *parts)
        ref = honest(self, path, poisoned(b"".join(parts), lies))
        Brittle.hits |= set() if lies else {ref.digest}
        return ref

    monkeypatch.setattr(InnerStates, "keep", keep)
    monkeypatch.setattr(Brittle, "hits", set())
    async with World(tmp_path, config=tiny_config(rounds=4)) as world:
        attacker = world.join(1)
        attackers.append(attacker.peer)
        for number in (2, 3, 4):
            world.join(number, make_trainer=Brittle)
        await eventually(lambda: len(attacker.said("round")) == 2)
        attacker.volunteer.stop()
        await attacker.done()
        attacker.node.presence.note(left=False, owns=False)  # it stays to serve its state
        serving = asyncio.create_task(attacker.node.presence.run())
        await world.finish()
        await end(serving)
        others = [said for volunteer in world.volunteers[1:] for said in sources(volunteer)]
        assert "fetched" in others and others.count(source) == 1


class SlowStatus(Status):
    """Every inner step takes its volunteer some seconds."""

    __slots__ = ("step_s",)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "step" and value > 0:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            loop.skipped_s += self.step_s


async def test_a_slow_volunteer_does_fewer_steps_and_is_in_time(tmp_path: Path) -> None:
    config = replace(tiny_config(steps=12, min_paths=1), model=MODEL.one_path())
    async with World(tmp_path, config=config) as world:
        status = object.__new__(SlowStatus)
        status.step_s = 4.5
        Status.__init__(status)
        slow = world.join(1, status=status)
        fast = world.join(2)
        await world.finish()
        # 20 s until the deadline, less the push: a fifth step would end after 22.5 s.
        assert [(event["steps"], event["is_cut"]) for event in slow.said("round")] == [(4, True)] * 2
        assert [(event["steps"], event["is_cut"]) for event in fast.said("round")] == [(12, False)] * 2
        for _, _, found in shares(world):
            tokens = {share.peer: share.tokens for share in found}
            assert tokens == {fast.peer: 12 * 2 * 72, slow.peer: 4 * 2 * 72}


async def test_one_step_is_done_even_if_it_takes_longer_than_the_deadline(tmp_path: Path) -> None:
    config = replace(tiny_config(steps=3, min_paths=1), model=MODEL.one_path())
    async with World(tmp_path, config=config) as world:
        status = object.__new__(SlowStatus)
        status.step_s = 50.0
        Status.__init__(status)
        slow = world.join(1, status=status)
        await world.finish()
        assert [(event["steps"], event["is_cut"]) for event in slow.said("round")] == [(1, True)] * 2
        assert len(slow.said("receipt")) == 2 * 3
