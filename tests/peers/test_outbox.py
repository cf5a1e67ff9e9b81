"""What a volunteer keeps on its disk: inner states, contributions on their way, receipts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runtime_harness import World, flip
from tiny_run import contribution_of, gradient_bytes, signer
from trickling import trickle

from dipaco_p2p.core.model.shards import decode_shard
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.node.node import LEAST_BYTES_S, WAIT_S, Member, serve_store
from dipaco_p2p.node.sizes import state_bytes_max
from dipaco_p2p.program.history import read_history
from dipaco_p2p.protocol.documents import BlobRef, Contribution, Receipt, Sealed, Share, seal
from dipaco_p2p.protocol.gate import NOTHING_GIVEN
from dipaco_p2p.swarm.identity import load_or_create
from dipaco_p2p.topology import ModuleId, PathId
from peers.path import kept
from peers.path.kept import KEPT, InnerStates, Outbox, Receipts, outbox_of, read_checked, write_checked
from peers.path.repeating import Repeater
from peers.path.trainer import PathTrainer

MODULE = ModuleId(1, 0)
OTHER = ModuleId(0, 0)
PATH = PathId((0, 0, 0))
ROUNDS = 3


# -- documents, contributions and receipts on the disk


@asynccontextmanager
async def on_disk(folder: Path) -> AsyncIterator[tuple[World, Member]]:
    async with World(folder) as world:
        yield world, world.peer(60)


def contribution(world: World, node: Member, *, module: ModuleId = MODULE, seed: int = 0) -> tuple[Contribution, bytes]:
    payload = gradient_bytes(world.run, module, seed=seed)
    return contribution_of(world.run, node.swarm.signer, payload, module=module, path=PATH), payload


async def test_every_byte_of_a_document_is_watched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with on_disk(tmp_path) as (world, node):
        write_checked(node.store, "thing", {"names": ["a", "b"], "count": 3})
        path = node.store.folder / "documents" / "thing.json"
        whole = path.read_bytes()
        assert read_checked(node.store, "thing") == {"names": ["a", "b"], "count": 3}
        for place in range(len(whole)):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            assert read_checked(node.store, "thing") is None, place
            assert not path.exists()
        assert len(caplog.records) == len(whole), "one line each"


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{}", b'{"body":1}', b"\xff\xfe", b"[" * 100_000])
async def test_no_document_stops_a_start(tmp_path: Path, data: bytes) -> None:
    async with on_disk(tmp_path) as (world, node):
        node.store.write_document("thing", data)
        assert read_checked(node.store, "thing") is None and read_checked(node.store, "thing") is None


async def test_what_was_on_its_way_is_there_after_a_restart_until_it_ended(tmp_path: Path) -> None:
    async with on_disk(tmp_path) as (world, node):
        sent = [contribution(world, node), contribution(world, node, module=OTHER)]
        for document, payload in sent:
            Outbox(node).add(document, payload)
        assert sorted(Outbox(node).waiting(), key=lambda pair: pair[0].module) == sent[::-1]
        Outbox(node).remove(sent[0][0])
        assert Outbox(node).waiting() == sent[1:]
        Outbox(node).remove(sent[1][0])
        assert Outbox(node).waiting() == []
        assert not list((node.store.folder / "outbox").rglob("*.json"))
        assert not [path for path in (node.store.folder / "outbox" / "blobs").rglob("*") if path.is_file()]


@pytest.mark.parametrize(("rounds_last", "held_last"), [(1.0, [False, True, True]), (0.4, [True, True, True])])
async def test_payloads_stay_for_two_rounds_and_a_deadline(
    tmp_path: Path, rounds_last: float, held_last: list[bool]
) -> None:
    """The rounds take so many deadlines: in short ones judges ask for a part when two more have been sent."""
    async with World(tmp_path) as world:
        node = world.peer(60)
        rounds = [[gradient_bytes(world.run, module, seed=seed) for module in (OTHER, MODULE)] for seed in range(3)]
        for payloads in rounds:
            await node.clock.sleep(rounds_last * world.run.config.rounds.deadline_s)
            refs = Outbox(node).keep(payloads)
            assert refs == [BlobRef.of(payload) for payload in payloads]
            pushed = contribution_of(world.run, node.swarm.signer, payloads[1], module=MODULE, path=PATH)
            Outbox(node).add(pushed, payloads[1])
            Outbox(node).remove(pushed)  # a mirror or a judge may still come
        store = outbox_of(node.store)
        held = [[store.size(BlobRef.of(payload).digest) is not None for payload in payloads] for payloads in rounds]
        assert held == [[is_held] * 2 for is_held in held_last]
        assert Outbox(node).waiting() == []


async def test_an_outbox_holds_one_contribution_per_module_and_no_old_bytes(tmp_path: Path) -> None:
    async with on_disk(tmp_path) as (world, node):
        for seed in range(5):
            Outbox(node).add(*contribution(world, node, seed=seed))
        assert Outbox(node).waiting() == [contribution(world, node, seed=4)]
        blobs = [path for path in (node.store.folder / "outbox" / "blobs").rglob("*") if path.is_file()]
        assert len(blobs) == 1


async def test_a_damaged_contribution_is_dropped_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with on_disk(tmp_path) as (world, node):
        for kind in ("*.json", "blobs/*/*"):
            caplog.clear()
            Outbox(node).add(*contribution(world, node))
            flip(next((node.store.folder / "outbox").rglob(kind)))
            assert Outbox(node).waiting() == [] == Outbox(node).waiting()
            assert len(caplog.records) == 1


async def test_the_outbox_of_another_run_is_not_pushed(tmp_path: Path) -> None:
    async with on_disk(tmp_path) as (world, node):
        payload = gradient_bytes(world.run, MODULE)
        foreign = contribution_of(world.run, node.swarm.signer, payload, module=MODULE, path=PATH, run="f" * 64)
        Outbox(node).add(foreign, payload)
        assert Outbox(node).waiting() == []


def receipt(world: World, number: int) -> Sealed[Receipt]:
    leader = signer(77)
    return seal(
        leader,
        Receipt(
            run=world.run.id,
            contribution=f"{number:064x}",
            module=MODULE,
            round=number,
            term=1,
            custody=(),
            author=leader.peer,
        ),
    )


async def test_receipts_are_kept_in_order_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "RECEIPTS_MAX", 6)
    async with on_disk(tmp_path) as (world, node):
        for number in range(20):
            Receipts(node).add(receipt(world, number))
        rounds = [sealed.document.round for sealed in Receipts(node).sealed]
        assert rounds == list(range(rounds[0], 20)) and 3 <= len(rounds) <= 6
        assert len((node.store.folder / "receipts.jsonl").read_bytes().splitlines()) == len(rounds)


async def test_a_damaged_receipt_is_dropped_and_the_others_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with on_disk(tmp_path) as (world, node):
        receipts = Receipts(node)
        for number in range(5):
            receipts.add(receipt(world, number))
        flip(node.store.folder / "receipts.jsonl")
        again = Receipts(node)
        assert [sealed.document.round for sealed in again.sealed] == [0, 1, 3, 4]
        assert len(caplog.records) == 1
        again.add(receipt(world, 5))
        assert [sealed.document.round for sealed in Receipts(node).sealed] == [0, 1, 3, 4, 5]
        assert len(caplog.records) == 1, "the next receipt mended the file"


async def test_a_receipt_that_was_cut_short_does_not_take_the_next_one_along(tmp_path: Path) -> None:
    async with on_disk(tmp_path) as (world, node):
        Receipts(node).add(receipt(world, 0))
        path = node.store.folder / "receipts.jsonl"
        path.write_bytes(path.read_bytes() + b'{"document":{"con')
        Receipts(node).add(receipt(world, 1))
        assert [sealed.document.round for sealed in Receipts(node).sealed] == [0, 1]


async def test_a_disk_that_takes_no_receipt_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with on_disk(tmp_path) as (world, node):
        receipts = Receipts(node)
        with monkeypatch.context() as patch:
            patch.setattr(kept.disk, "write", lambda file, data: (_ for _ in ()).throw(OSError(28, "no space")))
            receipts.add(receipt(world, 0))
        receipts.add(receipt(world, 1))
        assert [sealed.document.round for sealed in Receipts(node).sealed] == [0, 1]


def test_every_byte_of_an_identity_is_watched(tmp_path: Path) -> None:
    """A peer must not go on as somebody else: one line, and the exit code of damaged data."""
    path = tmp_path / "identity.key"
    load_or_create(path)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(IntegrityError, match=r"identity\.key") as caught:
            load_or_create(path)
        assert caught.value.exit_code == 8 and caught.value.hint and "\n" not in str(caught.value)
    path.write_bytes(whole)
    load_or_create(path)


def test_the_history_of_a_damaged_disk_can_still_be_read(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(b'{"ev":"joined"}\n{"ev":"cl\xff\x00ed"}\nnot json\n{"ev":"left"}\n')
    assert [event["ev"] for event in read_history(path)] == ["joined", "left"]


TRAINED = PathId((0, 1, 0))


class Stage:
    """Somebody who has trained the path, and somebody who takes it over."""

    def __init__(self, world: World, author: Member, taker: Member) -> None:
        self.world, self.author, self.taker = world, author, taker
        self.events: list[str] = []
        taker.history.listen(lambda event: self.events.append(event["source"]))

    def trainer(self) -> PathTrainer:
        run, store = self.world.run, self.world.seed.node.store
        data, optimizer = store.get(run.shard(TRAINED).blob.digest), store.get(run.manifest.optimizer.digest)
        assert data is not None and optimizer is not None
        shard = decode_shard(data, vocab_size=run.config.model.vocab_size, context=run.config.model.context)
        return PathTrainer(run, TRAINED, shard, optimizer=optimizer, device="cpu")

    def state(self, seed: int) -> bytes:
        """A good one; states of different seeds differ."""
        trainer = self.trainer()
        for module in TRAINED.modules():
            trainer._residuals[module] = np.full(self.world.run.layout(module).size, seed, np.uint16)
        return trainer.state_bytes()

    def share(self, state: BlobRef | None, *, author: Member | None = None, base: int = 0, tokens: int = 100) -> Share:
        peer = (author or self.author).peer
        return Share(
            contribution="0" * 64,
            path=TRAINED,
            peer=peer,
            base_version=base,
            weight=1.0,
            tokens=tokens,
            norm=1.0,
            loss=1.0,
            state=state,
        )

    async def restored(self, *shares: Share) -> tuple[bytes, bool]:
        """The state that the taker goes on with, and whether it is another's word."""
        trainer = self.trainer()
        is_foreign = await InnerStates(self.taker).restore(trainer, shares)
        return trainer.state_bytes(), is_foreign


