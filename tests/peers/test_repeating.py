"""Auditors take others' inner steps again: honest work comes out the same, and what only looks like work does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from runtime_harness import TinyVolunteer, World, node_of
from tiny_run import contribution_of, make_run, signer, tiny_config
from trickling import trickle_from
from virtual_time import eventually, play

from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.config import CompressionConfig, JudgingConfig, RunConfig
from dipaco_p2p.core.arrays import from_bfloat16, to_bfloat16
from dipaco_p2p.core.model.optimizer import MEAN
from dipaco_p2p.core.model.shards import Shard
from dipaco_p2p.core.outer.compress import compress, decode_compressed, encode_compressed
from dipaco_p2p.core.tensor_file import decode, encode
from dipaco_p2p.errors import BlobMissing, IntegrityError, Refused
from dipaco_p2p.node import reading
from dipaco_p2p.node.calls import GetChain, GetVersions
from dipaco_p2p.node.items import Page
from dipaco_p2p.node.node import CALL_TIMEOUT_S, Given, fetch_given, serve_store, silent_s
from dipaco_p2p.node.reading import ask_chain
from dipaco_p2p.node.store import Store
from dipaco_p2p.node.watch import Watch
from dipaco_p2p.protocol.documents import BlobRef, Contribution, Part
from dipaco_p2p.protocol.gate import GIVEN_SLOWLY, MADE_UP, NOTHING_GIVEN, Repetition
from dipaco_p2p.protocol.liveness import Heartbeat
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.references import Recipe
from dipaco_p2p.protocol.signing import VALUES_MAX, PeerId
from dipaco_p2p.swarm.blobs.bandwidth import Line
from dipaco_p2p.topology import ModuleId, PathId
from peers.path.kept import outbox_of
from peers.path.repeating import OVER_VERSIONS, Repeater, compared
from peers.path.trainer import Flat, OuterGradient, PathTrainer

CHEAT = 9
MODULE, PATH = ModuleId(1, 0), PathId((0, 0, 0))
SNAPSHOT_BYTES = 30_000
"""More than any module's parameters take here, and less than a path's state."""


def audited_config(*, rounds: int = 5, uplink: str = "int4", **changes: Any) -> RunConfig:
    config = tiny_config(rounds=rounds, min_paths=1, **changes)
    judging = JudgingConfig(judges=2, sequences=8, audited=100)
    return replace(config, judging=judging, compression=CompressionConfig(uplink=uplink))


def audits(world: World) -> list[dict[str, Any]]:
    return [event for volunteer in world.volunteers for event in volunteer.said("audited")]


def refusals(world: World) -> list[str]:
    """Why leaders did not count what they had taken."""
    return [event["reason"] for volunteer in world.volunteers for event in volunteer.said("expired")]


@pytest.mark.parametrize("uplink", ["int4", "int8", "int2", "top128", "ternary160"])
async def test_honest_work_is_repeated_and_comes_out_the_same(
    tmp_path: Path, uplink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, fetched = Repeater._state, list[bool]()

    async def noted(self: Repeater, work: Contribution, ref: BlobRef) -> bytes | Repetition:
        fetched.append(ref == work.state)
        return await original(self, work, ref)

    monkeypatch.setattr(Repeater, "_state", noted)
    async with World(tmp_path, config=audited_config(rounds=3, uplink=uplink)) as world:
        world.join_all()
        await world.done()
        found = audits(world)
        assert len(found) >= 8, "the first round is trained by strangers alone, of whom nobody audits"
        assert all(one["cosine"] > 0.999 and abs(one["ratio"] - 1) < 0.01 for one in found), "but for bfloat16"
        assert {round(one["moments"], 6) for one in found} == {1.0}
        assert Reason.NOT_REPEATED not in refusals(world)
        assert fetched and not any(fetched), "of like machines the state after the steps is not fetched"


class Longer(PathTrainer):
    """Hands in what is a tenth longer than its work: within every norm, and a gain for its path."""

    def outer_gradients(self, before: Sequence[Flat], after: Sequence[Flat]) -> list[OuterGradient]:
        longer = [new + np.float32(0.1) * (new - old) for old, new in zip(before, after, strict=True)]
        return super().outer_gradients(before, longer)


class OtherText(PathTrainer):
    """Trains on other text than the path's."""

    def __init__(self, run: Any, path: Any, shard: Shard, **settings: Any) -> None:
        super().__init__(run, path, Shard(tokens=(shard.tokens + 32) % 258), **settings)


