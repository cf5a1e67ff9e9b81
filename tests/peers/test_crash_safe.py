"""A volunteer that was killed, or whose disk lied, goes on where it stood: nothing is lost or counts twice."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from runtime_harness import TinyVolunteer, World, digests_of, flip
from tiny_run import tiny_config
from virtual_time import eventually, play

from bootstrap.archives.verify import verify_run
from dipaco_p2p.protocol.documents import Contribution
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.topology import ModuleId, PathId
from peers.path.contribute import Contributor
from peers.path.trainer import PathTrainer
from peers.stages import withdraw_claims
from peers.volunteer import Volunteer

MODULE = ModuleId(1, 0)
OTHER = ModuleId(0, 0)
PATH = PathId((0, 0, 0))
ROUNDS = 3


async def come_back(world: World, number: int) -> TinyVolunteer:
    """As the program starts: what it claimed before its end it takes back first."""
    again = TinyVolunteer(world, world.run, number)
    world.volunteers.append(again)
    await again.node.watch.refresh()
    await withdraw_claims(again.node.watch, again.node.presence, again.peer)
    return again.start()


# -- kills, and what a restart goes on with


PHASES: dict[str, tuple[type, str]] = {
    "before training": (Volunteer, "_route"),
    "in training": (PathTrainer, "train"),
    "before its pushes": (Contributor, "contribute"),
    "in its pushes": (Contributor, "_push"),
    "after its pushes": (Volunteer, "_wait_turn"),
}


class Hang:
    """Lets one volunteer hang for ever at one place, the first time that it comes there in a round."""

    def __init__(self, patch: pytest.MonkeyPatch, phase: str, *, at_round: int) -> None:
        self.victim: TinyVolunteer | None = None
        self.is_hanging = False
        self._at_round = at_round
        kind, name = PHASES[phase]
        honest = getattr(kind, name)

        async def hanging(this: Any, *args: Any, **changes: Any) -> Any:
            if self._is_here(this, args):
                self.is_hanging = True
                await asyncio.Event().wait()
            return await honest(this, *args, **changes)

        patch.setattr(kind, name, hanging)

    def _is_here(self, this: Any, args: tuple[Any, ...]) -> bool:
        if self.victim is None or self.is_hanging:
            return False
        volunteer = self.victim.volunteer
        is_its = this in (volunteer, volunteer._contributor) or (
            isinstance(this, PathTrainer) and this.path == self.victim.status.path
        )
        if args and isinstance(args[0], Contribution) and args[0].module.level == 0:
            return False  # one of its pushes gets through
        return is_its and self.victim.status.doing != "starting" and self._round() == self._at_round

    def _round(self) -> int:
        assert self.victim is not None
        return self.victim.status.round


@pytest.fixture(scope="module")
def digests_of_a_quiet_run(tmp_path_factory: pytest.TempPathFactory) -> dict[ModuleId, str]:
    return digests_of(tmp_path_factory.mktemp("quiet"), tiny_config(rounds=ROUNDS))


def require_every_path_in_every_version(world: World) -> None:
    for module, ledger in world.seed.archive.ledgers.items():
        for sealed in ledger.versions:
            paths = {share.path for share in sealed.document.shares}
            assert paths == set(world.run.topology.paths_through(module)), (module, sealed.document.version)


@pytest.mark.parametrize("phase", PHASES)
async def test_a_volunteer_that_comes_back_at_once_changes_nothing_of_what_comes_out(
    tmp_path: Path, digests_of_a_quiet_run: dict[ModuleId, str], monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """Batches, inner state, error feedback and pushes are what they would have been: no cursor is lost."""
    hang = Hang(monkeypatch, phase, at_round=1)
    async with World(tmp_path, config=tiny_config(rounds=ROUNDS)) as world:
        world.join_all()
        await eventually(lambda: all(volunteer.said("round") for volunteer in world.volunteers))
        hang.victim = world.volunteers[0]
        await eventually(lambda: hang.is_hanging)
        await world.kill(world.volunteers[0])
        again = await come_back(world, 1)
        await world.finish()
        require_every_path_in_every_version(world)
        assert world.digests() == digests_of_a_quiet_run
        if phase == "in its pushes":
            assert {event["base"] for event in again.said("receipt")} >= {1}
            assert not again.said("refused")


@pytest.mark.parametrize("phase", PHASES)
async def test_the_path_of_a_killed_volunteer_is_in_the_very_round_in_which_it_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    hang = Hang(monkeypatch, phase, at_round=1)
    async with World(tmp_path, config=tiny_config(rounds=ROUNDS)) as world:
        world.join_all()
        await eventually(lambda: all(volunteer.said("round") for volunteer in world.volunteers))
        hang.victim = world.volunteers[0]
        await eventually(lambda: hang.is_hanging)
        await world.kill(world.volunteers[0])
        await world.finish()
        require_every_path_in_every_version(world)


async def test_what_a_killed_volunteer_had_trained_is_too_old_after_a_long_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = Hang(monkeypatch, "in its pushes", at_round=1)
    async with World(tmp_path, config=tiny_config(rounds=8)) as world:
        world.join_all()
        await eventually(lambda: all(volunteer.said("round") for volunteer in world.volunteers))
        hang.victim = victim = world.volunteers[0]
        await eventually(lambda: hang.is_hanging)
        await world.kill(victim)
        ledgers = world.seed.archive.ledgers
        await eventually(lambda: all(ledger.head.version >= 5 for ledger in ledgers.values()), limit_s=300)
        again = await come_back(world, 1)
        await eventually(lambda: bool(again.said("claimed")))
        assert {event["reason"] for event in again.said("refused")} == {Reason.STALE_BASE}
        assert not list((again.folder / "outbox").rglob("*.json"))
        await world.finish()


# -- bit rot


def files_of(volunteer: TinyVolunteer) -> list[Path]:
    return sorted(path for path in volunteer.folder.rglob("*") if path.is_file() and path.stat().st_size)


def kind_of(path: Path, folder: Path) -> str:
    """Blobs of one size are of one kind: shards, optimizer, states, payloads, snapshots."""
    name = path.relative_to(folder).as_posix()
    return f"{name.split('/')[0]} of {path.stat().st_size} bytes" if "blobs" in name else name.split("-")[0]


def test_no_damaged_file_stops_a_volunteer_or_reaches_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One file of each kind in its folder after the other: it starts, goes on with its path, and the run verifies."""
    hang = Hang(monkeypatch, "in its pushes", at_round=1)
    tried: list[str] = []

    async def scenario() -> None:
        async with World(tmp_path, config=tiny_config(rounds=400)) as world:
            world.join_all()
            await eventually(lambda: all(volunteer.said("round") for volunteer in world.volunteers))
            hang.victim = victim = world.volunteers[0]
            await eventually(lambda: hang.is_hanging)
            await world.kill(victim)
            for kind, path in sorted({kind_of(path, victim.folder): path for path in files_of(victim)}.items()):
                victim = await damaged_restart(world, victim, path)
                tried.append(kind)
            reports = verify_run(world.run, world.seed.node.store, world.seed.archive)
            assert {report.problem for report in reports} == {""}

    async def damaged_restart(world: World, victim: TinyVolunteer, path: Path) -> TinyVolunteer:
        if path.exists():  # what the last restart has dropped was tried already
            flip(path)
        again = await come_back(world, victim.number)
        await eventually(lambda: len(again.said("round")) >= 1 and bool(again.said("receipt")))
        await world.kill(again)
        return again

    with caplog.at_level(logging.ERROR):
        play(scenario, limit_s=36_000)
    for kind in ("blobs of", "outbox of", "outbox/documents", "receipts.jsonl", "documents/state", "documents/version"):
        assert any(name.startswith(kind) for name in tried), f"{kind} is not among {tried}"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