@asynccontextmanager
async def on_stage(folder: Path) -> AsyncIterator[Stage]:
    async with World(folder) as world:
        author, taker = world.peer(60), world.peer(61)
        serve_store(author.swarm, author.store)
        await author.presence.say()
        await taker.watch.refresh()
        yield Stage(world, author, taker)


async def test_nobody_has_trained_the_path_yet(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        InnerStates(stage.taker).keep(TRAINED, stage.state(1))  # trained, but never counted: it must be trained again
        assert await stage.restored() == (stage.trainer().state_bytes(), False)
        assert stage.events == ["start"]


async def test_the_newest_state_is_fetched_from_its_author_and_kept(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        refs = [InnerStates(stage.author).keep(TRAINED, stage.state(seed)) for seed in (1, 2)]
        shares = [stage.share(ref, base=base) for base, ref in enumerate(refs)]
        assert await stage.restored(*shares) == (stage.state(2), True)
        assert stage.events == ["fetched"]
        assert stage.taker.store.get(refs[1].digest) == stage.state(2)
        assert InnerStates(stage.taker).held() == {TRAINED}


async def test_of_replicas_ones_own_state_comes_first_and_then_the_one_that_trained_most(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        small, great = (InnerStates(stage.author).keep(TRAINED, stage.state(seed)) for seed in (1, 2))
        mine = InnerStates(stage.taker).keep(TRAINED, stage.state(3))
        shares = [stage.share(small, tokens=10), stage.share(great, tokens=90)]
        assert await stage.restored(*shares) == (stage.state(2), True)
        assert await stage.restored(*shares, stage.share(mine, author=stage.taker, tokens=1)) == (stage.state(3), False)
        assert stage.events == ["fetched", "ours"]


async def test_without_its_author_an_older_state_must_do_and_else_the_start(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        share = stage.share(InnerStates(stage.author).keep(TRAINED, stage.state(1)))
        await stage.author.presence.leave()
        await stage.taker.watch.refresh()
        assert await stage.restored(share) == (stage.trainer().state_bytes(), False)
        InnerStates(stage.taker).keep(TRAINED, stage.state(9))
        assert await stage.restored(share) == (stage.state(9), True), "others' states are kept here as well"
        assert stage.events == ["lost", "older"]


async def test_a_contribution_without_a_state_is_passed_over(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        ref = InnerStates(stage.author).keep(TRAINED, stage.state(1))
        assert await stage.restored(stage.share(None, base=3), stage.share(ref)) == (stage.state(1), True)


@pytest.mark.parametrize("kind", ["junk", "another path", "too large", "not there"])
async def test_a_bad_state_is_refused_and_the_next_best_taken(tmp_path: Path, kind: str) -> None:
    async with on_stage(tmp_path) as stage:
        good = InnerStates(stage.author).keep(TRAINED, stage.state(1))
        bad = stage.author.store.put({"junk": b"no tensors", "another path": stage.state(1)[:-4]}.get(kind, b"x"))
        if kind == "too large":
            bad = replace(bad, size=state_bytes_max(stage.world.run.config, TRAINED) + 1)
        if kind == "not there":
            stage.author.store.drop(bad.digest)
        assert await stage.restored(stage.share(bad, base=1), stage.share(good)) == (stage.state(1), True)
        assert stage.taker.store.get(bad.digest) is None, "what is of no use is not kept"


async def test_a_state_that_trickles_is_given_up_and_the_next_best_taken(tmp_path: Path) -> None:
    """Attack: its author kept whoever took the path waiting, with its claim, for as long as it liked."""
    now_s = asyncio.get_running_loop().time
    async with on_stage(tmp_path) as stage:
        mine, began_s = InnerStates(stage.taker).keep(TRAINED, stage.state(1)), now_s()
        late = trickle(stage.author.swarm, stage.state(2))
        shares = [stage.share(late, base=1), stage.share(mine, author=stage.taker)]
        assert await stage.restored(*shares) == (stage.state(1), False)
        repeater = Repeater(stage.taker, make_trainer=PathTrainer)
        work = contribution_of(stage.world.run, signer(60), b"", module=TRAINED.modules()[0], path=TRAINED)
        assert await repeater._state(work, late) == NOTHING_GIVEN
        assert now_s() - began_s < 2 * (WAIT_S + late.size / LEAST_BYTES_S) + 1


async def test_the_last_two_are_kept_and_older_ones_leave_the_disk(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        states = InnerStates(stage.taker)
        refs = [states.keep(TRAINED, stage.state(seed)) for seed in range(5)]
        states.keep(TRAINED, stage.state(3))  # again: it is the newest now
        here = [stage.taker.store.get(ref.digest) is not None for ref in refs]
        assert here == [False] * (5 - KEPT) + [True] * KEPT
        other = PathId((0, 0, 0))
        assert states.held() == {TRAINED} and InnerStates(stage.taker).held() == {TRAINED}
        states.keep(other, stage.state(7))
        assert states.held() == {TRAINED, other}


@pytest.mark.parametrize("damage", [b"", b"junk", b"{}", b'["../etc", 5]'])
async def test_a_damaged_list_of_states_is_forgotten(tmp_path: Path, damage: bytes) -> None:
    async with on_stage(tmp_path) as stage:
        states = InnerStates(stage.taker)
        states.keep(TRAINED, stage.state(1))
        stage.taker.store.write_document(f"state-{TRAINED}", damage)
        assert await stage.restored(stage.share(BlobRef.of(b"gone"))) == (stage.trainer().state_bytes(), False)
        ref = states.keep(TRAINED, stage.state(2))
        assert stage.taker.store.get(ref.digest) is not None