class Indebted(PathTrainer):
    """Hands in three times its work, and says in its state that it owes what is too much."""

    def outer_gradients(self, before: Sequence[Flat], after: Sequence[Flat]) -> list[OuterGradient]:
        made = []
        for honest, module in zip(super().outer_gradients(before, after), self.path.modules(), strict=True):
            size, codec = self._run.layout(module).size, self._run.config.compression.uplink
            due = decode_compressed(honest.payload, size=size, codec=codec).expand() + from_bfloat16(honest.residual)
            sent, _ = compress(np.float32(3.0) * due, codec=codec)
            debt = to_bfloat16(due - sent.expand())
            made.append(replace(honest, payload=encode_compressed(sent), residual=debt))
        return made


class SparselyIndebted(Indebted):
    """The same, where most of the work is owed anyway."""


@pytest.mark.parametrize(
    ("trainer", "honest"), [(Longer, 4), (OtherText, 4), (Longer, 2), (Indebted, 4), (SparselyIndebted, 4)]
)
async def test_forged_work_does_not_count(tmp_path: Path, trainer: Callable[..., PathTrainer], honest: int) -> None:
    """With two others alive, one of them leads and repeats it as well."""
    uplink = "ternary160" if trainer is SparselyIndebted else "int4"
    async with World(tmp_path, config=audited_config(rounds=8, uplink=uplink)) as world:
        world.join_all(range(1, honest + 1))
        cheat = world.join(CHEAT, make_trainer=trainer)
        await eventually(lambda: caught(world, cheat), limit_s=600.0)
        others = {volunteer.peer for volunteer in world.volunteers} - {cheat.peer}
        assert all(not is_off(one) for one in audits(world) if one["of"] in others)


def is_off(audit: dict[str, Any]) -> bool:
    return audit["cosine"] < 0.99 or abs(audit["ratio"] - 1) > 0.05


def caught(world: World, cheat: TinyVolunteer) -> bool:
    """Whether two have found that its work is not what they come to, and its leaders have refused it."""
    found = {
        volunteer.peer
        for volunteer in world.volunteers
        for event in volunteer.said("audited")
        if event["of"] == cheat.peer and is_off(event)
    }
    return len(found) >= 2 and Reason.NOT_REPEATED in refusals(world)


def test_a_forger_that_leaves_whenever_it_is_asked_for_a_state_gains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attack: its audits ended without a result, so its work counted, a round after the other, and nobody audited it
    more often for that."""
    sought: set[PeerId] = set()
    find = Watch.find

    async def found(self: Watch, *peers: PeerId) -> None:
        sought.update(peers)
        await find(self, *peers)

    async def scenario() -> None:
        async with World(tmp_path, config=audited_config(rounds=8)) as world:
            world.join_all()
            cheat = world.join(CHEAT, make_trainer=Longer)

            async def left(node: Any, ref: BlobRef, given: Given, *, holders: Sequence[PeerId]) -> bytes:
                if list(holders) != [cheat.peer]:
                    return await fetch_given(node, ref, given, holders=holders)
                node.watch.heartbeats.pop(cheat.peer, None)
                raise BlobMissing("it has left")

            monkeypatch.setattr("peers.path.repeating.fetch_given", left)
            await eventually(lambda: Reason.UNJUDGED in refusals(world), limit_s=600.0)
            assert cheat.peer in sought

    monkeypatch.setattr(Watch, "find", found)
    play(scenario)


def test_a_forger_that_trickles_its_states_has_given_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: it gave a state as slowly as calls allow. A large one could have come on a thin line long after its
    audit was over, so auditors said nothing, and its work counted, a round after the other."""
    monkeypatch.setattr("dipaco_p2p.node.node.LEAST_BYTES_S", 1.0)

    async def scenario() -> None:
        async with World(tmp_path, config=audited_config(rounds=8)) as world:
            world.join_all()
            cheat = world.join(CHEAT, make_trainer=Longer)
            trickle_from(cheat.swarm, cheat.node.store, outbox_of(cheat.node.store), over_bytes=SNAPSHOT_BYTES)
            await eventually(lambda: Reason.UNJUDGED in refusals(world), limit_s=600.0)
            found = {event["of"] for event in audits(world) if event["cosine"] == NOTHING_GIVEN.cosine}
            assert found == {cheat.peer}

    play(scenario)


SLOWLY = [
    pytest.param(2, 120.0, GIVEN_SLOWLY, id="as many as are asked about one work"),
    pytest.param(2, 600.0, None, id="in time"),
    pytest.param(6, 120.0, NOTHING_GIVEN, id="next to nothing"),
]
"""For so many auditors at a line of 0.1 Mbit/s, when the author need not have the state any more, and what they say."""


