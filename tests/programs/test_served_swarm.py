"""A live swarm is read by a client that says nothing: the same text as from the folder, also without a coordinator."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from serving_harness import COORDINATOR, LEADER, PROMPT, ROUNDS, Served, grant_of, make_served, serve_archive
from virtual_time import VirtualClock, play

from bootstrap.export import export_path
from bootstrap.generate import Request, write_on
from bootstrap.served_swarm import read_swarm
from bootstrap.serving import ServedRun
from dipaco_p2p.errors import IntegrityError, Refused, SwarmError, WrongRun
from dipaco_p2p.node.items import items_reply
from dipaco_p2p.node.presence import Presence
from dipaco_p2p.node.stages import Stages
from dipaco_p2p.node.transfer import serve_store
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.protocol.documents import ModuleVersion, Sealed
from dipaco_p2p.protocol.liveness import Head, Heartbeat
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.swarm.memory import MemoryNetwork, MemorySwarm
from dipaco_p2p.swarm.stage_scope import ScopedSwarm
from dipaco_p2p.topology import ModuleId, PathId

Versions = list[Sealed[ModuleVersion]]

GREEDY = Request(prompt=PROMPT, tokens_max=30, temperature=0)
PATH = PathId((0, 1, 0))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_served(tmp_path_factory.mktemp("served"))


class Swarm:
    """A coordinator that only answers, a leader of every module, and a reader."""

    def __init__(self, served: Served, folder: Path) -> None:
        self.served, self.folder = served, folder
        self.clock = VirtualClock()
        self.network = MemoryNetwork(0, self.clock)
        self.reader = self.network.join(Signer(bytes([9]) * 32))

    async def add_seed(self) -> PeerId:
        run = self.served.open().run
        swarm = self.network.join(COORDINATOR)
        scoped = self._serve(swarm)
        serve_archive(self.served, scoped, self.clock)

        async def shardings(sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
            return items_reply(run.shardings[header["after"] :])

        scoped.serve("run.shardings", shardings)
        await Presence(run, scoped, self.clock, Heartbeat(role="seed", owns=True)).beat()
        return swarm.peer

    async def add_leader(self, change: Callable[[Versions], Versions] = lambda versions: versions) -> PeerId:
        run = self.served.run
        swarm = self.network.join(LEADER)
        scoped = self._serve(swarm)
        archive = SeedArchive(run, self.served.store)

        async def following(sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
            versions = archive.ledgers[ModuleId.parse(header["module"])].versions
            return items_reply(change(versions[header["after"] :]))

        scoped.serve("module.next", following)
        presence = Presence(run, scoped, self.clock, Heartbeat(owns=True))
        for module, ledger in archive.ledgers.items():
            grant = grant_of(run, module)
            head = Head(
                version=ROUNDS,
                digest=ledger.head.digest,
                term=1,
                granted_by=grant.document.author,
                grant=grant.signature,
            )
            await presence.lead(module, head)
        await presence.beat()
        return swarm.peer

    def _serve(self, swarm: MemorySwarm) -> ScopedSwarm:
        Stages(swarm).add(self.served.run)
        scoped = ScopedSwarm(swarm, self.served.run.id)
        serve_store(scoped, self.served.store)
        return scoped

    async def read(self, host: PeerId, *, expected: str | None = None) -> ServedRun:
        return await read_swarm(self.reader, host, self.clock, folder=self.folder, expected=expected)


def with_swarm(served: Served, folder: Path, scenario: Callable[[Swarm], Awaitable[None]]) -> None:
    async def run() -> None:
        await scenario(Swarm(served, folder))

    play(run)


async def text_of(run: ServedRun, request: Request) -> str:
    pieces: list[str] = []
    await write_on(run, request, write=pieces.append, say=lambda line: None)
    return "".join(pieces)


@pytest.mark.parametrize("request_", [GREEDY, replace(GREEDY, every=16), replace(GREEDY, path="P0-1-0", version=1)])
def test_a_swarm_gives_the_text_that_its_archive_gives(served: Served, tmp_path: Path, request_: Request) -> None:
    async def scenario(swarm: Swarm) -> None:
        run = await swarm.read(await swarm.add_seed())
        assert await text_of(run, request_) == await text_of(served.open(), request_) != ""

    with_swarm(served, tmp_path, scenario)


def test_the_coordinator_need_not_live(served: Served, tmp_path: Path) -> None:
    request = replace(GREEDY, path=str(PATH))

    async def scenario(swarm: Swarm) -> None:
        run = await swarm.read(await swarm.add_leader(), expected=served.run.id[:12])
        assert await text_of(run, request) == await text_of(served.open(), request) != ""

    with_swarm(served, tmp_path, scenario)


def test_a_reader_leaves_no_trace(served: Served, tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.add_leader()
        await text_of(await swarm.read(await swarm.add_seed()), GREEDY)
        assert swarm.reader.statistics().records_put == 0
        assert swarm.reader.statistics().calls_served == 0

    with_swarm(served, tmp_path, scenario)


def test_only_one_path_is_fetched(served: Served, tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        run = await swarm.read(await swarm.add_seed())
        await text_of(run, replace(GREEDY, path=str(PATH)))
        fetched = {path.name for path in (tmp_path / "blobs").rglob("*") if path.is_file()}
        versions = await run.path_versions(PATH)
        assert fetched == {version.digest for version in versions} | {served.run.manifest.tokenizer.digest}

    with_swarm(served, tmp_path, scenario)


def test_a_path_is_exported_from_a_swarm(served: Served, tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        await export_path(await swarm.read(await swarm.add_seed()), PATH, tmp_path / "from-swarm")
        await export_path(served.open(), PATH, tmp_path / "from-folder")
        one, other = (
            {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
            for name in ("from-swarm", "from-folder")
        )
        assert one == other

    with_swarm(served, tmp_path, scenario)


def test_a_swarm_that_dies_ends_in_an_error(served: Served, tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        seed = await swarm.add_seed()
        run = await swarm.read(seed)
        swarm.network.kill(seed)
        with pytest.raises(SwarmError):
            await text_of(run, replace(GREEDY, path=str(PATH)))

    with_swarm(served, tmp_path, scenario)


def test_another_run_is_not_taken_for_it(served: Served, tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        seed, leader = await swarm.add_seed(), await swarm.add_leader()
        with pytest.raises(WrongRun):
            await swarm.read(seed, expected="abcdef01")
        with pytest.raises(WrongRun):
            await swarm.read(leader)

    with_swarm(served, tmp_path, scenario)


def refuse(versions: Versions) -> Versions:
    raise Refused("no")


LIES: dict[str, Callable[[Versions], Versions]] = {
    "a gap": lambda versions: versions[1:],
    "another order": lambda versions: versions[::-1],
    "no end": lambda versions: versions or endless,
    "a refusal": refuse,
}
endless: Versions = []


@pytest.mark.parametrize("lie", LIES)
def test_a_leader_that_lies_is_passed_over_and_alone_is_an_error(served: Served, tmp_path: Path, lie: str) -> None:
    request = replace(GREEDY, path=str(PATH))
    endless[:] = SeedArchive(served.run, served.store).ledgers[PATH.modules()[0]].versions

    async def scenario(swarm: Swarm) -> None:
        leader = await swarm.add_leader(LIES[lie])
        with pytest.raises((IntegrityError, Refused)):
            await text_of(await swarm.read(leader, expected=served.run.id), request)
        run = await swarm.read(await swarm.add_seed())
        assert await text_of(run, request) == await text_of(served.open(), request)

    with_swarm(served, tmp_path, scenario)
