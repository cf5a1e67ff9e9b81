"""Volunteers measure losses again: the same figure, signed; what is forged, replayed or too much is not kept."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from e2e_harness import write_corpus
from runtime_harness import node_of
from stages_harness import Home, eventually, run_file
from tiny_run import make_run, signer, tiny_config
from virtual_time import VirtualClock, play

from bootstrap.archives.records import Checks, PublicRecords
from bootstrap.coordinator.resharding import Resharding
from dipaco_p2p.config import WarmupConfig
from dipaco_p2p.errors import ConfigError, IntegrityError, Refused, Unreachable
from dipaco_p2p.node.calls import GetChecks, GetContributions, GetJudgements
from dipaco_p2p.node.measuring import Measuring
from dipaco_p2p.node.node import open_member
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import ArchiveChains, SeedArchive
from dipaco_p2p.owner.mirror_calls import MirrorCalls
from dipaco_p2p.protocol import documents
from dipaco_p2p.protocol.documents import Contribution, Sealed, seal, unseal
from dipaco_p2p.protocol.judgement import OF_AUTHOR_MAX, OF_PATH_MAX, OF_STRANGERS_MAX, Check, Judgement
from dipaco_p2p.protocol.liveness import Heartbeat
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.swarm.memory import MemoryNetwork, MemorySwarm
from dipaco_p2p.topology import PathId
from dipaco_p2p.use.folder import GRID, RunFolder
from peers.evaluation.between_rounds import SHARE_MAX, Evaluating
from peers.evaluation.evaluate import Compared, document_of, evaluate, table_of


@dataclass
class Played:
    """What was left of a run, and what was asked while it was served."""

    folder: Path
    compared: list[Compared] = field(default_factory=list)
    early: list[Compared] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def documents(self, prefix: str) -> list[Any]:
        folder = self.folder / GRID / "documents"
        return [json.loads(path.read_bytes()) for path in sorted(folder.glob(f"{prefix}-*.json"))]

    def judgements(self) -> dict[int, Judgement]:
        found = [unseal(Judgement, value).document for value in self.documents("judgement")]
        return {one.version: one for one in found}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("checked")
    found = Played(folder / "run")

    async def scenario() -> None:
        home = Home(folder, run_file(write_corpus(folder / "corpus.jsonl")))
        home.start()
        await home.join(1, evaluate=True)
        await home.join(2)
        await home.volunteers_done()
        reader = home.network.join(signer(150))

        async def ask(**asked: Any) -> list[Compared]:
            run, (version, rows) = await evaluate(reader, home.coordinator, home.clock, folder / "reader", **asked)
            assert document_of(run, version, rows)["round"] == asked.get("round_number", 3)
            assert table_of(run, version, rows).row_count == len(rows)
            return rows

        found.compared = await ask()
        found.early = await ask(round_number=1, path="P0-1")
        for asked in ({"round_number": 9}, {"path": "P0-7"}):
            try:
                await ask(**asked)
            except ConfigError as error:
                found.problems.append(str(error))
        await home.close()

    play(scenario, limit_s=7200)
    return found


# -- the figures


def test_a_volunteer_that_offers_it_signs_what_the_coordinator_measured(played: Played) -> None:
    checks = [unseal(Check, value).document for value in played.documents("check")]
    judgements = played.judgements()
    assert checks and {check.author for check in checks} == {signer(1).peer}
    for check in checks:
        judged = {found.path: found.loss for found in judgements[check.version].paths}
        assert check.loss == pytest.approx(judged[check.path], abs=1e-9)
    assert 3 in {check.version for check in checks}, "the last round, which is judged when training is over"


def test_nobody_checks_its_own_work(played: Played) -> None:
    history = (played.folder.parent / "volunteer-1").rglob("history.jsonl")
    events = [json.loads(line) for path in history for line in path.read_text().splitlines()]
    trained = {(event["path"], event["round"]) for event in events if event["ev"] == "round"}
    checked = {(event["path"], event["version"]) for event in events if event["ev"] == "checked"}
    assert any(version for _, version in checked), "not only what nobody has trained yet"
    assert not any((path, round_) in trained for path, version in checked for round_ in range(version))


def test_a_stranger_measures_what_was_published(played: Played) -> None:
    assert [row.path for row in played.compared] and all(row.is_same for row in played.compared)
    assert [str(row.path) for row in played.early] == ["P0-1"] and played.early[0].is_same
    assert played.problems == ["round 9 of this run is not judged", "P0-7 has no published loss"]


async def test_a_sharding_that_came_after_the_judgement_makes_no_two_measurements_differ(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the first sharding is published rounds after its own; what was judged stays as it was."""
    last = tmp_path / "run" / GRID / "documents" / "judgement-00000003.json"
    publish = Resharding._publish

    async def late(self: Resharding, number: int, round_number: int) -> None:
        while not last.exists():
            await self._node.clock.sleep(0.5)
        await publish(self, number, round_number)

    monkeypatch.setattr(Resharding, "_publish", late)
    home = Home(tmp_path, run_file(corpus, warmup=WarmupConfig(rounds=0)))
    home.start()
    await home.join(1, 2)
    await home.volunteers_done()
    await eventually(home.is_over)
    reader = home.network.join(signer(150))
    run, (_, rows) = await evaluate(reader, home.coordinator, home.clock, tmp_path / "reader")
    assert run.sharding_at(2) == 1
    await home.close()
    assert unseal(Judgement, json.loads(last.read_bytes())).document.sharding == 0
    assert rows and all(row.measured == pytest.approx(row.published, abs=1e-9) for row in rows)


