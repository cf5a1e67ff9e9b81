"""A coordinator that came out of a backup: it learns what it signed, signs nothing twice, and the run goes on to its
end. And a further seed node, which it fills its archive from."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from e2e_harness import write_corpus
from led_module import MODULE, on_stage
from runtime_harness import TinySeed, node_of
from stages_harness import RESHARDED_ONCE, Home, run_file
from tiny_run import SEED_NUMBER, signer
from virtual_time import end, eventually

from bootstrap.archives.verify import verify_stages
from bootstrap.control.requests import Request
from bootstrap.folder import read_marker, write_stage
from bootstrap.recovery.backup import back_up, restore
from bootstrap.recovery.catching_up import ASKED_MAX, CatchingUp
from bootstrap.recovery.rejoin import learn_stages
from bootstrap.recovery.standby import Standby
from dipaco_p2p.config import RoundsConfig, WarmupConfig
from dipaco_p2p.errors import EnvironmentUnfit, Refused, Unreachable
from dipaco_p2p.node.ledger import Ledger
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.stages import fetch_stages
from dipaco_p2p.node.store import Store
from dipaco_p2p.program.history import read_history
from dipaco_p2p.protocol.documents import Grant, ModuleVersion, Sealed, unseal
from dipaco_p2p.protocol.liveness import Heartbeat
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm.identity import write as write_key
from dipaco_p2p.swarm.stage_scope import ScopedSwarm
from dipaco_p2p.use.folder import GRID, WARMUP, RunFolder

STANDBY = 150
SHORT = RoundsConfig(rounds=6, min_paths=2, deadline_s=20.0, grace_s=1.0)
ENDLESS = replace(SHORT, rounds=100_000)


class Lost(Home):
    """A run whose coordinator loses its folder, and another seed node."""

    def __init__(self, folder: Path, file: Any) -> None:
        super().__init__(folder, file)
        self.saved = folder / "safe.tar"
        self.second = folder / "second"
        self.standby: Standby | None = None
        self.looking: asyncio.Task[None] | None = None

    def save(self) -> None:
        write_key(self.folder / "identity.key", bytes([SEED_NUMBER]) * 32)
        back_up(self.folder, self.saved, now_s=self.clock.now_s())

    async def decree(self, number: int) -> int:
        """Ban a peer that nobody has heard of; the number of that decree."""
        assert self.seed is not None
        row = await self.seed._decree(Request(ask="ban", peer=signer(number).peer, reason="a test"))
        return int(row["number"])

    async def lose(self) -> None:
        await self.die()
        shutil.rmtree(self.folder)

    async def join(self, *numbers: int, **settings: Any) -> None:
        """In runs as long as these a volunteer would try whether a compiled graph is quicker."""
        await super().join(*numbers, **settings, engine="exact")

    async def stand_by(self) -> Standby:
        swarm = self.network.join(signer(STANDBY))
        self.second.mkdir()
        standby = self.standby = Standby(swarm, RunFolder(self.second), self.clock)
        standby.open(await fetch_stages(swarm, self.coordinator, expected=None))
        seed = self.seed
        assert seed is not None
        await eventually(lambda: seed.stage() is not None)
        await seed._decree(Request(ask="appoint", peer=swarm.peer))

        async def dial() -> None:
            """The memory swarm is always connected."""

        self.looking = asyncio.create_task(standby.run([], dial=dial))
        return standby

    async def close(self) -> None:
        if self.standby is not None:
            await end(self.looking)
            for stage in self.standby.opened:
                await stage.cancel()
        await super().close()

    def head(self) -> int:
        """The newest version that all modules of the grid have."""
        return min(self.heads(GRID).values(), default=0)

    def grid(self) -> Run:
        run = RunFolder(self.folder).open(GRID)
        assert run is not None
        return run

    def has_caught_up(self) -> bool:
        return any(event["ev"] == "caught_up" for event in read_history(self.folder / GRID / "history.jsonl"))

    def finals(self) -> dict[tuple[str, int], set[str]]:
        """By module and number, the digests that anybody's chain has with the coordinator's signature."""
        found: dict[tuple[str, int], set[str]] = {}
        for path in self.homes.rglob("version-*.json"):
            sealed: Sealed[ModuleVersion] = unseal(ModuleVersion, json.loads(path.read_bytes()))
            document = sealed.document
            if self.coordinator in {*sealed.cosignatures, document.author}:
                run = document.run
                found.setdefault((f"{run} {document.module}", document.version), set()).add(document.digest)
        return found

    def grants(self) -> dict[tuple[str, int], set[str]]:
        """By module and term, the coordinator's grants that anybody has on disk."""
        found: dict[tuple[str, int], set[str]] = {}
        for path in self.homes.rglob("mandate-*.json"):
            for item in json.loads(path.read_bytes()):
                grant = unseal(Grant, item)
                if grant.document.author == self.coordinator:
                    key = f"{grant.document.run} {grant.document.module}", grant.document.term
                    found.setdefault(key, set()).add(grant.id)
        return found


