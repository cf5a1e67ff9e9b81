"""One bad seed does not matter, whatever is wrong with it; when all are bad, each is told with its reason."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from runtime_harness import World
from tiny_run import make_run, signer, tiny_config

from dipaco_p2p.errors import DipacoError, EnvironmentUnfit, IntegrityError, Unreachable, WrongRun
from dipaco_p2p.node.dial import FRIENDS_AFTER_S, Opened, doors, knock
from dipaco_p2p.node.entry import Entry
from dipaco_p2p.node.stages import Stages
from dipaco_p2p.node.store import Store
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.swarm.memory import ADDRESS_PREFIX

CLOCK_LINE = "the clock of this machine differs"


def at(peer: PeerId) -> str:
    return ADDRESS_PREFIX + peer


class Street:
    """A run with its seed, and other doors to knock at."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.me = world.network.join(signer(50))
        self.seed = world.seed.swarm.peer
        self.entered: list[str] = []
        self.wrong_clocks: set[str] = set()

    def entry(self, *peers: PeerId, **pins: Any) -> Entry:
        pins = {"run": self.world.run.id, "coordinator": self.world.run.manifest.author} | pins
        return Entry(addresses=tuple(map(at, peers)), **pins)

    async def enter(self, address: str) -> None:
        if address in self.wrong_clocks:
            raise EnvironmentUnfit(f"{CLOCK_LINE} from that of {address}", hint="set the clock, with NTP")
        self.entered.append(address)

    async def knock(self, entry: Entry, **known: Any) -> Opened:
        return await knock(self.me, doors(entry, **known), self.world.clock, enter=self.enter)

    # -- neighbours

    def dead(self) -> PeerId:
        return signer(60).peer

    def frozen(self) -> PeerId:
        peer = self.world.network.join(signer(61)).peer
        self.world.network.freeze(peer)
        return peer

    def of_another_run(self) -> PeerId:
        other = make_run(Store(self.world.folder / "other"), tiny_config(rounds=9))
        return self.serving(62, other)

    def nonsense(self) -> PeerId:
        swarm = self.world.network.join(signer(63))

        async def answer(*_: Any) -> Reply:
            return Reply({}, b"[" * 100_000)

        swarm.serve("run.manifest", answer)
        return swarm.peer

    def forger(self) -> PeerId:
        """The run's manifest with one character changed."""
        swarm = self.world.network.join(signer(64))

        async def answer(*_: Any) -> Reply:
            body = self.world.run.sealed.to_dict()
            body["signature"] = body["signature"][:-1] + ("0" if body["signature"][-1] != "0" else "1")
            from dipaco_p2p.canonical import canonical_bytes

            return Reply({}, canonical_bytes([body]))

        swarm.serve("run.manifest", answer)
        return swarm.peer

    def with_another_clock(self) -> PeerId:
        peer = self.serving(65, self.world.run)
        self.wrong_clocks.add(at(peer))
        return peer

    def of_no_run(self) -> PeerId:
        return self.world.network.join(signer(66)).peer

    def serving(self, number: int, run: Any) -> PeerId:
        swarm = self.world.network.join(signer(number))
        Stages(swarm).add(run)
        return swarm.peer


BAD = ["dead", "frozen", "of_another_run", "nonsense", "forger", "with_another_clock", "of_no_run"]


@asynccontextmanager
async def on_a_street(folder: Path) -> AsyncIterator[Street]:
    async with World(folder) as world:
        yield Street(world)


@pytest.mark.parametrize("kind", BAD)
async def test_a_bad_seed_before_a_good_one_does_not_matter(tmp_path: Path, kind: str) -> None:
    async with on_a_street(tmp_path) as street:
        opened = await street.knock(street.entry(getattr(street, kind)(), street.seed))
        assert (opened.host, opened.stages[-1].id) == (street.seed, street.world.run.id)
        assert street.entered == [at(street.seed)]


async def test_all_bad_ones_together_do_not_matter_either(tmp_path: Path) -> None:
    async with on_a_street(tmp_path) as street:
        bad = [getattr(street, kind)() for kind in BAD]
        start_s = street.world.clock.now_s()
        assert (await street.knock(street.entry(*bad, street.seed))).host == street.seed
        assert street.world.clock.now_s() - start_s < 5.0, "it waited for the one that is silent"


async def test_when_all_fail_each_is_told_and_the_most_telling_decides(tmp_path: Path) -> None:
    async with on_a_street(tmp_path) as street:
        dead, other = street.dead(), street.of_another_run()
        with pytest.raises(WrongRun, match="none of 2 addresses") as failed:
            await street.knock(street.entry(dead, other))
        told = dict(note.split(": ", 1) for note in failed.value.notes)
        assert told.keys() == {at(dead), at(other)}
        assert "nobody is there" in told[at(dead)] or "no answer" in told[at(dead)]
        assert failed.value.hint


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("dead", Unreachable),
        ("of_another_run", WrongRun),
        ("of_no_run", WrongRun),
        ("forger", IntegrityError),
        ("with_another_clock", EnvironmentUnfit),
    ],
)
async def test_alone_it_is_told_as_what_it_is(tmp_path: Path, kind: str, error: type[DipacoError]) -> None:
    async with on_a_street(tmp_path) as street:
        with pytest.raises(error) as failed:
            await street.knock(street.entry(getattr(street, kind)()))
        assert failed.value.exit_code == error.exit_code and "\n" not in str(failed.value)


async def test_a_ticket_that_names_another_coordinator_than_signed_the_run_is_refused(tmp_path: Path) -> None:
    async with on_a_street(tmp_path) as street:
        with pytest.raises(IntegrityError, match="another coordinator"):
            await street.knock(street.entry(street.seed, coordinator=signer(70).peer))


async def test_friends_open_when_all_seeds_are_gone_and_only_their_run(tmp_path: Path) -> None:
    async with on_a_street(tmp_path) as street:
        friend, stranger = street.serving(67, street.world.run), street.of_another_run()
        gone = street.entry(street.dead(), run=None, coordinator=None)
        known = {"friends": [at(stranger), at(friend)], "known_run": street.world.run.id}
        assert (await street.knock(gone, **known)).host == friend


async def test_friends_leave_the_seeds_their_time_and_a_silent_one_gets_no_more(tmp_path: Path) -> None:
    async with on_a_street(tmp_path) as street:
        friend = at(street.serving(67, street.world.run))
        assert (await street.knock(street.entry(street.seed), friends=[friend])).host == street.seed
        start_s = street.world.clock.now_s()
        opened = await street.knock(street.entry(street.frozen()), friends=[friend])
        assert at(opened.host) == friend
        assert street.world.clock.now_s() - start_s >= FRIENDS_AFTER_S


async def test_nobody_knocks_at_his_own_door(tmp_path: Path) -> None:
    async with on_a_street(tmp_path) as street:
        with pytest.raises(Unreachable, match="nobody to ask"):
            await street.knock(street.entry(street.me.peer))