# -- what is kept of them


class Keeper:
    """A seed node's checks over the folder of a run that is over, and peers that send some."""

    def __init__(self, played: Played, folder: Path) -> None:
        source = RunFolder(played.folder)
        run = source.open(GRID)
        assert run is not None
        self.run = run
        self.archive = SeedArchive(run, source.store(GRID))
        self.records = PublicRecords(source.store(GRID), self.archive)
        self.store = Store(folder)
        self.alive: set[Any] = set()
        self.network = MemoryNetwork(0, VirtualClock())
        self._swarms: dict[str, MemorySwarm] = {}
        self.seed = self.open()
        self.judgement = played.judgements()[3]
        self.honest: Check = next(
            document for value in played.documents("check") if (document := unseal(Check, value).document).version == 3
        )

    def open(self) -> MemorySwarm:
        """As a program does, also after it was killed."""
        self.network.kill(signer(200).peer)
        swarm = self.network.join(signer(200))
        judged, alive = self.records.judgement, self.alive.__contains__
        Checks(self.run, self.store, self.archive, judged=judged, is_alive=alive).serve(swarm)
        return swarm

    def check(self, author: Signer, **changes: Any) -> Sealed[Check]:
        return seal(author, replace(self.honest, author=author.peer, **changes))

    async def send(self, author: Signer, value: Any = None, **changes: Any) -> None:
        swarm = self.joined(author)
        value = self.check(author, **changes).to_dict() if value is None else value
        await swarm.call(self.seed.peer, "run.check", {"check": value}, timeout_s=5.0)

    def joined(self, one: Signer) -> MemorySwarm:
        if one.peer not in self._swarms:
            self._swarms[one.peer] = self.network.join(one)
        return self._swarms[one.peer]

    async def kept(self) -> list[Sealed[Check]]:
        swarm, found, begin = self.joined(signer(149)), list[Sealed[Check]](), 0
        while True:
            reply = await swarm.call(self.seed.peer, "run.checks", {"from": begin}, timeout_s=5.0)
            page = [unseal(Check, value) for value in json.loads(reply.body)]
            found, begin = found + page, reply.header["next"]
            if not page:
                return found