async def test_the_thinnest_line_has_given_something_to_two_at_once(tmp_path: Path) -> None:
    """A tenth of a home line of 1 Mbit/s: a state goes on coming for as long as it takes."""
    async with World(tmp_path) as world:
        swarm = world.network.join(signer(41), line=Line(up_mbit=0.1, clock=world.clock))
        author = node_of(world.run, swarm, tmp_path / "author", world.clock, Heartbeat())
        serve_store(author.swarm, author.store)
        data, given, readers = bytes(range(256)) * 1024, [Given(), Given()], [world.peer(42), world.peer(43)]
        ref = author.store.put(data)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dipaco_p2p.node.node.LEAST_BYTES_S", 1.0)
            both = zip(readers, given, strict=True)
            came = await asyncio.gather(*(fetch_given(one, ref, each, holders=[author.peer]) for one, each in both))
        assert came == [data, data] and all(one.asked_s > 2 * silent_s(world.run.config.rounds) for one in given)


@pytest.mark.parametrize(("auditors", "over_s", "said"), SLOWLY)
async def test_a_state_that_still_comes_when_its_author_need_not_have_it_any_more_is_given_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, auditors: int, over_s: float, said: Repetition | None
) -> None:
    """Attack: an author in full standing gave each state at a little more than 3.9 kB/s. It never gave nothing, and had
    not given all when its audits were over, so these had no result, and it was never found whatever it handed in."""
    monkeypatch.setattr("dipaco_p2p.node.node.LEAST_BYTES_S", 1.0)
    async with World(tmp_path) as world:
        clock, began_s = world.clock, world.clock.now_s()

        async def versions(self: Repeater, module: ModuleId, *, after: int, up_to: int) -> list[Any]:
            return [None] * (OVER_VERSIONS if clock.now_s() >= began_s + over_s else 1)

        async def reached(self: Repeater, module: ModuleId) -> int:
            return OVER_VERSIONS  # as its leader says, who may be a liar

        monkeypatch.setattr(Repeater, "_versions", versions)
        monkeypatch.setattr(Repeater, "_reached", reached)
        swarm = world.network.join(signer(41), line=Line(up_mbit=0.1, clock=clock))
        author = node_of(world.run, swarm, tmp_path / "author", clock, Heartbeat())
        serve_store(author.swarm, author.store)
        data = bytes(range(256)) * 4096
        monkeypatch.setattr("peers.path.repeating.state_bytes_max", lambda *of: len(data))
        work, ref = contribution_of(world.run, signer(41), b"sent", module=MODULE, path=PATH), author.store.put(data)
        asked = [Repeater(world.peer(number), make_trainer=PathTrainer) for number in range(42, 42 + auditors)]
        found = await asyncio.gather(*(repeater._state(work, ref) for repeater in asked))
        assert found == [said or data] * auditors


def test_of_several_modules_the_one_that_is_farthest_off_counts() -> None:
    """Attack: the opposite of what a small module's steps came to was lost beside the others' work."""
    large, small = np.ones(1000, dtype=np.float32), np.ones(2, dtype=np.float32)
    own = [large, small]

    def found(*claimed: Any) -> Repetition:
        return compared([one.astype(np.float64) for one in claimed], own, moments=1.0)

    assert found(large, small).is_same
    assert found(large, -small).cosine == pytest.approx(-1.0)
    assert found(large, 3 * small).ratio == pytest.approx(3.0)
    assert found(large, 0 * small).ratio == 0.0


Lie = Callable[[TinyVolunteer, Contribution], Contribution]


def forged_start(author: TinyVolunteer, work: Contribution) -> Contribution:
    """A state that was made up after the work, and is served: with it any outer gradient could be explained."""
    assert work.state is not None and work.recipe is not None
    made_up = author.node.store.put((author.node.store.get(work.state.digest) or b"")[::-1])
    return replace(work, recipe=replace(work.recipe, start=made_up))


def own_result_as_start(author: TinyVolunteer, work: Contribution) -> Contribution:
    """A real state of its path, which no version names yet."""
    assert work.recipe is not None
    return replace(work, recipe=replace(work.recipe, start=work.state))


def nothing_left(author: TinyVolunteer, work: Contribution) -> Contribution:
    """A state that it keeps to itself."""
    return replace(work, state=BlobRef.of(b"nobody has this"))


