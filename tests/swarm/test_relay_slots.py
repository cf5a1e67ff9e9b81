"""Whom a relay serves: members as long as they renew, guests for a minute, nobody more than a share."""

from __future__ import annotations

import contextlib

import pytest

from dipaco_p2p.clock import ManualClock
from dipaco_p2p.errors import Refused
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm.frames import Caller
from dipaco_p2p.swarm.relay_slots import (
    GUEST_REST_S,
    GUEST_S,
    GUESTS_PER_HOST,
    GUESTS_REMEMBERED,
    MEMBER_S,
    SLOT_S,
    RelayLimits,
    Slots,
)

LIMITS = RelayLimits(slots=16, slots_per_host=6, circuits=8, circuits_per_peer=3, circuit_bytes=1000, circuit_s=100.0)


def peer(number: int) -> PeerId:
    return Signer(bytes([number % 256, number // 256]) + bytes(30)).peer


def caller(number: int, host: str = "") -> Caller:
    return Caller(peer(number), host or f"198.51.{number // 256}.{number % 256}")


def opened(*members: int) -> tuple[Slots, ManualClock]:
    clock = ManualClock(1000.0)
    slots = Slots(clock, LIMITS)
    slots.note(list(map(peer, members)), ())
    return slots, clock


def refused(slots: Slots, who: Caller) -> str:
    with pytest.raises(Refused) as error:
        slots.reserve(who)
    return error.value.reason


async def test_a_member_keeps_its_slot_as_long_as_it_renews_it() -> None:
    slots, clock = opened(1)
    for _ in range(5):
        assert slots.reserve(caller(1)) == clock.now_s() + SLOT_S
        await clock.advance(SLOT_S / 2)
        slots.note([peer(1)], ())
    await clock.advance(SLOT_S)
    assert slots.taken == 0


async def test_a_guest_has_one_minute_and_then_a_rest() -> None:
    slots, clock = opened()
    assert slots.reserve(caller(1)) == clock.now_s() + GUEST_S
    await clock.advance(GUEST_S / 2)
    assert slots.reserve(caller(1)) == clock.now_s() + GUEST_S / 2, "renewing makes it no longer"
    await clock.advance(GUEST_S / 2)
    assert refused(slots, caller(1)) == Reason.UNKNOWN_PEER
    await clock.advance(GUEST_REST_S - GUEST_S)
    assert slots.reserve(caller(1)) == clock.now_s() + GUEST_S


async def test_a_guest_that_takes_part_meanwhile_becomes_a_member_and_one_that_leaves_a_guest() -> None:
    slots, clock = opened()
    slots.reserve(caller(1))
    slots.note([peer(1)], ())
    assert slots.reserve(caller(1)) == clock.now_s() + SLOT_S
    await clock.advance(MEMBER_S)
    assert set(slots.note([], ())) == {peer(1)}, "whoever holds a slot is looked for"
    assert slots.reserve(caller(1)) == clock.now_s() + GUEST_S


def test_a_thousand_names_at_one_host_get_the_share_of_a_host() -> None:
    slots, _ = opened(*range(1000))
    given = 0
    for number in range(1000):
        try:
            slots.reserve(caller(number, "203.0.113.9"))
            given += 1
        except Refused as error:
            assert error.reason == Reason.FULL
    assert given == LIMITS.slots_per_host == slots.taken
    slots.reserve(caller(1001))


def test_a_thousand_strangers_leave_room_for_members() -> None:
    slots, _ = opened(1)
    given = 0
    for number in range(2, 1002):
        try:
            slots.reserve(caller(number))
            given += 1
        except Refused as error:
            assert error.reason == Reason.BUSY
    assert given == LIMITS.slots // 4
    slots.reserve(caller(1))


def test_strangers_at_one_host_have_fewer_slots_than_members_there() -> None:
    slots = Slots(ManualClock(1000.0), RelayLimits())
    strangers = [caller(number, "203.0.113.9") for number in range(GUESTS_PER_HOST + 1)]
    for who in strangers[:-1]:
        slots.reserve(who)
    assert refused(slots, strangers[-1]) == Reason.BUSY
    slots.note([strangers[-1].peer], ())
    slots.reserve(strangers[-1])


async def test_what_is_remembered_of_guests_is_bounded() -> None:
    slots, clock = opened()
    for number in range(2 * GUESTS_REMEMBERED):
        slots.reserve(caller(number))
        await clock.advance(GUEST_S)
    assert len(slots._guests_s) == GUESTS_REMEMBERED


def test_a_banned_peer_has_no_slot_and_no_circuit() -> None:
    slots, _ = opened(1, 2)
    slots.reserve(caller(1))
    slots.reserve(caller(2))
    slots.note([peer(2)], [peer(1)])
    assert refused(slots, caller(1)) == Reason.BANNED
    for source, target, reason in ((2, 1, Reason.UNREACHABLE), (1, 2, Reason.BANNED)):
        with pytest.raises(Refused) as error:
            slots.open(caller(source), peer(target))
        assert error.value.reason == reason


def test_a_ban_ends_open_circuits() -> None:
    slots, _ = opened(1)
    slots.reserve(caller(1))
    circuits = [slots.open(caller(number), peer(1)) for number in (2, 3)]
    assert all(slots.carry(circuit, 1) for circuit in circuits)
    slots.note([peer(1)], [peer(2)])
    assert [slots.carry(circuit, 1) for circuit in circuits] == [False, True]


def test_a_circuit_leads_only_to_a_peer_with_a_slot() -> None:
    slots, _ = opened(1, 2)
    with pytest.raises(Refused) as error:
        slots.open(caller(1), peer(2))
    assert error.value.reason == Reason.UNREACHABLE
    slots.reserve(caller(2))
    circuit = slots.open(caller(1), peer(2))
    assert slots.open_circuits == 1
    slots.close(circuit)
    assert slots.open_circuits == 0


def test_one_peer_and_one_host_have_a_share_of_the_circuits() -> None:
    slots, _ = opened(1)
    slots.reserve(caller(1))
    for number, most in ((2, LIMITS.circuits_per_peer), (3, 1)):  # the host's half is full then
        who = caller(number, "203.0.113.9")
        for _ in range(most):
            slots.open(who, peer(1))
        with pytest.raises(Refused):
            slots.open(who, peer(1))
    slots.open(caller(4), peer(1))


def test_two_hosts_leave_circuits_to_others() -> None:
    """Attack: a few keys at two addresses hold all circuits of a relay for two hours, through which nothing goes."""
    slots, _ = opened(1)
    slots.reserve(caller(1))
    for host in ("203.0.113.9", "192.0.2.9"):
        for number in range(2, 10):
            with contextlib.suppress(Refused):
                while True:
                    slots.open(caller(number, host), peer(1))
    assert slots.open_circuits == 6
    for number in (20, 21):
        slots.open(caller(number), peer(1))


async def test_a_circuit_ends_after_its_bytes_or_its_time_or_with_a_guests_slot() -> None:
    slots, clock = opened(1)
    slots.reserve(caller(1))
    circuit = slots.open(caller(2), peer(1))
    assert slots.carry(circuit, 999)
    assert not slots.carry(circuit, 1)
    late = slots.open(caller(2), peer(1))
    await clock.advance(LIMITS.circuit_s)
    assert not slots.carry(late, 1)
    slots.reserve(caller(9))
    of_guest = slots.open(caller(2), peer(9))
    assert slots.carry(of_guest, 1)
    await clock.advance(GUEST_S)
    assert not slots.carry(of_guest, 1)
    assert slots.passed_bytes == 1003


def test_what_a_peer_leaves_behind_when_it_changes_networks_are_its_own_circuits() -> None:
    slots, _ = opened(1, 2)
    for number in (1, 2):
        slots.reserve(caller(number), f"/ip4/198.51.0.{number}/tcp/5000")
    to, of, others = (
        slots.open(caller(2), peer(1)),
        slots.open(caller(1), peer(2)),
        slots.open(caller(3), peer(2)),
    )
    assert slots.left_behind(peer(1), "/ip4/198.51.0.1/tcp/5000") == []
    assert set(slots.left_behind(peer(1), "/ip4/203.0.113.9/tcp/5000")) == {to, of}
    assert others not in slots.left_behind(peer(1), "/ip4/203.0.113.9/tcp/5000")
    assert slots.left_behind(peer(9), "/ip4/203.0.113.9/tcp/5000") == []