async def test_what_is_sent_to_strangers_is_not_checked_for_each_of_them(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = RunFolder(played.folder)
    run, store, me = source.open(GRID), source.store(GRID), signer(1).peer
    assert run is not None
    archive = SeedArchive(run, store)
    records = PublicRecords(store, archive)
    checks = Checks(run, store, archive, judged=records.judgement, is_alive=lambda peer: True)
    works = tuple(sorted({id_ for ledger in archive.ledgers.values() for id_ in ledger.counted}))[:64]
    node = open_member(run, MemoryNetwork(0, VirtualClock()).join(signer(1)), VirtualClock(), store)
    calls = MirrorCalls(ArchiveChains(node, archive))

    def dear(*_: object) -> Any:
        raise AssertionError("half a second a page, in which the coordinator does nothing else")

    monkeypatch.setattr(documents, "verify", dear)
    monkeypatch.setattr(Store, "documents", dear)
    judgements = await records._on_judgements(me, GetJudgements(from_=1))
    assert json.loads(judgements.body) == played.documents("judgement")[1:]
    assert json.loads((await checks._on_checks(me, GetChecks(from_=0))).body) == played.documents("check")
    found = json.loads((await calls._on_contributions(me, GetContributions(ids=("0" * 64, *works)))).body)
    assert len(found) == len(works) > 0
    monkeypatch.undo()
    assert [unseal(Contribution, value).id for value in found] == list(works)


async def test_a_disagreement_is_kept_like_any_other_and_the_same_again_changes_nothing(
    played: Played, tmp_path: Path
) -> None:
    keeper = Keeper(played, tmp_path)
    nats = keeper.honest.nats * 2
    for _ in range(2):
        await keeper.send(signer(2), nats=nats)
    with pytest.raises(Refused, match="was checked"):
        await keeper.send(signer(2))
    assert [sealed.document.nats for sealed in await keeper.kept()] == [nats]
    keeper.open()  # after a restart
    with pytest.raises(Refused, match="was checked"):
        await keeper.send(signer(2))
    await keeper.send(signer(1))
    assert len(await keeper.kept()) == 2


FORGERIES: dict[str, dict[str, Any]] = {
    "another run": {"run": "0" * 64},
    "no such path": {"path": PathId((0, 7))},
    "a round that is not judged": {"version": 4},
    "other versions": {"modules": ("0" * 64, "1" * 64)},
    "too few versions": {"modules": ()},
    "another sharding": {"sharding": 7},
    "another text": {"validation": "0" * 64},
    "more tokens than there are": {"tokens": 2**40},
    "half a document": {"tokens": 1},
}


@pytest.mark.parametrize("forgery", FORGERIES)
async def test_what_is_about_something_else_is_refused(played: Played, tmp_path: Path, forgery: str) -> None:
    keeper = Keeper(played, tmp_path)
    with pytest.raises(Refused):
        await keeper.send(signer(2), **FORGERIES[forgery])
    assert await keeper.kept() == []


@pytest.mark.parametrize(
    "changes",
    [{"nats": float("nan")}, {"nats": float("inf")}, {"nats": -1.0}, {"tokens": 0}, {"tokens": 2**41}, {"more": 1}],
)
async def test_what_is_no_figure_is_refused(played: Played, tmp_path: Path, changes: dict[str, Any]) -> None:
    keeper = Keeper(played, tmp_path)
    value = keeper.check(signer(2)).to_dict()
    value["document"].update(changes)
    with pytest.raises((Refused, ValueError, IntegrityError)):
        await keeper.send(signer(2), value)
    assert await keeper.kept() == []


async def test_a_check_counts_for_its_author_only(played: Played, tmp_path: Path) -> None:
    keeper = Keeper(played, tmp_path)
    theirs = keeper.check(signer(2)).to_dict()
    with pytest.raises(Refused, match="by its author"):
        await keeper.send(signer(1), theirs)
    theirs["document"]["author"] = signer(1).peer
    with pytest.raises((Refused, IntegrityError)):
        await keeper.send(signer(1), theirs)
    assert await keeper.kept() == []


async def test_strangers_take_few_places_and_nobody_takes_all(played: Played, tmp_path: Path) -> None:
    keeper = Keeper(played, tmp_path)
    with pytest.raises(Refused, match="no heartbeat and no work"):
        await keeper.send(signer(20))
    strangers = [signer(number) for number in range(20, 20 + OF_STRANGERS_MAX + 1)]
    keeper.alive.update(one.peer for one in strangers)
    for one in strangers[:-1]:
        await keeper.send(one)
    with pytest.raises(Refused, match="enough"):
        await keeper.send(strangers[-1])
    await keeper.send(signer(1))  # whose work the versions count
    assert len(await keeper.kept()) == OF_STRANGERS_MAX + 1 <= min(OF_PATH_MAX, OF_AUTHOR_MAX)


# -- how much of a volunteer's time it takes


class Slow(Evaluating):
    """Every look costs nine seconds, and finds nobody."""

    looks = 0

    async def _look(self) -> None:
        self.looks += 1
        await self._node.clock.sleep(9.0)
        raise Unreachable("nobody is there")


async def test_evaluating_takes_no_more_than_its_share_of_the_time(tmp_path: Path) -> None:
    clock = VirtualClock()
    run, swarm = make_run(Store(tmp_path), tiny_config()), MemoryNetwork(0, clock).join(signer(1))
    node = node_of(run, swarm, tmp_path / "volunteer", clock, Heartbeat())
    evaluating, began_s = Slow(node, Measuring(node)), clock.now_s()
    for _ in range(300):
        await clock.sleep(1.0)
        await evaluating.between_rounds(say=lambda path: None)
    lived_s = clock.now_s() - began_s
    assert 2 <= evaluating.looks <= 1 + SHARE_MAX * lived_s / 9.0