def turned_moments(author: TinyVolunteer, work: Contribution) -> Contribution:
    """A state that leads its path the other way: the next round begins with it, and comes out the same for all."""
    assert work.state is not None
    values, _ = decode(author.node.store.get(work.state.digest) or b"")
    sign = np.uint8(1 << 7)
    turned = {key: one ^ sign if key.endswith(MEAN) else one for key, one in values.items()}
    return replace(work, state=author.node.store.put(encode(turned)))


def no_recipe(author: TinyVolunteer, work: Contribution) -> Contribution:
    return replace(work, recipe=None)


def from_the_start(author: TinyVolunteer, work: Contribution) -> Contribution:
    """As if nobody had trained the path before: the moments are other ones."""
    assert work.recipe is not None
    return replace(work, recipe=replace(work.recipe, start=None))


def other_part(author: TinyVolunteer, work: Contribution) -> Contribution:
    """Half of the shard, where it trained on all of it."""
    assert work.recipe is not None
    return replace(work, recipe=replace(work.recipe, replicas=2))


def later_round(author: TinyVolunteer, work: Contribution) -> Contribution:
    """A round that no version has come to: its rate would be another."""
    assert work.recipe is not None
    return replace(work, recipe=replace(work.recipe, round=work.base_version + 1))


def more_steps(author: TinyVolunteer, work: Contribution) -> Contribution:
    """More than a round has: nobody could take as many."""
    return replace(work, steps=1000 * work.steps)


def more_tokens(author: TinyVolunteer, work: Contribution) -> Contribution:
    """A whole round's weight for one step, which comes out the same."""
    return replace(work, tokens=2 * work.tokens)


def later_since(author: TinyVolunteer, work: Contribution) -> Contribution:
    """A made-up state that a version to come is to name: no version follows that one yet."""
    lied = forged_start(author, work)
    assert lied.recipe is not None
    return replace(lied, recipe=replace(lied.recipe, since=VALUES_MAX))


LIES: tuple[Lie, ...] = (
    forged_start,
    own_result_as_start,
    nothing_left,
    turned_moments,
    no_recipe,
    from_the_start,
    other_part,
    later_round,
    more_steps,
    more_tokens,
    later_since,
)


def train_until(is_over: Callable[[], bool], tmp_path: Path, authors: list[TinyVolunteer]) -> None:
    """Three volunteers, who are the `authors`, train and are audited."""

    async def scenario() -> None:
        async with World(tmp_path, config=audited_config(rounds=9)) as world:
            world.join_all((1, 2, 3))
            authors.extend(world.volunteers)
            await eventually(is_over, limit_s=300.0)

    play(scenario)