def make(folder: Path, rounds: RoundsConfig) -> Lost:
    file = run_file(
        write_corpus(folder / "corpus.jsonl"), rounds=rounds, warmup=WarmupConfig(rounds=1), routing=RESHARDED_ONCE
    )
    return Lost(folder, file)


@pytest.fixture
def lost(tmp_path: Path) -> Lost:
    return make(tmp_path, ENDLESS)


@pytest.fixture
def short(tmp_path: Path) -> Lost:
    return make(tmp_path, SHORT)


def is_one_each(found: dict[tuple[str, int], set[str]]) -> bool:
    return bool(found) and all(len(each) == 1 for each in found.values())


@pytest.mark.parametrize("has_second", [True, False])
async def test_after_a_restore_the_run_goes_on_and_nothing_is_signed_twice(lost: Lost, has_second: bool) -> None:
    lost.start()
    standby = await lost.stand_by() if has_second else None
    await lost.join(1, 2)
    await eventually(lambda: lost.head() >= 1)
    if standby is not None:
        await eventually(lambda: len(standby.opened) == 2 and standby.opened[1].run.sharding(1) is not None)
        await eventually(lambda: standby.opened[1].missing == 0)
    await lost.decree(11)
    lost.save()
    number = await lost.decree(12)
    before = lost.head()
    await eventually(lambda: lost.head() >= before + 2)
    head_when_lost = lost.head()
    await lost.lose()
    await asyncio.to_thread(restore, lost.saved, lost.folder)
    assert 1 <= lost.head() < head_when_lost
    assert read_marker(lost.folder) is not None
    lost.start()
    with pytest.raises(EnvironmentUnfit, match="restored from a backup"):
        await lost.decree(13)
    await eventually(lost.has_caught_up)
    assert await lost.decree(13) == number + 1, "the one before came after the backup"
    known = lost.head()
    assert known >= head_when_lost
    await eventually(lambda: lost.head() >= known + 2)
    if has_second:
        await eventually(lambda: read_marker(lost.folder) is None)
    await lost.close()
    assert is_one_each(lost.finals()) and is_one_each(lost.grants())
    problems = [report.problem for report in verify_stages(RunFolder(lost.folder)) if report.problem]
    if has_second:
        assert problems == []
    else:  # the chain is there; what was counted between backup and loss is gone with the disk, and that is said
        assert problems and all("is not in the archive" in problem or "missing" in problem for problem in problems)


async def test_a_crowd_of_keys_hides_no_leader_from_a_coordinator_that_catches_up(tmp_path: Path) -> None:
    """Attack: 64 keys whose ids come before all others'; nobody else was asked what was signed after the backup, and
    what the coordinator then signed was another version of the same number."""
    async with on_stage(tmp_path) as stage:
        await stage.honest_round(1)
        await eventually(lambda: stage.leader.chain.ledger.final == 1)
        leader, world = stage.leader.peer, stage.world
        crowd: list[asyncio.Task[None]] = []
        keys = (Signer(number.to_bytes(32, "big")) for number in itertools.count(1))
        for key in itertools.islice((key for key in keys if key.peer < leader), ASKED_MAX):
            swarm, folder = world.network.join(key), tmp_path / key.peer
            node = node_of(world.run, swarm, folder, world.clock, Heartbeat(owns=False))
            crowd.append(asyncio.create_task(node.presence.run()))
        await world.kill_seed()
        world.folder = tmp_path / "restored"
        write_stage(Store(world.folder / "seed"), world.run.sealed)
        seed = TinySeed(world, world.run)
        while leader not in seed.node.watch.heartbeats:
            await seed.node.watch.refresh()
            await world.clock.sleep(1.0)
        assert seed.chains[MODULE].ledger.head.version == 0
        await CatchingUp(seed.chains, tmp_path, tell=print).learn_once()
        assert seed.chains[MODULE].ledger.final == 1
        for task in crowd:
            await end(task)


async def test_keys_that_have_worked_once_hide_no_other_that_has(tmp_path: Path) -> None:
    """Attack: two hundred keys that live, that a chain counts, and whose ids come first."""
    crowd, honest = [PeerId(f"crowd {number}") for number in range(200)], PeerId("honest")
    watch = SimpleNamespace(
        heartbeats=dict.fromkeys([*crowd, honest]), heads={}, seeds=list, find=mock.AsyncMock(return_value=None)
    )
    node = SimpleNamespace(peer="us", mandates=SimpleNamespace(all_peers=set), watch=watch)
    chains = SimpleNamespace(node=node, archive=None, workers=frozenset([*crowd, honest]))
    looks = [await CatchingUp(chains, tmp_path, tell=print)._others() for _ in range(100)]  # type: ignore[arg-type]
    assert {len(look) for look in looks} == {ASKED_MAX} and any(honest in look for look in looks)
    for peer in crowd:
        del watch.heartbeats[peer]
    assert await CatchingUp(chains, tmp_path, tell=print)._others() == [honest]  # type: ignore[arg-type]
    assert watch.find.call_args.args[0] == honest, "who is gone is looked for last"


