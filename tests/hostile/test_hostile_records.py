"""What a modified DHT node can send, answer and leave behind, against the nodes of the real programs."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from e2e_harness import eventually
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError
from hivemind.proto import dht_pb2
from hivemind.utils.serializer import MSGPackSerializer
from hostile_harness import MIB, Battlefield, Target

from dipaco_p2p.protocol.records import Record, sign_record
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.swarm.hivemind.dht import FULL_KEYS, LEFT_OUT, STORE_KEYS_MAX, hash_key

pytestmark = pytest.mark.libp2p

REGULAR, DICTIONARY = msgpack.dumps(None), b""
FOR_EVER = 1e18
JUNK_LIFE_S = 5.0


def key_of(field: Battlefield, rest: str) -> str:
    return f"dipaco/{field.run.id[:16]}/{rest}"


async def store(field: Battlefield, target: Target, *entries: tuple[bytes, bytes, bytes, float]) -> list[bool]:
    """Ask `target` to store these (key, sub-key, value, expiry), unchecked by our own code, as many at once as it
    takes."""
    parts = [entries[begin : begin + STORE_KEYS_MAX] for begin in range(0, len(entries), STORE_KEYS_MAX)]
    return [one for part in parts for one in await store_at_once(field, target, *part)]


async def store_at_once(field: Battlefield, target: Target, *entries: tuple[bytes, bytes, bytes, float]) -> list[bool]:
    keys, subkeys, values, expiries = zip(*entries, strict=True)
    request = dht_pb2.StoreRequest(
        keys=keys, subkeys=subkeys, values=values, expiration_time=expiries, in_cache=[False] * len(keys)
    )
    return list((await rpc(field, target, "rpc_store", request, dht_pb2.StoreResponse)).store_ok)


async def found(field: Battlefield, target: Target, key: str) -> dict[str, float]:
    """The owners of what `target` has under `key`, and until when."""
    answer = await rpc(field, target, "rpc_find", dht_pb2.FindRequest(keys=[hash_key(key)]), dht_pb2.FindResponse)
    [result] = answer.results
    entries = MSGPackSerializer.loads(result.value).data if result.value else {}
    return {owner: item.expiration_time for owner, item in entries.items()}


async def rpc(field: Battlefield, target: Target, name: str, request: Any, answer: type[Any]) -> Any:
    async with asyncio.timeout(20):
        return await field.attacker.swarm._p2p.call_protobuf_handler(  # type: ignore[attr-defined]
            PeerID.from_base58(target.peer), f"DHTProtocol.{name}", request, answer
        )


def nested(depth: int, code: int) -> bytes:
    data: bytes = msgpack.dumps([None, 1.0, []])
    for _ in range(depth):
        data = msgpack.dumps(msgpack.ExtType(code, data))
    return data


EMPTY_LISTS = b"\xdd" + (1_900_000).to_bytes(4, "big") + b"\x90" * 1_900_000
ANNOUNCED = b"\xdd\x00\x1f\xff\xff" * 300 + bytes(1_900_000)
DICTIONARY_OF_LISTS = msgpack.dumps(msgpack.ExtType(0x50, msgpack.dumps([None, 1.0])[:-9] + EMPTY_LISTS[:1_000_000]))
BOMBS = {
    "dictionaries in dictionaries, which overflow the C stack": nested(1000, 0x50),
    "tuples in tuples, which do, too": nested(1000, 0x40),
    "two million empty lists": EMPTY_LISTS,
    "a dictionary of empty lists": DICTIONARY_OF_LISTS,
    "lists that announce two million items each": ANNOUNCED,
    "half a value": b"\xc6\xff\xff\xff\xff",
}


def test_bombs_in_the_place_of_a_value_a_subkey_or_a_dictionary_are_refused(field: Battlefield) -> None:
    async def attack(target: Target) -> None:
        key, soon_s = hash_key("foreign"), time.time() + 60
        for name, bomb in BOMBS.items():
            assert await store(field, target, (key, REGULAR, bomb, soon_s)) == [False], name
            assert await store(field, target, (key, bomb, b"\x01", soon_s)) == [False], name
            with pytest.raises(P2PHandlerError):
                await store(field, target, (key, DICTIONARY, bomb, soon_s))

    for target in (field.seed, field.leader):
        with field.attacked():
            field.background.run(attack(target))


def test_a_request_for_a_hundred_thousand_keys_is_refused(field: Battlefield) -> None:
    async def attack(target: Target) -> None:
        keys = [number.to_bytes(20, "big") for number in range(80_000)]
        with pytest.raises(P2PHandlerError, match="80000 keys at once"):
            await rpc(field, target, "rpc_find", dht_pb2.FindRequest(keys=keys), dht_pb2.FindResponse)
        with pytest.raises(P2PHandlerError, match="20000 keys at once"):
            await store_at_once(field, target, *[(key, REGULAR, b"\x01", time.time() + 60) for key in keys[:20_000]])

    with field.attacked():
        for target in (field.seed, field.leader):
            field.background.run(attack(target))


def test_an_entry_that_could_not_be_read_again_is_refused(field: Battlefield) -> None:
    """Stored, it would void every answer of an honest node with what else is there, and what else is asked for."""

    async def attack(target: Target) -> None:
        entry = hash_key("foreign"), MSGPackSerializer.dumps(DictionaryDHTValue()), b"\x01", time.time() + JUNK_LIFE_S
        assert await store(field, target, entry) == [False]
        assert not await found(field, target, "foreign")

    with field.attacked():
        for target in (field.seed, field.leader):
            field.background.run(attack(target))


def test_what_an_answer_has_no_room_for_is_left_out_of_it(field: Battlefield) -> None:
    """hivemind fails to refuse it: whoever asks waits in vain, and the answer stays in memory for good. If we refused
    it, we would seem dead to whoever asks."""

    async def attack(target: Target) -> None:
        keys, value = [hash_key(f"full {number}") for number in range(12)], msgpack.dumps(b"x" * 1000)
        expires_s = time.time() + 60  # all of them are still there when the last is
        for key in keys:
            entries = [(key, msgpack.dumps(f"{n}"), value, expires_s) for n in range(230)]
            assert all(await store(field, target, *entries))
        for _ in range(20):
            answer = await rpc(field, target, "rpc_find", dht_pb2.FindRequest(keys=keys), dht_pb2.FindResponse)
            whole = [result.type == dht_pb2.FOUND_DICTIONARY for result in answer.results]
            assert whole == sorted(whole, reverse=True) and FULL_KEYS <= sum(whole) < len(keys)
            assert answer.results[-1].type == LEFT_OUT and not answer.results[-1].value

    with field.attacked():
        for target in (field.seed, field.leader):
            field.background.run(attack(target))


def test_a_key_that_a_crowd_has_filled_is_still_read(field: Battlefield) -> None:
    """As many records as a key has room for. If they were too many to be unpacked, nobody could read this key, and
    every node that answers with it would seem dead. A record that another node has room for counts as stored."""
    key = key_of(field, "heads/L9.M9")  # which no other attack needs
    reader = field.join("reader")

    async def attack() -> None:
        for target in (field.seed, field.leader):
            records = [signed(one, key, expires_s=time.time() + 30) for one in crowd(300)]
            entries = [
                (hash_key(key), msgpack.dumps(one.peer), msgpack.dumps(one.to_bytes()), one.expires_s)
                for one in records
            ]
            assert sum(await store(field, target, *entries)) > 250
        assert len(await reader.get(key)) > 250
        for _ in range(20):  # some nodes refuse it and others store it, whichever answers last
            assert await reader.put(key, {}, ttl_s=JUNK_LIFE_S)

    with field.attacked():
        field.background.run(attack())


def test_our_keys_cannot_be_squatted(field: Battlefield) -> None:
    """Plain values, values without or of another owner, expiries for ever: under keys of ours nothing of it is kept."""

    async def attack(target: Target) -> None:
        now_s, me = time.time(), msgpack.dumps(field.attacker.peer)
        for rest in ("peers", "claims/P0-0", "heads/L1.M0"):
            key = key_of(field, rest)
            place = hash_key(key)
            found = await field.bystander.get(key)  # with a claim of our own, if an attack before this one left it
            honest = [record for peer, record in found.items() if peer != field.attacker.peer]
            mine = signed(field.attacker.swarm.signer, key, expires_s=now_s + 60)
            eternal = signed(field.attacker.swarm.signer, key, expires_s=FOR_EVER)
            elsewhere = signed(field.attacker.swarm.signer, key + "/x", expires_s=now_s + 60)
            entries = [
                *((place, REGULAR, msgpack.dumps("squatted"), at_s) for at_s in (now_s + 60, FOR_EVER, float("nan"))),
                (place, me, msgpack.dumps("no record"), now_s + 60),
                (place, REGULAR, msgpack.dumps(mine.to_bytes()), mine.expires_s),
                (place, me, msgpack.dumps(mine.to_bytes()), FOR_EVER),
                (place, me, msgpack.dumps(eternal.to_bytes()), FOR_EVER),
                (place, me, msgpack.dumps(elsewhere.to_bytes()), elsewhere.expires_s),
                (place, msgpack.dumps(field.leader.peer), msgpack.dumps(mine.to_bytes()), mine.expires_s),
                (place, msgpack.dumps([field.attacker.peer]), msgpack.dumps(mine.to_bytes()), mine.expires_s),
                *((place, me, msgpack.dumps(record.to_bytes()), record.expires_s) for record in honest),
            ]
            assert not any(await store(field, target, *entries)), rest
        foreign = hash_key("foreign")
        too_long = (foreign, REGULAR, msgpack.dumps(1), FOR_EVER), (foreign, REGULAR, msgpack.dumps(1), float("inf"))
        assert not any(await store(field, target, *too_long))

    with field.attacked():
        for target in (field.seed, field.leader):
            field.background.run(attack(target))


def signed(signer: Signer, key: str, *, expires_s: float, body: dict[str, Any] | None = None) -> Record:
    return sign_record(signer, key=key, counter=int(time.time() * 1000), expires_s=expires_s, body=body or {})


def crowd(count: int) -> Iterator[Signer]:
    """So many identities, which cost nothing."""
    return (Signer(b"crowd" + number.to_bytes(27, "big")) for number in range(count))


def test_a_crowd_fills_no_memory_and_ousts_nobody(field: Battlefield) -> None:
    """Large junk under every key of ours: what fits is kept, as the rules say; who was there stays there."""

    async def flood(target: Target, key: str) -> int:
        expires_s = time.time() + JUNK_LIFE_S
        records = [signed(one, key, expires_s=expires_s, body={"x": ["y" * 30] * 200}) for one in crowd(400)]
        entries = [
            (hash_key(key), msgpack.dumps(one.peer), msgpack.dumps(one.to_bytes()), expires_s) for one in records
        ]
        parts = [entries[start : start + 200] for start in range(0, len(entries), 200)]
        return sum([sum(await store(field, target, *part)) for part in parts])

    async def attack(target: Target) -> None:
        for rest in ("peers", "claims/P0-0", "claims/P0-1", "heads/L1.M0", "heads/L0.M0"):
            key = key_of(field, rest)
            before = await found(field, target, key)
            taken = await flood(target, key)
            assert 30 < taken < 300, f"{rest}: {taken} of 400 taken"
            after, now_s = await found(field, target, key), time.time()
            for owner, expires_s in before.items():
                assert owner in after or expires_s < now_s, f"{rest}: an honest record had to make room"

    with field.attacked(growth_max_bytes=96 * MIB):
        for target in (field.seed, field.leader):
            field.background.run(attack(target))


def test_claims_of_peers_that_never_contribute_slow_a_round_but_end_none(field: Battlefield) -> None:
    async def attack() -> None:
        for one in crowd(50):
            for path in ("P0-0", "P0-1"):
                key, body = key_of(field, f"claims/{path}"), {"path": path, "since_s": 0.0, "round": 0}
                record = signed(one, key, expires_s=time.time() + JUNK_LIFE_S, body=body | {"released": False})
                entry = hash_key(key), msgpack.dumps(one.peer), msgpack.dumps(record.to_bytes()), record.expires_s
                await store(field, field.leader, entry)

    with field.attacked():
        field.background.run(attack())


def test_a_head_that_nobody_granted_leads_nobody_astray(field: Battlefield) -> None:
    """The true head with other words, signed by the attacker: no grant, a grant of another, a version out of reach."""
    heads = {key: field.said_by(field.leader.peer, key) for key in ("heads/L0.M0", "heads/L1.M0", "heads/L1.M1")}

    async def attack() -> None:
        for key, true in heads.items():
            for lie in (
                {},
                {"term": 2**40},
                {"version": 2**40},
                {"term": 2**63},
                {"digest": "0" * 64},
                {"version": -1},
            ):
                assert await field.attacker.swarm.put(key_of(field, key), true | lie, ttl_s=JUNK_LIFE_S)

    with field.attacked():
        field.background.run(attack())


def test_heads_of_a_crowd_that_never_says_why_it_should_lead(field: Battlefield) -> None:
    """Each head names a grant that nobody knows, and its author can be dialled, but does not answer."""
    true, tarpit = field.said_by(field.leader.peer, "heads/L1.M0"), socket.create_server(("127.0.0.1", 0))

    async def attack() -> None:
        expires_s = time.time() + JUNK_LIFE_S
        place = f"/ip4/127.0.0.1/tcp/{tarpit.getsockname()[1]}"
        for one in crowd(40):
            said = {
                "peers": {"addresses": [f"{place}/p2p/{one.peer}"]},
                "heads/L0.M0": true | {"term": 2**30},
                "heads/L1.M0": true | {"term": 2**30},
            }
            for rest, body in said.items():
                key = key_of(field, rest)
                record = signed(one, key, expires_s=expires_s, body=body)
                entry = hash_key(key), msgpack.dumps(one.peer), msgpack.dumps(record.to_bytes()), expires_s
                assert await store(field, field.leader, entry) == [True]

    with tarpit, field.attacked():
        field.background.run(attack())


ANSWERS = {
    "a bomb": dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=nested(1000, 0x50), expiration_time=FOR_EVER),
    "lists": dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=EMPTY_LISTS, expiration_time=FOR_EVER),
    "an empty key for ever": dht_pb2.FindResult(
        type=dht_pb2.FOUND_DICTIONARY,
        value=MSGPackSerializer.dumps(msgpack.ExtType(0x50, msgpack.dumps([1, FOR_EVER, []]))),
        expiration_time=float("inf"),
    ),
    "a size that is none": dht_pb2.FindResult(
        type=dht_pb2.FOUND_DICTIONARY,
        value=msgpack.dumps(msgpack.ExtType(0x50, msgpack.dumps(["x", 1.0, [["a", b"b", FOR_EVER]]]))),
        expiration_time=FOR_EVER,
    ),
    "a plain value": dht_pb2.FindResult(
        type=dht_pb2.FOUND_REGULAR, value=msgpack.dumps("squatted"), expiration_time=time.time() + 600
    ),
    "neighbours that are none": dht_pb2.FindResult(
        type=dht_pb2.NOT_FOUND, nearest_node_ids=[bytes(20)] * 50, nearest_peer_ids=[b"nobody"] * 50
    ),
}


def test_a_node_that_answers_searches_with_lies_stops_no_search(field: Battlefield) -> None:
    asked: list[str] = []
    lies = iter([*ANSWERS] * 10_000)

    async def lie(data: bytes, caller: PeerID) -> bytes:
        asked.append(next(lies))
        response = dht_pb2.FindResponse(results=[ANSWERS[asked[-1]]])
        return bytes(response.SerializeToString())

    handlers = field.attacker.swarm._p2p._client.control.unary_handlers  # type: ignore[attr-defined]
    honest = handlers["DHTProtocol.rpc_find"]
    handlers["DHTProtocol.rpc_find"] = lie
    try:
        with field.attacked():
            field.assert_goes_on()
            # The programs search when they look around, not with every round.
            eventually(lambda: set(asked) == set(ANSWERS), within_s=120, what=lambda: f"asked for {asked} only")
            field.assert_goes_on()
    finally:
        handlers["DHTProtocol.rpc_find"] = honest
