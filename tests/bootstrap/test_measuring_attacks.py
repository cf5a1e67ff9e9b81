"""Who lies about losses, stays silent, or asks for everything, against the coordinator that asks volunteers to measure.

The coordinator's evaluator, its watch and its fetches are stand-ins: every path's loss is TRUTH.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_run import make_run, signer, tiny_config
from virtual_time import VirtualClock

from bootstrap.coordinator import measurements
from bootstrap.coordinator.measurements import REST_ROUNDS, Measurements
from dipaco_p2p.core.routing.evaluate import Evaluation, counted_tokens
from dipaco_p2p.errors import BlobMissing, IntegrityError, Refused
from dipaco_p2p.node.calls import GetMeasure, Wanted
from dipaco_p2p.node.measuring import measuring_s
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.protocol.documents import ModuleVersion, Sealed, seal
from dipaco_p2p.protocol.judgement import Check
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.protocol.versions import genesis_version
from dipaco_p2p.topology import ModuleId, PathId

TRUTH, LIE, SEQUENCES = 2.0, 9.0, 4


@dataclass
class Evaluator:
    """Of a run whose rounds all end with the parameters that it began with."""

    run: Run
    complete: int = 1

    @property
    def tokens(self) -> int:
        return SEQUENCES * counted_tokens(self.run.config.model.context)

    def complete_version(self) -> int:
        return self.complete

    def assign(self, part: str, sharding: int, *, version: int) -> NDArray[np.int64]:
        return np.repeat(np.arange(self.run.topology.path_count), SEQUENCES)

    def untrained(self, version: int) -> tuple[PathId, ...]:
        return ()

    def has(self, path: PathId, version: int) -> bool:
        return False

    def forget(self, version: int) -> None:
        pass

    def version(self, module: ModuleId, version: int) -> ModuleVersion:
        return genesis_version(self.run.manifest, module)

    def measure(self, path: PathId, assigned: object, snapshots: object) -> Evaluation:
        return Evaluation(nats_total=TRUTH * self.tokens, tokens=self.tokens)


@dataclass
class Scene:
    """Volunteers 1 to so many, and one round after the other."""

    run: Run
    clock: VirtualClock
    evaluator: Evaluator
    measurements: Measurements
    fetched: list[str]
    wrong: list[str] = field(default_factory=list)
    version: int = 0
    judging: asyncio.Task[dict[PathId, Evaluation]] | None = None

    async def begin(self) -> None:
        self.version += 1
        self.evaluator.complete = self.version
        self.fetched.clear()
        self.judging = asyncio.create_task(self.measurements.of(self.version, 0))
        await asyncio.sleep(0.05)

    async def end(self) -> dict[PathId, float]:
        """The losses, at the latest when two more rounds are complete."""
        assert self.judging is not None
        await asyncio.sleep(1.0)
        self.evaluator.complete += 2
        return {path: found.loss for path, found in (await self.judging).items()}

    async def asks(self, number: int) -> Wanted:
        return await self.measurements._on_measure(signer(number).peer, GetMeasure())

    def gives(self, number: int, wanted: Wanted, loss: float = TRUTH) -> bool:
        return self.measurements.take(signer(number).peer, self.check(signer(number), wanted, loss))

    def check(self, author: Signer, wanted: Wanted, loss: float) -> Sealed[Check]:
        assert wanted.path is not None
        tokens = self.evaluator.tokens
        return seal(
            author,
            Check(
                run=self.run.id,
                version=wanted.version,
                path=wanted.path,
                modules=tuple(ref.digest for ref in wanted.snapshots),
                sharding=wanted.sharding,
                validation=self.run.manifest.validation.digest,
                nats=loss * tokens,
                tokens=tokens,
                at_s=0.0,
                author=author.peer,
            ),
        )

    async def greedy(self, numbers: Iterable[int], loss: float | None) -> int:
        """They ask in turn for as much as they get, and say `loss`, or nothing; how many paths they got."""
        got = 0
        while wanted := [(number, one) for number in numbers if (one := await self.asks(number)).path is not None]:
            got += len(wanted)
            for number, one in wanted:
                assert loss is None or self.gives(number, one, loss)
        return got

    async def honest(self, numbers: Iterable[int]) -> None:
        """Each asks once, and says what it has measured."""
        for number in numbers:
            if (wanted := await self.asks(number)).path is not None:
                assert self.gives(number, wanted)


@asynccontextmanager
async def scene(folder: Path, *, volunteers: int, share: float = 0.0) -> AsyncIterator[Scene]:
    run, clock = make_run(Store(folder), tiny_config(rounds=30)), VirtualClock()
    peers = frozenset(signer(number).peer for number in range(1, volunteers + 1))
    fetched: list[str] = []
    wrong: list[str] = []

    async def fetch(node: object, ref: Any, **named: Any) -> bytes:
        fetched.append(ref.digest)
        return b""

    node = SimpleNamespace(
        run=run,
        clock=clock,
        swarm=SimpleNamespace(signer=signer(200)),
        decrees=SimpleNamespace(reason=lambda peer: None),
        watch=SimpleNamespace(neighbourhood=SimpleNamespace(is_all=True), heartbeats=dict.fromkeys(peers)),
        history=SimpleNamespace(add=lambda ev, **facts: wrong.append(facts["peer"])),
    )
    evaluator = Evaluator(run)
    found = Measurements(cast(Any, node), cast(Any, evaluator), share=share, workers=lambda: peers, trainers=dict)
    with (
        mock.patch.object(measurements, "fetch", fetch),
        mock.patch.object(measurements, "holders_of", lambda *_: []),
    ):
        played = Scene(run, clock, evaluator, found, fetched, wrong)
        yield played
        if played.judging is not None:
            played.judging.cancel()


def modules_of(run: Run, paths: int) -> int:
    return paths * len(run.topology.path(0).modules())


async def test_two_who_lie_alike_and_ask_first_for_all_change_no_figure(tmp_path: Path) -> None:
    async with scene(tmp_path, volunteers=50) as played:
        await played.begin()
        got = await played.greedy([1, 2], LIE)
        assert got <= 4, "of eight: one at a time, and few for each"
        await played.honest(range(3, 51))
        assert set((await played.end()).values()) == {TRUTH}
        assert set(played.wrong) == {signer(1).peer, signer(2).peer}
        assert len(played.fetched) <= modules_of(played.run, got)
        await played.begin()
        assert (await played.asks(1)).path is None and (await played.asks(3)).path is not None


async def test_a_path_is_given_to_others_before_it_is_given_to_two_friends(tmp_path: Path) -> None:
    async with scene(tmp_path, volunteers=50) as played:
        await played.begin()
        one, other = await played.asks(1), await played.asks(2)
        assert one.path != other.path
        assert (await played.asks(1)).path is None, "it is to measure the first"


async def test_who_stays_silent_costs_the_round_one_place_for_a_while(tmp_path: Path) -> None:
    async with scene(tmp_path, volunteers=50) as played:
        await played.begin()
        assert await played.greedy([1], None) == 1
        await played.honest(range(2, 30))
        assert (await played.asks(30)).path is None, "all are given, seven are measured"
        await played.clock.sleep(measuring_s(played.run.config.rounds) + 0.1)
        await played.honest([31])
        assert set((await played.end()).values()) == {TRUTH} and not played.fetched
        for _ in range(REST_ROUNDS):
            await played.begin()
            assert (await played.asks(1)).path is None
            await played.honest(range(2, 50))
            await played.end()
        await played.begin()
        assert (await played.asks(1)).path is not None, "its machine may have been busy"


async def test_nobody_gives_what_it_was_not_asked_for(tmp_path: Path) -> None:
    async with scene(tmp_path, volunteers=50) as played:
        await played.begin()
        wanted = await played.asks(1)
        assert not played.gives(2, wanted, LIE)
        with pytest.raises(Refused):
            played.measurements.take(signer(1).peer, played.check(signer(2), wanted, LIE))
        for changed in ({"version": 2}, {"path": PathId((0, 9, 9))}):
            assert not played.gives(1, Wanted(**_changed(wanted, **changed)))
        with pytest.raises(Refused):
            played.gives(1, Wanted(**_changed(wanted, snapshots=wanted.snapshots[::-1])))
        assert played.gives(1, wanted) and played.gives(1, wanted, LIE), "the first figure stays"
        await played.honest(range(2, 30))
        assert set((await played.end()).values()) == {TRUTH}


def _changed(wanted: Wanted, **changes: Any) -> dict[str, Any]:
    named = {"path": wanted.path, "version": wanted.version, "snapshots": wanted.snapshots}
    return {**named, "sharding": wanted.sharding} | changes


async def test_a_stranger_and_a_banned_one_are_asked_for_nothing(tmp_path: Path) -> None:
    async with scene(tmp_path, volunteers=3) as played:
        cast(Any, played.measurements._node).decrees.reason = lambda peer: "x" if peer == signer(1).peer else None
        await played.begin()
        assert [(await played.asks(number)).path for number in (1, 99)] == [None, None]
        assert (await played.asks(2)).path is not None


async def test_what_the_lot_draws_convicts_friends_in_the_same_round(tmp_path: Path) -> None:
    """Both were given every path, since nobody else is there. The draw hits some; the others are not signed either."""
    async with scene(tmp_path, volunteers=2, share=0.5) as played:
        drawn = 0
        while not 0 < drawn < 4:
            await played.begin()
            drawn = sum(map(played.measurements._draws, played.run.topology.paths()))
            if not 0 < drawn < 4:
                await played.greedy([1, 2], TRUTH)
                await played.end()
        await played.greedy([1, 2], LIE)
        if played.version % measurements.ALONE_EVERY and drawn < 3:
            with pytest.raises(IntegrityError):
                await played.end()
        else:
            assert set((await played.end()).values()) == {TRUTH}
        assert set(played.wrong) == {signer(1).peer, signer(2).peer}


async def test_a_swarm_that_does_not_measure_costs_the_coordinator_little(tmp_path: Path) -> None:
    async with scene(tmp_path, volunteers=50) as played:
        fetched = judged = 0
        for _ in range(2 * measurements.ALONE_EVERY):
            await played.begin()
            try:
                judged += bool(await played.end())
            except IntegrityError:
                pass
            fetched += len(played.fetched)
        assert judged == 2 and fetched == 2 * modules_of(played.run, played.run.topology.path_count)


async def test_parameters_that_nobody_has_cost_the_round_and_no_more(tmp_path: Path) -> None:
    async with scene(tmp_path, volunteers=50) as played:

        async def nobody(*_: Any, **named: Any) -> bytes:
            raise BlobMissing("gone")

        await played.begin()
        await played.greedy([1], LIE)
        await played.honest(range(2, 51))
        with mock.patch.object(measurements, "fetch", nobody), pytest.raises(IntegrityError):
            await played.end()
        await played.begin()
        await played.honest(range(2, 51))
        assert set((await played.end()).values()) == {TRUTH}