def test_who_lies_about_where_its_steps_began_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All lies about one and the same work, which is repeated as it is, too."""
    tried: dict[str, bool] = {}
    repeat = Repeater.__call__

    async def lied(self: Repeater, work: Contribution, *parts: Any) -> Repetition:
        if work.recipe is not None and work.recipe.start is not None and not tried:
            tried["honest"] = (await repeat(self, work, *parts)).is_same
            author = next(volunteer for volunteer in authors if volunteer.peer == work.author)
            for lie in LIES:
                tried[lie.__name__] = (await repeat(self, lie(author, work), *parts)).is_same
        return await repeat(self, work, *parts)

    monkeypatch.setattr(Repeater, "__call__", lied)
    authors: list[TinyVolunteer] = []
    train_until(lambda: len(tried) > len(LIES), tmp_path, authors)
    assert tried == {"honest": True} | {lie.__name__: False for lie in LIES}


@pytest.mark.parametrize("named", [2, 3], ids=["with the version that is there", "with a later one"])
async def test_a_module_that_is_ahead_may_alone_have_counted_the_state(tmp_path: Path, named: int) -> None:
    """Two owner groups were parted, so one module of the path had counted its last work, and the others were a version
    behind. Whoever went on from there was found to have forged by two auditors, who looked no further than these."""
    state, ahead, behind = BlobRef.of(b"state"), *PATH.modules()[1:]
    told = dict.fromkeys(PATH.modules(), 1) | {ahead: 2}

    async def reached(module: ModuleId) -> int:
        return told[module]

    async def versions(module: ModuleId, *, after: int, up_to: int) -> list[Any]:
        numbers = range(after + 1, min(up_to, told[module]) + 1)
        share = SimpleNamespace(path=PATH, state=state)
        shares = {one: [share] * ((module, one) == (ahead, named)) for one in numbers}
        return [SimpleNamespace(version=one, shares=shares[one], digest=f"{one:064x}") for one in numbers]

    run = make_run(Store(tmp_path), audited_config())
    bases = {module: f"{told[module]:064x}" for module in PATH.modules()}
    others = tuple(Part(base_digest=bases[module], payload=state) for module in PATH.modules() if module != behind)
    work = contribution_of(run, signer(41), b"sent", module=behind, path=PATH, base_version=1)
    work = replace(work, base_digest=bases[behind], others=others)
    recipe = Recipe(round=1, place=0, replicas=1, start=state)
    repeater: Any = SimpleNamespace(_node=SimpleNamespace(run=run), _reached=reached, _versions=versions)
    assert await Repeater._is_named(repeater, work, recipe, state) is (named == 2)
    told[ahead] = 1  # its leader's mirrors are away, so nobody vouches for version 2 yet
    with pytest.raises(Refused):
        await Repeater._is_named(repeater, work, recipe, state)


def test_pages_of_versions_that_end_too_soon_or_come_slowly_excuse_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An author may name as early a version as it likes: what follows it takes many pages. Attack: a forger led a
    module of its path, and told auditors one version of it after the other, each just in time. They asked nobody else
    until they gave up."""
    tried: dict[str, Repetition] = {}
    repeat = Repeater.__call__

    async def one_by_one(*asked: Any, **how: Any) -> Any:
        page = await ask_chain(*asked, **how)
        return Page({}, canonical_bytes(json.loads(page.body)[:1]))

    async def slowly(node: Any, teller: Any, *asked: Any, **how: Any) -> Any:
        if teller[1] is not GetVersions:
            return await ask_chain(node, teller, *asked, **how)
        page = await one_by_one(node, teller, *asked, **how)
        await node.clock.sleep(CALL_TIMEOUT_S - 1.0)
        return page

    async def lied(self: Repeater, work: Contribution, *parts: Any) -> Repetition:
        if work.recipe is not None and work.recipe.start is not None and work.base_version >= 3 and not tried:
            author = next(volunteer for volunteer in authors if volunteer.peer == work.author)
            made_up = forged_start(author, work)
            assert made_up.recipe is not None
            made_up = replace(made_up, recipe=replace(made_up.recipe, since=0))
            for told in (one_by_one, slowly):
                with monkeypatch.context() as patch:
                    patch.setattr("dipaco_p2p.node.reading.ask_chain", told)
                    tried[told.__name__] = await repeat(self, made_up, *parts)
        return await repeat(self, work, *parts)

    monkeypatch.setattr(Repeater, "__call__", lied)
    authors: list[TinyVolunteer] = []
    train_until(lambda: "slowly" in tried, tmp_path, authors)
    assert tried == {"one_by_one": MADE_UP, "slowly": MADE_UP}


async def test_a_page_that_comes_again_and_again_ends_nobodys_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: an auditor paged up to the version that a work named, and took the same page each time."""

    async def again(*asked: Any, **how: Any) -> list[Any]:
        return [SimpleNamespace(document=SimpleNamespace(version=1))]

    monkeypatch.setattr(reading, "ask_chain", again)
    monkeypatch.setattr(reading, "read_items", mock.AsyncMock(side_effect=lambda kind, page: page))
    node: Any = SimpleNamespace(run=SimpleNamespace(rounds=2**40))
    with pytest.raises(IntegrityError, match="it gave others"):
        await reading.versions_after(node, (signer(1).peer, GetChain), ModuleId(1, 0), after=0, up_to=2**40)


def test_a_state_on_which_the_steps_fail_is_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version names it, since audits do not compare all of it; from there no steps lead to any work."""
    tried: list[Repetition] = []
    repeat, state = Repeater.__call__, Repeater._state
    monkeypatch.setattr(Repeater, "_state", lambda *asked: spoiled(*asked))

    async def lied(self: Repeater, work: Contribution, *parts: Any) -> Repetition:
        found = await repeat(self, work, *parts)
        if work.recipe is not None and work.recipe.start is not None:
            tried.append(found)
        return found

    async def spoiled(self: Repeater, work: Contribution, ref: BlobRef) -> bytes:
        found = await state(self, work, ref)
        assert isinstance(found, bytes)
        tensors, _ = decode(found)
        huge = {name: np.full_like(one, 1e30) for name, one in tensors.items() if name.endswith("/exp_avg_scales")}
        codes = {name: np.full_like(one, 127) for name, one in tensors.items() if name.endswith("/exp_avg")}
        return encode({**tensors, **huge, **codes})

    monkeypatch.setattr(Repeater, "__call__", lied)
    train_until(lambda: bool(tried), tmp_path, [])
    assert set(tried) == {MADE_UP}
