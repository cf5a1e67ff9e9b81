"""A run is read again while it goes on: what is asked for later is newer, and what was begun stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving_harness import COORDINATOR, GRID, LEADER, WARMUP, Reading, make_served, publish

from dipaco_p2p.clock import Clock
from dipaco_p2p.errors import SwarmError, WrongRun
from dipaco_p2p.node.calls import GetChain
from dipaco_p2p.node.items import Page, items_reply
from dipaco_p2p.node.ledger import Ledger
from dipaco_p2p.node.neighbourhood import Neighbourhood
from dipaco_p2p.node.node import Reader, open_reader, serve_store
from dipaco_p2p.node.presence import Presence
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.stages import Stages
from dipaco_p2p.node.store import Store
from dipaco_p2p.protocol.documents import ModuleVersion
from dipaco_p2p.protocol.liveness import Heartbeat
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.stage_scope import ScopedSwarm
from dipaco_p2p.topology import ModuleId
from dipaco_p2p.use import served as served_module
from dipaco_p2p.use.folder import RunFolder
from dipaco_p2p.use.served import FolderPlace, ServedRun, SwarmPlace

TRUNK = ModuleId(0, 0)


async def newest(run: ServedRun) -> int:
    return (await run.version(TRUNK)).version


class Seeded(Reading):
    """A swarm of one seed node. It reads its archive again for each question, and keeps a list of the questions."""

    async def open(self) -> SwarmPlace:
        run, store = self.served.run, self.served.store
        Stages(swarm := self.network.join(COORDINATOR)).add(run)
        scoped = ScopedSwarm(swarm, run.id)
        serve_store(scoped, store)
        self.asked: list[int] = []

        async def chain(sender: PeerId, request: GetChain) -> Page[ModuleVersion]:
            self.asked.append(request.after)
            return items_reply(Ledger(run, store, request.module).versions[request.after :])

        GetChain.serve(scoped, chain)
        await Presence(
            run, scoped, self.clock, Heartbeat(role="seed", owns=True), Neighbourhood(run, scoped, self.clock)
        ).beat()
        return SwarmPlace(self.reader, swarm.peer, self.clock, folder=self.folder, expected=None)


async def test_a_folder_is_read_again_and_what_was_begun_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = make_served(tmp_path, versions=1)
    place = FolderPlace(RunFolder(tmp_path, is_read_only=True))
    first = await place.newest()
    assert await newest(first) == 1
    publish(served, TRUNK, 2)
    second = await place.newest()
    assert [await newest(run) for run in (first, second)] == [1, 2]

    read: list[ModuleId] = []
    begin = Ledger.__init__

    def noted(self: Ledger, *args: object, **options: object) -> None:
        begin(self, *args, **options)  # type: ignore[arg-type]
        read.append(self.module)

    monkeypatch.setattr(Ledger, "__init__", noted)
    third = await place.newest()
    for module in served.run.topology.modules():
        await third.version(module)
    assert TRUNK not in read and len(read) == len(served.run.topology.modules()) - 1  # these for the first time


async def test_a_swarm_is_asked_for_what_is_new_alone(tmp_path: Path) -> None:
    served = make_served(tmp_path / "run", versions=2)
    swarm = Seeded(served, tmp_path / "reader")
    place = await swarm.open()
    first = await place.newest()
    old = await first.version(TRUNK)
    await first.blob(old.snapshot)
    swarm.asked.clear()
    publish(served, TRUNK, 3)
    second = await place.newest()
    assert [await newest(run) for run in (first, second)] == [2, 3]
    assert swarm.asked == [2, 3]
    kept = {path.name for path in (tmp_path / "reader").rglob("blobs/*/*") if path.is_file()}
    assert old.digest not in kept


async def test_a_swarm_goes_on_without_the_peer_whose_address_was_given(tmp_path: Path) -> None:
    served = make_served(tmp_path / "run", stage=WARMUP)
    swarm = Seeded(served, tmp_path / "reader")
    place = await swarm.open()
    first = await place.newest()
    swarm.network.kill(COORDINATOR.peer)
    assert (await place.newest()).run is first.run
    with pytest.raises(SwarmError):
        await SwarmPlace(swarm.reader, LEADER.peer, swarm.clock, folder=tmp_path / "other", expected=None).newest()


async def test_the_next_stage_takes_the_place_of_the_first(tmp_path: Path) -> None:
    warming = make_served(tmp_path, stage=WARMUP)
    place = FolderPlace(RunFolder(tmp_path, is_read_only=True))
    assert (await place.newest()).run.id == warming.run.id
    grid = make_served(tmp_path, stage=GRID, versions=1)
    run = await place.newest()
    assert run.run.id == grid.run.id != warming.run.id and await newest(run) == 1
    with pytest.raises(WrongRun, match="not run:abcdef01"):
        await FolderPlace(RunFolder(tmp_path), expected="run:abcdef01").newest()


async def test_stages_keep_their_documents_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [make_served(tmp_path / "run", stage=name) for name in (WARMUP, GRID)]
    swarm, open_ = Seeded(stages[0], tmp_path / "reader"), open_reader
    stores: list[Path] = []

    def noted(run: Run, scoped: ScopedSwarm, clock: Clock, store: Store) -> Reader:
        stores.append(store.folder)
        return open_(run, scoped, clock, store)

    async def stage(*_: object, **__: object) -> list[Run]:
        return [(stages.pop(0) if len(stages) > 1 else stages[0]).run]

    monkeypatch.setattr(served_module, "open_reader", noted)
    monkeypatch.setattr(served_module, "fetch_stages", stage)
    place = await swarm.open()
    ids = [(await place.newest()).run.id for _ in range(2)]
    await place.newest()  # nobody is heard of: the grid may have grown meanwhile, and it has not
    assert len(set(ids)) == 2 and [folder.name for folder in stores] == [name[:16] for name in ids]
