"""Whole runs, warm-up and grid: who watched all of it, who was away for five rounds, and who only has the folder know
the same."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from e2e_harness import write_corpus
from leaderboard_harness import dump
from stages_harness import Home, run_file
from tiny_run import signer
from virtual_time import end, eventually, play

from dipaco_p2p.config import RoundsConfig, RoutingConfig, WarmupConfig
from dipaco_p2p.node.run import Run
from dipaco_p2p.use.folder import GRID, WARMUP, RunFolder
from leaderboard.chains import Refusals
from leaderboard.collector import Collector
from leaderboard.database import Database
from leaderboard.ledger import Stage
from leaderboard.model import Mark, PathState, Snapshot
from leaderboard.program import rebuild
from leaderboard.rows import StageRows, stage_rows

ROUNDS = 8
AWAY = range(1, 7)
"""The rounds of the grid in which the second collector is not there: five and more."""
POLL_S = 0.1
"""A round of this run takes about a second."""
TABLES = ("heartbeats", "path_states", "witnessed", "first_seen", "refused", "heard", "records")


@dataclass
class Watched:
    """What was left of a run."""

    folder: Path
    always: Path
    away: Path
    late: Path
    snapshots: list[Snapshot] = field(default_factory=list)
    later: Snapshot | None = None
    left_at: list[int] = field(default_factory=list)
    """The versions of the grid's modules that the second one had when it went."""
    back_at: list[int] = field(default_factory=list)
    """Those that the run had when it came back."""


class Watcher:
    """A collector that can be ended and started again, over one database."""

    def __init__(self, home: Home, number: int, path: Path) -> None:
        self.home, self.path = home, path
        self.swarm = home.network.join(signer(number))
        self.snapshots: list[Snapshot] = []
        self.collector: Collector
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.database = Database.open(self.path)
        self.collector = Collector(
            self.swarm,
            self.home.coordinator,
            self.home.clock,
            self.database,
            expected=None,
            on_snapshot=self.snapshots.append,
            poll_s=POLL_S,
        )
        self._task = asyncio.create_task(self.collector.run())

    def heads(self) -> list[int]:
        """The versions that it has of the grid's modules."""
        stages = [stage for stage in self.collector.stages if stage.run.is_last_stage]
        return [chain.head.version for stage in stages for chain in stage.chains.values()]

    async def stop(self) -> None:
        await end(self._task)
        self.database.close()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder = tmp_path_factory.mktemp("watched")
    found = Watched(
        folder=folder / "run", always=folder / "always.sqlite", away=folder / "away.sqlite", late=folder / "late.sqlite"
    )
    file = run_file(
        write_corpus(folder / "corpus.jsonl"),
        warmup=WarmupConfig(rounds=2),
        rounds=RoundsConfig(rounds=ROUNDS, min_paths=2, deadline_s=20.0, grace_s=1.0),
        routing=RoutingConfig(reshard_rounds=(1,)),
    )

    async def scenario() -> None:
        home = Home(folder, file)
        home.start()
        always, away = Watcher(home, 150, found.always), Watcher(home, 151, found.away)
        always.start()
        away.start()
        await home.join(1, evaluate=True)
        await home.join(2, evaluate=True)
        await eventually(lambda: min(away.heads(), default=0) >= AWAY.start, limit_s=600)
        found.left_at = away.heads()
        await away.stop()
        await eventually(lambda: min(home.heads(GRID).values()) >= AWAY.stop, limit_s=600)
        found.back_at = [*home.heads(GRID).values()]
        away.start()
        await home.volunteers_done()
        await eventually(lambda: always.collector.is_settled and away.collector.is_settled, limit_s=600)
        await asyncio.sleep(30)
        found.snapshots, found.later = always.snapshots, away.snapshots[-1]
        await always.stop()
        await away.stop()
        await home.die()
        home.start()  # in the grid: the warm-up is over for long
        late = Watcher(home, 152, found.late)
        late.start()
        await eventually(lambda: late.collector.is_settled, limit_s=600)
        await late.stop()
        await home.close()

    play(scenario, limit_s=7200)
    return found


def stages(path: Path) -> list[Stage]:
    with closing(Database.open(path)) as database:
        return database.load(Refusals())


def observed(path: Path) -> list[StageRows]:
    return [stage_rows(stage) for stage in stages(path)]


def derived(path: Path) -> list[StageRows]:
    """Without what rests on observations: what remains anybody can have again."""
    found = []
    for stage in stages(path):
        stage.receipts, stage.first_seen, stage.checks, stage.rejections = {}, {}, {}, {}
        found.append(stage_rows(stage))
    return [replace(one, versions=tuple(replace(row, cosigners=()) for row in one.versions)) for one in found]


def kept(path: Path, table: str = "records") -> list[tuple[object, ...]]:
    with closing(Database.open(path)) as database:
        return dump(database, table)


def checks_of(path: Path) -> set[object]:
    """The ids of the measurements that are kept there."""
    return {row[2] for row in kept(path, "witnessed") if row[1] == "check"}


