"""Liars among those whom a newcomer asks first: a wrong clock, silence, nonsense. And what a wrong clock may write."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgpack
import pytest
from hivemind.proto import dht_pb2
from hostile_harness import Battlefield
from test_hostile_records import key_of, signed, store

from dipaco_p2p.errors import EnvironmentUnfit, Unreachable
from dipaco_p2p.swarm.hivemind.dht import hash_key

pytestmark = pytest.mark.libp2p

Ping = Callable[[bytes, object], Awaitable[bytes]]
TEN_MINUTES_S = 600.0


def lying(field: Battlefield, ping: Ping) -> None:
    """From now on the attacker's node answers pings so."""
    field.attacker.swarm._p2p._client.control.unary_handlers["DHTProtocol.rpc_ping"] = ping  # type: ignore[attr-defined]


def late(field: Battlefield, seconds: float) -> Ping:
    node = field.attacker.swarm._node  # type: ignore[attr-defined]

    async def ping(data: bytes, caller: object) -> bytes:
        answer = dht_pb2.PingResponse(peer=node.protocol.node_info, dht_time=time.time() + seconds, available=True)
        return bytes(answer.SerializeToString())

    return ping


async def nonsense(data: bytes, caller: object) -> bytes:
    return b"\xff" * 1000


async def silence(data: bytes, caller: object) -> bytes:
    await asyncio.sleep(60)
    return b""


@pytest.fixture(autouse=True)
def honest_afterwards(field: Battlefield) -> object:
    handlers = field.attacker.swarm._p2p._client.control.unary_handlers  # type: ignore[attr-defined]
    ping = handlers["DHTProtocol.rpc_ping"]
    yield
    handlers["DHTProtocol.rpc_ping"] = ping


def test_a_newcomer_joins_past_any_liar_if_one_answers_honestly(field: Battlefield) -> None:
    [liar] = field.attacker.swarm.addresses[:1]
    with field.attacked():
        for number, ping in enumerate((late(field, TEN_MINUTES_S), late(field, -TEN_MINUTES_S), nonsense, silence)):
            lying(field, ping)
            newcomer = field.join(f"past-{number}", initial_peers=[liar, field.seed.address])
            assert field.leader.peer in field.background.run(newcomer.get(key_of(field, "peers")))
            field.background.run(newcomer.close())


def test_a_newcomer_who_asks_only_a_liar_gets_one_clear_line(field: Battlefield) -> None:
    liars = field.attacker.swarm.addresses[:1]
    with field.attacked():
        lying(field, late(field, TEN_MINUTES_S))
        with pytest.raises(EnvironmentUnfit, match="clock of this machine differs by more than 3 s") as unfit:
            field.join("clock", initial_peers=liars)
        assert "NTP" in unfit.value.hint
        lying(field, nonsense)
        with pytest.raises(Unreachable):
            field.join("nonsense", initial_peers=liars)


def test_records_of_a_wrong_clock_end_when_everybody_says_so(field: Battlefield) -> None:
    """Expiries beyond an hour are refused, and those in the past; what a fast clock writes within it does no harm."""

    async def attack() -> list[bool]:
        key, now_s = key_of(field, "peers"), time.time()
        taken = []
        for expires_s in (now_s - 1, now_s + 3600 + 60, now_s + 86400):
            record = signed(field.attacker.swarm.signer, key, expires_s=expires_s)
            entry = hash_key(key), msgpack.dumps(record.peer), msgpack.dumps(record.to_bytes()), expires_s
            taken += await store(field, field.seed, entry) + await store(field, field.leader, entry)
        return taken

    with field.attacked():
        assert not any(field.background.run(attack()))
