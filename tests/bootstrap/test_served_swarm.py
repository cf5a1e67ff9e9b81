"""A live swarm is read by a client that says nothing: the same text as from the folder, also without a coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from serving_harness import (
    COORDINATOR,
    LEADER,
    PRIVATE,
    PROMPT,
    ROUNDS,
    TIED,
    Reading,
    Served,
    final,
    grant_of,
    make_served,
    run_cli,
    serve_archive,
    write,
    written,
)

from bootstrap.use.export import Wish, export_run
from bootstrap.use.generate import Request
from dipaco_p2p.errors import IntegrityError, Refused, SwarmError, Unreachable, WrongRun
from dipaco_p2p.node.items import items_reply
from dipaco_p2p.node.neighbourhood import Neighbourhood
from dipaco_p2p.node.node import CALL_TIMEOUT_S, LEAST_BYTES_S, WAIT_S, serve_store
from dipaco_p2p.node.presence import Presence
from dipaco_p2p.node.stages import Stages
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.protocol.documents import BlobRef, ModuleVersion, Sealed, seal
from dipaco_p2p.protocol.liveness import Head, Heartbeat
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.swarm.blobs.bandwidth import CUT_BYTES_MIN
from dipaco_p2p.swarm.memory import MemorySwarm
from dipaco_p2p.swarm.stage_scope import ScopedSwarm
from dipaco_p2p.topology import ModuleId, PathId
from dipaco_p2p.use.served import ServedRun

Versions = list[Sealed[ModuleVersion]]

GREEDY = Request(prompt=PROMPT, tokens_max=30, temperature=0)
PATH = PathId((0, 1, 0))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_served(tmp_path_factory.mktemp("served"))


class Swarm(Reading):
    """A coordinator that only answers, a leader of every module, and a reader."""

    async def add_seed(self) -> PeerId:
        run = self.served.open().run
        swarm = self.network.join(COORDINATOR)
        scoped = self._serve(swarm)
        serve_archive(self.served, scoped, self.clock)

        async def shardings(sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
            return items_reply(run.shardings[header["after"] :])

        scoped.serve("run.shardings", shardings)
        near = Neighbourhood(run, scoped, self.clock)
        await Presence(run, scoped, self.clock, Heartbeat(role="seed", owns=True), near).beat()
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
        presence = Presence(run, scoped, self.clock, Heartbeat(owns=True), Neighbourhood(run, scoped, self.clock))
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


async def text_of(run: ServedRun, request: Request) -> str:
    return (await written(run, request)).text


@pytest.mark.parametrize("request_", [GREEDY, replace(GREEDY, every=16), replace(GREEDY, path="P0-1-0", version=1)])
async def test_a_swarm_gives_the_text_that_its_archive_gives(served: Served, tmp_path: Path, request_: Request) -> None:
    swarm = Swarm(served, tmp_path)
    run = await swarm.read(await swarm.add_seed())
    assert await text_of(run, request_) == await text_of(served.open(), request_) != ""


async def test_the_coordinator_need_not_live(served: Served, tmp_path: Path) -> None:
    request = replace(GREEDY, path=str(PATH))
    swarm = Swarm(served, tmp_path)
    run = await swarm.read(await swarm.add_leader(), expected=served.run.id[:12])
    assert await text_of(run, request) == await text_of(served.open(), request) != ""


async def test_a_reader_leaves_no_trace(served: Served, tmp_path: Path) -> None:
    swarm = Swarm(served, tmp_path)
    await swarm.add_leader()
    await text_of(await swarm.read(await swarm.add_seed()), GREEDY)
    assert swarm.reader.statistics().records_put == 0
    assert swarm.reader.statistics().calls_served == 0


async def test_only_one_path_is_fetched(served: Served, tmp_path: Path) -> None:
    swarm = Swarm(served, tmp_path)
    run = await swarm.read(await swarm.add_seed())
    await text_of(run, replace(GREEDY, path=str(PATH)))
    fetched = {path.name for path in (tmp_path / served.run.id[:16] / "blobs").rglob("*") if path.is_file()}
    versions = await run.path_versions(PATH)
    assert fetched == {version.digest for version in versions} | {served.run.manifest.tokenizer.digest}


async def test_a_path_is_exported_from_a_swarm(served: Served, tmp_path: Path) -> None:
    swarm = Swarm(served, tmp_path)
    await export_run(await swarm.read(await swarm.add_seed()), Wish(path=str(PATH)), tmp_path / "from-swarm")
    await export_run(served.open(), Wish(path=str(PATH)), tmp_path / "from-folder")
    one, other = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("from-swarm", "from-folder")
    )
    assert one == other


async def test_a_swarm_that_dies_ends_in_an_error(served: Served, tmp_path: Path) -> None:
    swarm = Swarm(served, tmp_path)
    seed = await swarm.add_seed()
    run = await swarm.read(seed)
    swarm.network.kill(seed)
    with pytest.raises(SwarmError):
        await text_of(run, replace(GREEDY, path=str(PATH)))


async def test_another_run_is_not_taken_for_it(served: Served, tmp_path: Path) -> None:
    swarm = Swarm(served, tmp_path)
    seed, leader = await swarm.add_seed(), await swarm.add_leader()
    with pytest.raises(WrongRun):
        await swarm.read(seed, expected="abcdef01")
    with pytest.raises(WrongRun):
        await swarm.read(leader)


def refuse(versions: Versions) -> Versions:
    raise Refused("no")


def own(versions: Versions) -> Versions:
    """With a last version of the leader's own making, which nobody else has made again."""
    changed = [replace(sealed.document, snapshot=BlobRef.of(b"poison")) for sealed in versions[-1:]]
    return [*versions[:-1], *(seal(LEADER, document) for document in changed)]


