"""Rounds that volunteers measure for a coordinator without parameters: the same figures, whoever lies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from e2e_harness import write_corpus
from group_harness import asked, of_group
from runtime_harness import node_of
from stages_harness import Home, eventually, run_file
from tiny_run import make_run, signer, tiny_config
from virtual_time import VirtualClock, play

from bootstrap.archives.verify import verify_run
from bootstrap.coordinator import measurements
from bootstrap.runfile import ArchiveConfig
from dipaco_p2p.config import WarmupConfig
from dipaco_p2p.core.routing.evaluate import Evaluation
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.node.calls import GetMeasure, Wanted
from dipaco_p2p.node.measuring import Measured, Measuring
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.protocol.documents import unseal
from dipaco_p2p.protocol.judgement import Check, Judgement, agrees
from dipaco_p2p.protocol.liveness import Heartbeat
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.memory import MemoryNetwork
from dipaco_p2p.topology import PathId
from dipaco_p2p.use.folder import GRID, RunFolder
from peers.evaluation.between_rounds import SHARE_MAX, Measurer
from peers.evaluation.evaluate import Compared, evaluate

VOLUNTEERS = (1, 2, 3, 4)
ROUNDS = 8
MARKED = (1, 3, ROUNDS)
"""Rounds whose parameters the archive has in any case: text is sharded there, or they are the last."""


@dataclass
class Played:
    """A run of four volunteers, two on each path, whose coordinator measures the genesis alone."""

    folder: Path
    compared: dict[int, list[Compared]] = field(default_factory=dict)
    """What a stranger measured of each round, by the whole chains."""

    def documents(self, kind: str) -> list[Any]:
        return [json.loads(path.read_bytes()) for path in sorted((self.grid / "documents").glob(f"{kind}-*.json"))]

    def judgements(self) -> dict[int, Judgement]:
        found = [unseal(Judgement, value).document for value in self.documents("judgement")]
        return {one.version: one for one in found}

    def said(self, event: str) -> list[dict[str, Any]]:
        """Of the coordinator's history."""
        lines = (self.grid / "history.jsonl").read_text().splitlines()
        return [value for value in map(json.loads, lines) if value["ev"] == event]

    @property
    def grid(self) -> Path:
        return self.folder / "run" / GRID


def play_measured(folder: Path, *, measured: float = 0.0, judged: Sequence[int] | None = None) -> Played:
    """A stranger measures again the rounds that are to be `judged`: all of them unless some are named."""
    found = Played(folder)
    file = run_file(write_corpus(folder / "corpus.jsonl"), warmup=WarmupConfig(rounds=0))
    rounds = replace(file.run.rounds, rounds=ROUNDS)
    archive = ArchiveConfig(rounds=2, snapshots=0, remade=0.0, measured=measured)
    file = replace(file, run=replace(file.run, rounds=rounds), archive=archive)

    async def scenario() -> None:
        home = Home(folder, file)
        home.start()
        await home.join(*VOLUNTEERS)
        reader = home.network.join(signer(150))

        def is_judged(version: int) -> bool:
            return (found.grid / "documents" / f"judgement-{version:08d}.json").exists()

        for version in judged or range(1, ROUNDS + 1):  # while its parameters are still there
            await eventually(lambda version=version: is_judged(version))
            _, (_, rows) = await evaluate(
                reader, home.coordinator, home.clock, folder / f"reader-{version}", round_number=version
            )
            found.compared[version] = rows
        await home.volunteers_done()
        await eventually(home.is_over)
        await home.close()

    play(scenario, limit_s=7200)
    return found


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return play_measured(tmp_path_factory.mktemp("measured"))


def test_what_volunteers_agree_on_is_what_anybody_measures(played: Played) -> None:
    judgements = played.judgements()
    assert sorted(judgements) == list(range(ROUNDS + 1))
    for version, rows in played.compared.items():
        assert len(rows) == 2 and all(row.is_same for row in rows), version
    assert all(found.holdout_loss is None for found in judgements[ROUNDS].paths)
    assert judgements[ROUNDS].loss < judgements[0].loss


