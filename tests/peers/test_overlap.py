"""Inner steps beside pushes and pulls: what they begin from, what they are counted as, and what becomes of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime_harness import TinyVolunteer, World
from tiny_run import MODEL, initial, signer, tiny_config
from virtual_time import eventually, play

from dipaco_p2p.config import CompressionConfig
from dipaco_p2p.core.model.inner import InnerResult
from dipaco_p2p.protocol.documents import BlobRef, Contribution, ModuleVersion
from dipaco_p2p.topology import ModuleId, PathId
from peers.path.ahead import Ahead, HeadStart
from peers.path.assignment import Assignment, Base, Work
from peers.path.contribute import Contributor
from peers.path.trainer import PathTrainer
from peers.stages import withdraw_claims

ROUNDS = 4
PATH = PathId((0, 0, 0))


async def finish(world: World) -> None:
    """To the end of the run; and every path counts once in every version."""
    await world.finish()
    for module, ledger in world.seed.archive.ledgers.items():
        for sealed in ledger.versions:
            shares = sealed.document.shares
            assert [share.path for share in shares] == list(world.run.topology.paths_through(module))
            assert {share.base_version for share in shares} == {sealed.document.version - 1}


def run_of(folder: Path, *, overlap: bool, volunteers: int = 4, uplink: str = "int4") -> dict[ModuleId, str]:
    """The digests of a run in which nothing happens."""
    found: dict[ModuleId, str] = {}

    async def scenario() -> None:
        config = tiny_config(rounds=ROUNDS, min_paths=volunteers, overlap=overlap)
        config = replace(config, compression=CompressionConfig(uplink=uplink))
        async with World(folder, config=config) as world:
            for number in range(1, volunteers + 1):
                world.join(number)
            await finish(world)
            found.update(world.digests())

    play(scenario)
    return found


@pytest.fixture(scope="module")
def digests_without(tmp_path_factory: pytest.TempPathFactory) -> dict[ModuleId, str]:
    return run_of(tmp_path_factory.mktemp("without"), overlap=False)


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[PathId, int], Work]:
    """All work that is contributed, by path and round."""
    found: dict[tuple[PathId, int], Work] = {}
    honest = Contributor.contribute

    async def noting(self: Contributor, assignment: Assignment, work: Work, **changes: Any) -> set[str]:
        found[assignment.path, work.round_number] = work
        return await honest(self, assignment, work, **changes)

    monkeypatch.setattr(Contributor, "contribute", noting)
    return found


# -- what is trained and sent


def test_a_round_begins_with_the_own_outer_step_and_names_the_version_that_came(
    tmp_path: Path, works: dict[tuple[PathId, int], Work]
) -> None:
    assert run_of(tmp_path, overlap=True)
    first, second = works[PATH, 0], works[PATH, 1]
    for before, start in zip(first.before, initial()[0], strict=True):
        np.testing.assert_array_equal(before, start)
    for level, before in enumerate(second.before):
        start, end = first.before[level], first.result.flats[level]
        # The run's Nesterov step, lr 0.7 and momentum 0.9, of a momentum of zeros: 0.7 * (g + 0.9 * g).
        np.testing.assert_allclose(before, start - 0.7 * 1.9 * (start - end), atol=1e-5)
    assert {base.version for base in second.bases} == {1}


def test_with_top128_a_round_begins_where_the_last_one_ended(
    tmp_path: Path, works: dict[tuple[PathId, int], Work]
) -> None:
    """Of a momentum of zeros nothing is known that would move it."""
    assert run_of(tmp_path, overlap=True, uplink="top128")
    for before, after in zip(works[PATH, 1].before, works[PATH, 0].result.flats, strict=True):
        np.testing.assert_array_equal(before, after)


def test_what_was_begun_ahead_differs_in_its_start_alone(
    tmp_path: Path, digests_without: dict[ModuleId, str], works: dict[tuple[PathId, int], Work]
) -> None:
    with_overlap = run_of(tmp_path, overlap=True)
    assert with_overlap.keys() == digests_without.keys()
    assert all(with_overlap[module] != digests_without[module] for module in with_overlap)
    assert {number for _, number in works} == set(range(ROUNDS))
    for work in works.values():
        assert [base.version for base in work.bases] == [work.round_number] * len(work.before)
        assert work.result.steps_done == 2 and not work.is_cut


def test_without_overlap_nothing_is_begun_ahead(
    tmp_path: Path, digests_without: dict[ModuleId, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: Ahead, assignment: Assignment, work: Work) -> None:
        raise AssertionError("the run file does not ask for it")

    monkeypatch.setattr(Ahead, "begin", never)
    assert run_of(tmp_path, overlap=False) == digests_without


def test_steps_that_are_dropped_leave_no_trace(
    tmp_path: Path, digests_without: dict[ModuleId, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moments and residuals are what they were: all comes out as if nothing had been begun ahead."""
    asked: list[int] = []

    def moved_on(self: Assignment, round_number: int, *, staleness: int) -> None:
        asked.append(round_number)

    monkeypatch.setattr(Assignment, "bases_of", moved_on)
    assert run_of(tmp_path, overlap=True) == digests_without
    assert sorted(asked) == sorted(4 * list(range(1, ROUNDS)))


def test_who_is_needed_elsewhere_does_not_train_ahead(tmp_path: Path, digests_without: dict[ModuleId, str]) -> None:
    assert run_of(tmp_path, overlap=True, volunteers=2) == digests_without