def endless_snapshot(versions: Versions) -> Versions:
    """Signed by others as well, and named with more bytes than any disk has."""
    changed = [
        replace(sealed.document, snapshot=replace(sealed.document.snapshot, size=2**40)) for sealed in versions[-1:]
    ]
    return [*versions[:-1], *(final(seal(LEADER, document)) for document in changed)]


LIES: dict[str, Callable[[Versions], Versions]] = {
    "a snapshot of 2^40 bytes": endless_snapshot,
    "a gap": lambda versions: versions[1:],
    "another order": lambda versions: versions[::-1],
    "no end": lambda versions: versions or endless,
    "a refusal": refuse,
}
endless: Versions = []


@pytest.mark.parametrize("lie", LIES)
async def test_a_leader_that_lies_is_passed_over_and_alone_is_an_error(
    served: Served, tmp_path: Path, lie: str
) -> None:
    request = replace(GREEDY, path=str(PATH))
    endless[:] = SeedArchive(served.run, served.store).ledgers[PATH.modules()[0]].versions
    swarm = Swarm(served, tmp_path)
    leader = await swarm.add_leader(LIES[lie])
    with pytest.raises((IntegrityError, Refused)):
        await text_of(await swarm.read(leader, expected=served.run.id), request)
    run = await swarm.read(await swarm.add_seed())
    assert await text_of(run, request) == await text_of(served.open(), request)


async def test_nobody_is_given_what_only_its_leader_vouches_for(served: Served, tmp_path: Path) -> None:
    """The leader is asked first: it could have anybody's prompts answered, and exported, by weights of its choice."""
    swarm = Swarm(served, tmp_path)
    run = await swarm.read(await swarm.add_leader(own), expected=served.run.id)
    assert {version.version for version in await run.path_versions(PATH)} == {ROUNDS - 1}
    await swarm.add_seed()
    run = await swarm.read(COORDINATOR.peer)
    versions = await run.path_versions(PATH)
    assert versions == await served.open().path_versions(PATH) and versions[0].version == ROUNDS


async def test_a_holder_that_trickles_is_not_waited_for_longer_than_a_thin_line_takes(
    served: Served, tmp_path: Path
) -> None:
    """Attack: the leader of a new version, which no archive has yet, gave 4 KiB in 19 s."""
    swarm = Swarm(served, tmp_path)
    run = await swarm.read(await swarm.add_leader(), expected=served.run.id)
    ref = BlobRef.of(bytes(2**20))

    async def slowly(sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        await asyncio.sleep(CALL_TIMEOUT_S - 1)
        return Reply({"size": ref.size}, bytes(min(header["length"], CUT_BYTES_MIN)))

    swarm.network._nodes[LEADER.peer]._dispatcher._handlers[f"{served.run.id[:16]}/blob.read"] = slowly
    async with asyncio.timeout(WAIT_S + ref.size / LEAST_BYTES_S + 1):
        with pytest.raises(Unreachable):
            await run.blob(ref)


async def test_a_chain_of_which_nobody_else_has_made_anything_is_an_error(served: Served, tmp_path: Path) -> None:
    swarm = Swarm(served, tmp_path)
    leader = await swarm.add_leader(lambda versions: [seal(LEADER, sealed.document) for sealed in versions])
    with pytest.raises(IntegrityError, match="nobody but its leader"):
        await (await swarm.read(leader, expected=served.run.id)).path_versions(PATH)


# -- a run that is still in its warm-up: one path, and nothing to route

ONLY_PATH = PathId((0, 0, 0))
HOLDOUT = {"P0-0-0": [5.0, 4.0, 3.0, 3.5]}


@pytest.fixture(scope="module", params=["tied", "private"])
def warming(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    model = {"tied": TIED, "private": PRIVATE}[request.param]
    found = make_served(tmp_path_factory.mktemp(request.param), model=model, stage="warmup")
    found.write_evaluations(HOLDOUT)
    return found


@pytest.mark.parametrize(("best", "version"), [(False, ROUNDS), (True, 2)])
def test_its_one_path_writes(warming: Served, best: bool, version: int) -> None:
    request = Request(prompt=PROMPT, tokens_max=30, temperature=0, best=best)
    text, [said] = write(warming, request)
    assert text and said.startswith(f"P0-0-0: L0.M0 version {version}, ")


def test_its_one_path_is_exported_without_a_router(warming: Served, tmp_path: Path) -> None:
    asyncio.run(export_run(warming.open(), Wish(path=str(ONLY_PATH), best=True), tmp_path / "out"))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in warming.model(ONLY_PATH, 2).state_dict().items():
        np.testing.assert_array_equal(tensors[name], value.numpy())
    assert not [path for path in (tmp_path / "out").iterdir() if "router" in path.name]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "still in its warm-up" in card and "router.safetensors" not in card
    assert f"- stage: warmup, `{warming.run.id}`" in card and "- round: 2 of 3" in card


@pytest.mark.parametrize(
    ("flags", "words", "hint"),
    [
        (("--path", "P0-1-1"), "has no path P0-1-1", "still in its warm-up, which has the one path P0-0-0"),
        (("--every", "16"), "has no router that can be asked inside a text", "leave --every out"),
    ],
)
def test_what_only_a_grid_has_is_one_line(warming: Served, flags: tuple[str, ...], words: str, hint: str) -> None:
    code, _, errors = run_cli("generate", str(warming.root), PROMPT, *flags)
    [first, second] = errors.splitlines()
    assert code == 2 and words in first and hint in second


async def test_a_live_warm_up_is_read_too(warming: Served, tmp_path: Path) -> None:
    swarm = Swarm(warming, tmp_path)
    run = await swarm.read(await swarm.add_seed())
    assert await written(run, GREEDY) == await written(warming.open(), GREEDY)