def test_their_figures_are_kept_for_everybody(played: Played) -> None:
    checks = [unseal(Check, value).document for value in played.documents("check")]
    by_place: dict[tuple[int, PathId], set[PeerId]] = {}
    for check in checks:
        by_place.setdefault((check.version, check.path), set()).add(check.author)
    assert len(by_place) >= ROUNDS // 2 and max(map(len, by_place.values())) == 2
    assert played.said("measured_wrong") == []


def test_nobody_measures_what_it_has_trained(played: Played) -> None:
    run = RunFolder(played.folder / "run").open(GRID)
    assert run is not None
    archive = SeedArchive(run, RunFolder(played.folder / "run").store(GRID))
    for check in (unseal(Check, value).document for value in played.documents("check")):
        shares = (
            share
            for module in check.path.modules()
            for sealed in archive.ledgers[module].versions[: check.version]
            for share in sealed.document.shares
        )
        assert check.author not in {share.peer for share in shares if share.path == check.path}


def test_the_archive_has_the_parameters_of_the_last_round_and_the_chains_verify(played: Played) -> None:
    folder = RunFolder(played.folder / "run")
    run, store = folder.open(GRID), folder.store(GRID)
    assert run is not None
    archive = SeedArchive(run, store)
    for module, ledger in archive.ledgers.items():
        here = [each.document.version for each in ledger.versions if store.size(each.document.digest) is not None]
        marked = {*run.config.routing.reshard_rounds, ROUNDS}
        lacking = set(range(1, ROUNDS + 1)) - set(here)
        assert marked <= set(here) and len(lacking) >= 2, (module, here)
        assert all(archive.thinning.of(module).lacks(version) for version in lacking)
        assert not any(archive.thinning.of(module).lacks(version) for version in marked)
    assert not [report.problem for report in verify_run(run, store, archive) if report.problem]


# -- lies


@contextmanager
def lying(*liars: PeerId, nats: float) -> Iterator[None]:
    """They say that every path is so much worse, per token, than it is."""
    measure = Measuring.measure

    async def lie(self: Measuring, *values: Any, **named: Any) -> Measured:
        found = await measure(self, *values, **named)
        if self._node.peer not in liars or found.evaluation is None:
            return found
        worse = found.evaluation.nats_total + nats * found.evaluation.tokens
        return replace(found, evaluation=Evaluation(nats_total=worse, tokens=found.evaluation.tokens))

    with mock.patch.object(Measuring, "measure", lie):
        yield


def test_a_liar_changes_no_figure_and_is_asked_for_nothing_any_more(tmp_path: Path) -> None:
    liar = signer(2).peer
    with lying(liar, nats=1.0):
        played = play_measured(tmp_path)
    assert all(row.is_same for rows in played.compared.values() for row in rows)
    [event] = played.said("measured_wrong")
    assert event["peer"] == liar and not agrees(event["loss"], event["ours"])
    checks = [unseal(Check, value).document for value in played.documents("check")]
    assert sum(check.author == liar for check in checks) == 1


def test_of_two_that_lie_alike_only_the_draw_finds_out(tmp_path: Path) -> None:
    with lying(*(signer(number).peer for number in VOLUNTEERS), nats=1.0):
        played = play_measured(tmp_path, measured=1 - 1e-9, judged=MARKED)
    assert all(row.is_same for rows in played.compared.values() for row in rows)
    assert {event["peer"] for event in played.said("measured_wrong")} >= {signer(1).peer}