async def test_replicas_train_ahead_as_well(tmp_path: Path) -> None:
    config = replace(tiny_config(rounds=ROUNDS, min_paths=1, overlap=True), model=MODEL.one_path())
    async with World(tmp_path, config=config) as world:
        world.join_all((1, 2, 3))
        await world.done()
        for ledger in world.seed.archive.ledgers.values():
            for sealed in ledger.versions:
                shares = sealed.document.shares
                assert len({share.peer for share in shares}) == len(shares) == 3
                assert {share.base_version for share in shares} == {sealed.document.version - 1}


# -- what goes on at the same time


def test_the_next_steps_begin_while_pushes_are_on_their_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A push of round 0 ends only after the first step of round 1: without overlap the run would stand still."""
    paths = list(tiny_config().topology.paths())
    begun, pushed = ({path: asyncio.Event() for path in paths} for _ in range(2))
    doings: list[str] = []
    train, push = PathTrainer.train, Contributor._push

    async def noting(self: PathTrainer, flats: Any, *, round_number: int, **changes: Any) -> InnerResult:
        if round_number == 1:
            begun[self.path].set()
            await pushed[self.path].wait()
        return await train(self, flats, round_number=round_number, **changes)

    async def waiting(self: Contributor, contribution: Contribution, payload: bytes) -> str | None:
        if contribution.base_version == 0:
            await begun[contribution.path].wait()
            doings.append(self._status.doing)
            pushed[contribution.path].set()
        return await push(self, contribution, payload)

    monkeypatch.setattr(PathTrainer, "train", noting)
    monkeypatch.setattr(Contributor, "_push", waiting)
    assert run_of(tmp_path, overlap=True)
    assert set(doings) == {"training"}


def test_time_before_the_round_opened_is_not_counted() -> None:
    head_start = HeadStart()
    assert head_start.seconds(100.0) == float("inf")
    head_start.opened_s = 130.0
    assert head_start.seconds(100.0) == 30.0
    assert head_start.seconds(140.0) == 0.0


def version(number: int, *, module: int = 0) -> ModuleVersion:
    return ModuleVersion(
        run="0" * 64,
        module=ModuleId(module, 0),
        version=number,
        parent=f"{number - 1:064x}",
        snapshot=BlobRef(digest=f"{number:064x}", size=1),
        update=None,
        state=None,
        shares=(),
        clip_norm=None,
        lr=0.7,
        momentum=0.9,
        norm_rule="sqrt",
        term=1,
        weight=0,
        grant="0" * 64,
        author=signer(1).peer,
    )


class StandingStill(Assignment):
    """A assignment whose modules have these versions."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers

    @property
    def versions(self) -> list[ModuleVersion]:
        return [version(number, module=level) for level, number in enumerate(self._numbers)]


@pytest.mark.parametrize(
    ("numbers", "staleness", "expected"),
    [((5, 5), 1, [5, 5]), ((5, 6), 1, [5, 5]), ((5, 6), 0, None), ((5, 7), 2, None), ((4, 5), 1, None)],
)
def test_steps_count_from_the_version_that_they_stand_for(
    numbers: tuple[int, ...], staleness: int, expected: list[int] | None
) -> None:
    bases = StandingStill(*numbers).bases_of(5, staleness=staleness)
    assert bases == (
        expected and [Base(module=ModuleId(level, 0), version=5, digest=f"{5:064x}") for level in range(len(expected))]
    )


# -- kills


class Hang:
    """Lets the first volunteer hang for ever in the inner steps of a round that is not open yet."""

    def __init__(self, patch: pytest.MonkeyPatch, *, round_number: int) -> None:
        self.victim: TinyVolunteer | None = None
        self.is_hanging = False
        train = PathTrainer.train

        async def hanging(this: PathTrainer, flats: Any, **changes: Any) -> InnerResult:
            is_its = self.victim is not None and this.path == self.victim.status.path
            if is_its and not self.is_hanging and changes["round_number"] == round_number:
                self.is_hanging = True
                await asyncio.Event().wait()
            return await train(this, flats, **changes)

        patch.setattr(PathTrainer, "train", hanging)


async def come_back(world: World, number: int) -> TinyVolunteer:
    again = TinyVolunteer(world, world.run, number)
    world.volunteers.append(again)
    await again.node.watch.refresh()
    await withdraw_claims(again.node.watch, again.node.presence, again.peer)
    return again.start()


@pytest.mark.parametrize("is_back", [True, False], ids=["comes back", "stays away"])
async def test_a_volunteer_that_is_killed_in_steps_ahead_loses_these_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_back: bool
) -> None:
    hang = Hang(monkeypatch, round_number=2)
    async with World(tmp_path, config=tiny_config(rounds=ROUNDS, overlap=True)) as world:
        world.join_all()
        hang.victim = victim = world.volunteers[0]
        await eventually(lambda: hang.is_hanging and {event["base"] for event in victim.said("receipt")} == {0, 1})
        await world.kill(victim)
        if is_back:
            again = await come_back(world, 1)
        await finish(world)
        if is_back:
            assert [event["round"] for event in again.said("round")][0] == 2
            assert {event["source"] for event in again.said("state")} == {"ours"}


async def test_a_volunteer_that_stops_in_steps_ahead_leaves_in_good_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = Hang(monkeypatch, round_number=2)
    async with World(tmp_path, config=tiny_config(rounds=ROUNDS, overlap=True)) as world:
        world.join_all()
        hang.victim = leaver = world.volunteers[0]
        await eventually(lambda: hang.is_hanging and {event["base"] for event in leaver.said("receipt")} == {0, 1})
        leaver.volunteer.stop()
        await leaver.done()
        assert leaver.said("released") and not leaver.said("left")[0]["complete"]
        await finish(world)