def test_who_was_away_for_five_rounds_has_the_same_tables(watched: Watched) -> None:
    assert 0 < min(watched.left_at) and max(watched.left_at) + 5 <= min(watched.back_at)
    assert kept(watched.always) == kept(watched.away) != []
    assert derived(watched.always) == derived(watched.away)


def test_who_comes_after_a_restart_needs_no_folder_for_the_warm_up(watched: Watched) -> None:
    assert kept(watched.late) == kept(watched.always)
    assert derived(watched.late) == derived(watched.always)


def test_losses_that_both_volunteers_checked_are_verified(watched: Watched) -> None:
    snapshot = watched.snapshots[-1]
    assert snapshot.checks and all(row.agrees for row in snapshot.checks)
    paths = {(row.stage, row.version, row.path) for row in snapshot.checks if row.is_independent}
    counts, sizes = Counter(key[:2] for key in paths), {row.id: row.paths for row in snapshot.run.stages}
    whole = {key for key, count in counts.items() if count == sizes[key[0]]}
    assert whole, "a round of which each volunteer checked the other's path"
    for row in snapshot.rounds:
        assert row.checks is not None and row.checks.differ == 0
        assert (row.checks.mark is Mark.VERIFIED) == ((row.stage, row.version) in whole)
    late = [row for one in observed(watched.late) for row in one.checked.rows]
    assert {(row.version, row.path, row.peer) for row in late} == {
        (row.version, row.path, row.peer) for row in snapshot.checks
    }


def test_the_folder_alone_gives_the_same_tables(watched: Watched, tmp_path: Path) -> None:
    again = tmp_path / "again.sqlite"
    with closing(Database.open(again)) as database:
        rebuild(watched.folder, database)
    assert kept(again) == kept(watched.always) and kept(again, "refused") == []
    assert checks_of(again) == checks_of(watched.always)
    assert derived(again) == derived(watched.always)


def test_all_versions_are_verified_judged_and_credited(watched: Watched) -> None:
    snapshot = watched.snapshots[-1]
    assert snapshot.state == "complete" and {row.state for row in snapshot.paths} == {PathState.DONE}
    assert [stage.name for stage in snapshot.run.stages] == [WARMUP, GRID]
    assert {(row.stage, row.module, row.version) for row in snapshot.versions} == {
        (run.id, module, version)
        for run in runs(watched)
        for module in run.topology.modules()
        for version in range(run.config.rounds.rounds + 1)
    }
    assert {row.mark for row in snapshot.versions} == {Mark.VERIFIED}
    assert all(row.loss_after is not None for row in snapshot.versions)
    assert all(row.loss_before is not None for row in snapshot.versions if row.version)
    assert [row.version for row in snapshot.rounds] == [*range(3), *range(ROUNDS + 1)]
    assert snapshot.losses == () and snapshot.refused == {}


def test_credit_is_conserved_and_a_whole_run_earns_its_tokens(watched: Watched) -> None:
    snapshot = watched.snapshots[-1]
    shares = [share for row in snapshot.versions for share in row.shares]
    assert snapshot.credit_total == pytest.approx(sum(share.credit for share in shares))
    assert sum(row.credit for row in snapshot.contributors) == pytest.approx(snapshot.credit_total)
    assert sum(row.tokens for row in snapshot.contributors) == pytest.approx(snapshot.credit_total)
    assert {row.peer for row in snapshot.contributors} == {signer(1).peer, signer(2).peer}
    assert [row.rank for row in snapshot.contributors] == [1, 2]


def test_who_watched_saw_receipts_bytes_and_steps(watched: Watched) -> None:
    shares = [share for row in watched.snapshots[-1].versions for share in row.shares]
    assert all(share.bytes and share.steps for share in shares)
    assert sum(share.has_receipt for share in shares) > len(shares) / 2


def test_the_run_was_seen_while_it_went_on(watched: Watched) -> None:
    states = [snapshot.state for snapshot in watched.snapshots]
    assert {"training", "complete"} <= set(states)
    assert max(snapshot.peers_alive for snapshot in watched.snapshots) == 2
    assert max(snapshot.paths_covered for snapshot in watched.snapshots) == 2
    times = [snapshot.taken_s for snapshot in watched.snapshots]
    assert all(0 < after - before <= 10 for before, after in zip(times, times[1:], strict=False))


def test_a_database_that_is_opened_again_shows_the_same(watched: Watched) -> None:
    assert watched.later is not None
    last = watched.snapshots[-1]
    found = observed(watched.always)
    assert tuple(row for one in found for row in one.versions) == last.versions
    assert [row.digest for row in watched.later.versions] == [row.digest for row in last.versions]


def test_nobodys_address_is_written_down(watched: Watched) -> None:
    text = repr([kept(watched.always, table) for table in TABLES])
    assert "/memory/" not in text and "/ip4/" not in text


def runs(watched: Watched) -> list[Run]:
    found = [RunFolder(watched.folder).open(name) for name in (WARMUP, GRID)]
    return [run for run in found if run is not None]
