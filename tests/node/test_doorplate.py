"""Whom a ticket names beside the seeds: volunteers that have worked and can be dialled, the same while they live."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_run import SEED_NUMBER, make_run, signer, tiny_config

from dipaco_p2p.node.doorplate import (
    REMEMBERED_MAX,
    VOLUNTEERS_MAX,
    make_ticket,
    tell_address,
    told_address,
    whom_to_name,
    whom_to_remember,
)
from dipaco_p2p.node.entry import read_entry
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.protocol.liveness import Heartbeat
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.ticket import SEEDS_MAX, WORD_CHARS_MAX

COORDINATOR = signer(SEED_NUMBER)
PEERS = [Signer(bytes([number]) * 32).peer for number in range(1, 40)]


def at(peer: PeerId, host: int = 1) -> str:
    return f"/ip4/198.51.100.{host}/tcp/31337/p2p/{peer}"


def addresses(count: int, *, first: int = 0) -> list[str]:
    return [at(peer, number) for number, peer in enumerate(PEERS[first : first + count], start=first + 1)]


OURS = at(COORDINATOR.peer, 200)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(Store(tmp_path_factory.mktemp("run")), tiny_config())


def plate(run: Run, folder: Path, volunteers: Sequence[str], **more: Any) -> list[str]:
    """Write it once more; the addresses that its ticket names."""
    swarm: Any = SimpleNamespace(peer=COORDINATOR.peer, addresses=(OURS,))
    return list(read_entry(tell_address(folder, swarm, run, volunteers=volunteers, **more).ticket).addresses)


def watching(beats: dict[PeerId, Heartbeat], *, seeds: Sequence[PeerId] = ()) -> Any:
    return SimpleNamespace(heartbeats=beats, seeds=lambda: list(seeds))


def test_who_is_named_stays_while_it_lives_and_makes_room_only_for_one_that_lives(run: Run, tmp_path: Path) -> None:
    assert plate(run, tmp_path, []) == [OURS]
    first = addresses(VOLUNTEERS_MAX)
    assert plate(run, tmp_path, first) == [OURS, *first]
    assert plate(run, tmp_path, addresses(20)) == [OURS, *first], "who is in stays, however many are there"
    assert plate(run, tmp_path, []) == [OURS, *first], "who has gone costs a moment, and is better than nobody"
    late = addresses(2, first=20)
    assert plate(run, tmp_path, [first[3], *late]) == [OURS, first[3], *late, *first[:3]]
    moved = at(PEERS[3], 99)
    assert plate(run, tmp_path, [moved])[1] == moved and first[3] not in plate(run, tmp_path, [moved]), (
        "one address of a peer"
    )


def test_a_plate_of_another_run_or_one_that_is_damaged_names_nobody(run: Run, tmp_path: Path) -> None:
    first = plate(run, tmp_path, addresses(2))
    (tmp_path / "address.json").write_text((tmp_path / "address.json").read_text().replace('"run": "', '"run": "0'))
    assert len(first) == 3 and plate(run, tmp_path, []) == [OURS]
    (tmp_path / "address.json").write_text("[")
    assert told_address(tmp_path) is None and plate(run, tmp_path, []) == [OURS]


def test_seeds_come_before_volunteers_and_a_ticket_is_never_too_long(run: Run, tmp_path: Path) -> None:
    seeds = [f"/dns4/{'a' * 60}.example.org/tcp/4001/p2p/{peer}" for peer in PEERS[30:34]]
    found = plate(run, tmp_path, addresses(20), seeds=seeds)
    assert found[: 1 + len(seeds)] == [OURS, *seeds] and found[1 + len(seeds) :] == addresses(len(found) - 5)
    told = told_address(tmp_path)
    assert told is not None and len(told.ticket) <= WORD_CHARS_MAX
    assert len(read_entry(make_ticket(run, [OURS], more=addresses(39))).addresses) <= SEEDS_MAX


def test_keys_without_work_and_addresses_of_others_do_not_come_into_a_ticket() -> None:
    """Keys are free: a thousand of them must not take the places of those who would let a newcomer in."""
    worker, relayed, liar, *strangers = PEERS
    beats = {peer: Heartbeat(addresses=(at(peer),)) for peer in strangers}
    beats |= {COORDINATOR.peer: Heartbeat(role="seed", addresses=(OURS,))}
    beats |= {worker: Heartbeat(addresses=(f"/ip4/127.0.0.1/tcp/1/p2p/{worker}", at(worker)))}
    beats |= {relayed: Heartbeat(addresses=(f"{OURS}/p2p-circuit/p2p/{relayed}",))}
    beats |= {liar: Heartbeat(addresses=(at(strangers[0]), "/ip4/nonsense", at(worker)))}
    workers = {worker, relayed, liar, COORDINATOR.peer, Signer(bytes([77]) * 32).peer}
    assert whom_to_name(watching(beats, seeds=[COORDINATOR.peer]), workers=workers) == ([OURS], [at(worker)])


ME = signer(50).peer


def living(peers: Sequence[PeerId], **more: Any) -> dict[PeerId, Heartbeat]:
    return {peer: Heartbeat(addresses=(at(peer),), **more) for peer in peers}


def test_those_who_have_worked_and_seeds_are_remembered_whatever_a_crowd_says_of_itself() -> None:
    """Sixteen keys that call themselves seeds, at addresses that come first in any order, took every place."""
    workers, crowd = PEERS[:10], PEERS[10:26]
    beats = {peer: Heartbeat(role="seed", addresses=(f"/dns/a/tcp/1/p2p/{peer}",)) for peer in crowd}
    beats |= {COORDINATOR.peer: Heartbeat(role="seed", addresses=(OURS,)), **living([*workers, ME])}
    found = whom_to_remember(watching(beats, seeds=[COORDINATOR.peer]), [], workers={*workers, ME}, me=ME)
    assert found[0] == OURS and set(found[1:11]) == set(map(at, workers)) and len(found) == REMEMBERED_MAX


def test_without_any_work_those_met_before_stay_while_they_live_and_chance_draws_the_rest() -> None:
    first = [at(peer) for peer in PEERS[:REMEMBERED_MAX]]
    crowded = watching(living(PEERS))
    assert whom_to_remember(crowded, first, workers=(), me=ME) == first
    assert len({tuple(whom_to_remember(crowded, [], workers=(), me=ME)) for _ in range(20)}) > 1
    few = watching(living(PEERS[:2]))
    assert whom_to_remember(few, first, workers=(), me=ME) == first, "who is gone may be back"
    assert whom_to_remember(few, first[2:], workers=(), me=ME)[2:] == first[2:]


def test_a_peer_that_moved_is_remembered_where_it_is_and_nobody_at_anothers_address() -> None:
    one, liar = PEERS[:2]
    beats = living([one]) | {liar: Heartbeat(addresses=(at(one), f"{OURS}/p2p-circuit/p2p/{liar}"))}
    assert whom_to_remember(watching(beats), [at(one, 9)], workers=(), me=ME) == [at(one)]