async def test_before_it_has_caught_up_it_grants_nothing_and_signs_nothing(lost: Lost) -> None:
    lost.start()
    await lost.join(1, 2)
    await eventually(lambda: lost.head() >= 1)
    lost.save()
    await eventually(lambda: lost.head() >= 3)
    await lost.lose()
    await asyncio.to_thread(restore, lost.saved, lost.folder)
    lost.start()
    await asyncio.sleep(0.5)
    other = lost.network.join(signer(STANDBY))
    scoped = ScopedSwarm(other, lost.grid().id)
    for method, header in (
        ("archive.adopt", {"module": "L1.M0", "term": 90, "mirrors": []}),
        ("mirror.version", {"module": "L1.M0", "version": newest_version(lost), "final": 0}),
    ):
        with pytest.raises(Refused) as caught:
            await scoped.call(lost.coordinator, method, header, timeout_s=20.0)
        assert caught.value.reason == "busy"
    assert read_marker(lost.folder) is not None and not lost.has_caught_up()
    await lost.close()


def newest_version(lost: Lost) -> Any:
    paths = [path for path in lost.homes.glob("volunteer-*/runs/*/documents/version-L1.M0-*.json")]
    return json.loads(max(paths, key=lambda path: path.name).read_bytes())


@pytest.mark.parametrize("has_second", [True, False])
async def test_a_backup_of_the_warm_up_takes_the_grid_over_or_says_what_is_missing(
    lost: Lost, has_second: bool
) -> None:
    lost.start()
    standby = await lost.stand_by() if has_second else None
    lost.save()
    await lost.join(1, 2)
    await eventually(lambda: lost.head() >= 1)
    if standby is not None:
        await eventually(lambda: len(standby.opened) == 2 and standby.opened[1].missing == 0)
        warmup = standby.opened[0]._chains
        await eventually(lambda: min(chain.ledger.head.version for chain in warmup.all()) == 1)
    grid = lost.grid()
    await lost.lose()
    await asyncio.to_thread(restore, lost.saved, lost.folder)
    folder, swarm = RunFolder(lost.folder), lost.network.join(signer(SEED_NUMBER))
    host = STANDBY if has_second else 1
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{signer(host).peer}"
    if has_second:
        await learn_stages(swarm, folder, [address], lost.clock)
        assert lost.grid().id == grid.id
        assert min(lost.heads(WARMUP).values()) == 1
    else:
        with pytest.raises(Unreachable, match="cannot be found") as caught:
            await learn_stages(swarm, folder, [address], lost.clock)
        assert "--through" in caught.value.hint and not folder.has(GRID)
    await lost.close()


async def test_a_second_seed_that_comes_late_has_everything_and_keeps_it(short: Lost) -> None:
    short.start()
    await short.join(1, 2)
    await eventually(lambda: short.head() >= 3)
    standby = await short.stand_by()
    await short.volunteers_done()
    await eventually(short.is_over)
    await eventually(lambda: standby.opened[-1].missing == 0 and is_whole(short))
    await eventually(lambda: finals_of(short.second) == {SHORT.rounds})
    await short.close()
    reports = verify_stages(RunFolder(short.second))
    assert [report.problem for report in reports if report.problem] == []
    versions = {(report.stage, str(report.module)): report.versions for report in reports}
    assert {versions[GRID, module] for module in ("L0.M0", "L1.M0", "L1.M1")} == {SHORT.rounds}


def finals_of(root: Path) -> set[int]:
    """The newest version of each module that the coordinator has signed, as this folder has it."""
    run, store = RunFolder(root).open(GRID), Store(root / GRID)
    return {Ledger(run, store, module).final for module in run.topology.modules()} if run is not None else set()


def is_whole(lost: Lost) -> bool:
    found = list((lost.second / GRID / "documents").glob("version-*.json"))
    return len(found) == 3 * SHORT.rounds


async def test_a_second_seed_grants_nothing_and_keeps_nobody_from_going_on(lost: Lost) -> None:
    """While the coordinator is away its group grants terms, though another seed node answers."""
    lost.start()
    standby = await lost.stand_by()
    await lost.join(1, 2, 3)
    await eventually(lambda: lost.head() >= 1 and len(standby.opened) == 2)
    grid = lost.grid()

    def grants() -> list[Grant]:
        paths = lost.homes.glob("volunteer-*/**/mandate-L1.M0.json")
        found = [unseal(Grant, item).document for path in paths for item in json.loads(path.read_bytes())]
        return sorted((grant for grant in found if grant.run == grid.id), key=lambda grant: grant.term)

    await eventually(lambda: grants()[-1].leader != lost.coordinator and bool(grants()[-1].mirrors))
    await lost.die()
    lost.network.kill(grants()[-1].leader)
    await eventually(lambda: grants()[-1].author != lost.coordinator)
    await lost.close()