@pytest.mark.parametrize("every", [1, ROUNDS // 2 + 1])
def test_without_anybody_to_measure_the_coordinator_does_now_and_then(tmp_path: Path, every: int) -> None:
    """Late, and with parameters that it fetches for it."""

    async def silent(self: Measurer) -> None:
        return None

    with mock.patch.object(Measurer, "_ask", silent), mock.patch.object(measurements, "ALONE_EVERY", every):
        played = play_measured(tmp_path, judged=MARKED if every > 1 else None)
    found = set(played.judgements())
    assert found >= {*MARKED, every} and (every == 1) == (found == set(range(ROUNDS + 1)))
    assert all(row.is_same for rows in played.compared.values() for row in rows)
    assert played.documents("check") == []


def test_a_coordinator_that_recomputes_everything_measures_everything() -> None:
    with pytest.raises(ConfigError, match="remade = 1"):
        ArchiveConfig(measured=0.5)


# -- how much of a volunteer's time it takes


class Busy(Measurer):
    """There is always something to measure, and it takes nine seconds."""

    asked = done = 0

    async def _ask(self) -> Wanted:
        self.asked += 1
        return Wanted(path=PathId((0, 0, 0)))

    async def _do(self, *values: Any) -> bool:
        await self._node.clock.sleep(9.0)
        self.done += 1
        return True


def busy(folder: Path, *, deadline_s: float = 40.0) -> tuple[Busy, VirtualClock]:
    clock = VirtualClock()
    config = tiny_config()
    config = replace(config, rounds=replace(config.rounds, deadline_s=deadline_s))
    run, swarm = make_run(Store(folder), config), MemoryNetwork(0, clock).join(signer(1))
    node = node_of(run, swarm, folder / "volunteer", clock, Heartbeat())
    return Busy(node, Measuring(node)), clock


def ignore(path: PathId) -> None:
    pass


async def test_measuring_takes_no_more_than_its_share_of_the_time(tmp_path: Path) -> None:
    measurer, clock = busy(tmp_path)
    began_s = clock.now_s()
    for second in range(300):
        await clock.sleep(1.0)
        for _ in range(5):  # while it waits for a round it may look often
            await measurer.while_waiting(second // 10, is_due=lambda: False, say=ignore)
    lived_s = clock.now_s() - began_s
    assert 2 <= measurer.done <= 1 + SHARE_MAX * lived_s / 9.0
    assert measurer.asked <= 30 + measurer.done, "once for each round, and after each path"


async def test_a_round_that_is_due_waits_for_one_path_at_most(tmp_path: Path) -> None:
    measurer, clock = busy(tmp_path)
    await clock.sleep(3600.0)  # much time is left to spend
    await measurer.while_waiting(0, is_due=lambda: True, say=ignore)
    assert measurer.asked == 0
    began_s = clock.now_s()
    await measurer.while_waiting(1, is_due=lambda: clock.now_s() > began_s + 1.0, say=ignore)
    assert measurer.done == 1 and clock.now_s() - began_s < 10.0


async def test_a_path_that_takes_too_long_is_left(tmp_path: Path) -> None:
    measurer, clock = busy(tmp_path, deadline_s=20.0)
    await clock.sleep(3600.0)
    began_s = clock.now_s()
    await measurer.while_waiting(0, is_due=lambda: False, say=ignore)
    assert measurer.done == 0 and clock.now_s() - began_s == pytest.approx(5.0)


async def test_a_coordinator_that_measures_itself_is_not_asked(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, _, author):
        GetMeasure.serve(world.seed.swarm, nothing)
        calls, measurer = asked(world), Measurer(author, Measuring(author))
        await author.watch.refresh()
        await measurer.while_waiting(0, is_due=lambda: False, say=ignore)
        assert "run.measure" not in calls
        await world.seed.node.presence.say(light=True)
        await author.watch.refresh()
        await measurer.while_waiting(1, is_due=lambda: False, say=ignore)
        assert calls.count("run.measure") == 1


async def nothing(sender: PeerId, request: GetMeasure) -> Wanted:
    return Wanted()
