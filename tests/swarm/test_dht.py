"""Our node's storage and the answers that it believes, without a network."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from dht_harness import (
    KEY,
    KEYS,
    a_node,
    a_protocol,
    dictionary_of,
    entry,
    judged,
    kept,
    new_guard,
    peer_named,
    place,
    put,
    stored,
    told,
)
from hivemind.dht.crypto import DHTRecord
from hivemind.dht.node import Blacklist
from hivemind.dht.protocol import DHTProtocol as HivemindProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.proto import dht_pb2
from hivemind.utils import timed_storage
from hivemind.utils.serializer import MSGPackSerializer

from dipaco_p2p.swarm.hivemind import dht
from dipaco_p2p.swarm.hivemind.dht import (
    ANSWER_BYTES_MAX,
    FIND_KEYS_MAX,
    FULL_KEYS,
    KEY_BYTES_MAX,
    LEFT_OUT,
    MESSAGE_BYTES_MAX,
    SUBKEYS_MAX,
    Protocol,
    Storage,
    _Validator,
    hash_key,
    install,
    node_id_of,
)


def test_a_full_key_keeps_who_is_there_and_lets_them_renew() -> None:
    storage = Storage(new_guard())
    records = [entry(number, text="x" * 7000) for number in range(1, 250)]
    taken = [put(storage, record) for record in records]
    assert 0 < sum(taken) < 249 and not taken[-1] and all(taken[: sum(taken)])
    assert sum(len(item.value) for item in kept(storage).values()) <= KEY_BYTES_MAX
    assert put(storage, entry(1, life_s=40, text="y" * 7000)) and not put(storage, entry(500, text="x" * 7000))
    assert len(MSGPackSerializer.dumps(storage.get(place(KEY)).value)) < MESSAGE_BYTES_MAX


def test_in_a_full_key_an_honest_record_may_grow() -> None:
    storage = Storage(new_guard())
    assert put(storage, entry(1))
    while put(storage, entry(len(kept(storage)) + 1, text="x" * 2000)):
        pass
    assert put(storage, entry(1, life_s=40, text="x" * 900))


def test_small_records_are_bounded_in_number() -> None:
    storage = Storage(new_guard())
    for number in range(SUBKEYS_MAX + 10):
        storage.store_subkey(place(KEY), f"owner {number}", b"x", time.time() + 30)
    assert len(kept(storage)) == SUBKEYS_MAX


def test_keys_of_strangers_share_what_is_left_and_ours_have_room_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht, "FOREIGN_STORE_BYTES_MAX", 1_000_000)
    guard = new_guard()
    guard.know(KEY)
    storage = Storage(guard)
    taken = [put(storage, entry(1, text="x" * 5000), key=f"dipaco/{number}") for number in range(40)]
    assert taken == [True] * 20 + [False] * 20, "a sender has at most an eighth of what is left free"
    assert not storage.store(place("foreign"), bytes(9000), time.time() + 30)
    assert put(storage, entry(1, text="x" * 5000)), "our own key"


def test_one_sender_leaves_room_under_keys_that_we_do_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: one peer puts a byte under each of as many made-up keys as a node keeps, in sixteen requests. Of a large
    swarm a node keeps keys that it never reads: then nobody could write there for an hour."""
    monkeypatch.setattr(dht, "FOREIGN_STORE_BYTES_MAX", 1000 * dht.FOREIGN_KEY_BYTES)
    storage, stored = Storage(new_guard()), 0
    for crowd in range(15):
        storage.sender = f"attacker {crowd}"  # type: ignore[assignment]
        soon_s = time.time() + 3000
        stored += sum(storage.store(place(f"{crowd} {number}"), b"x", soon_s) for number in range(200))
    assert 700 < stored < 1000
    storage.sender = "honest"  # type: ignore[assignment]
    assert all(put(storage, entry(1), key=f"dipaco/{number}") for number in range(10))


def test_who_shortens_what_others_have_stored_gains_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: nine keys store what one may, and a tenth puts less in its place each time. All that it took away was
    room of its own, so ten keys had what takes sixty."""
    monkeypatch.setattr(dht, "FOREIGN_STORE_BYTES_MAX", 1_000_000)
    monkeypatch.setattr(dht, "RECOUNT_EVERY_S", 0.0)
    storage, soon_s = Storage(new_guard()), time.time() + 20

    def fill(sender: str) -> list[DHTID]:
        storage.sender = sender  # type: ignore[assignment]
        places = (place(f"{sender} {number}") for number in range(400))
        return [at for at in places if storage.store_subkey(at, "one", bytes(3000), soon_s)]

    for crowd in range(9):
        stored = fill(f"crowd {crowd}")
        storage.sender = "thief"  # type: ignore[assignment]
        assert all([storage.store_subkey(at, "one", b"", soon_s + 1) for at in stored])
    assert 10 < len(fill("thief")) < 45


async def test_who_sends_a_request_is_whose_room_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    protocol = a_protocol(new_guard())
    monkeypatch.setattr(protocol, "rpc_ping", mock.AsyncMock())
    monkeypatch.setattr(dht, "FOREIGN_STORE_BYTES_MAX", 1024 * 1024)
    soon_s, value = time.time() + 30, MSGPackSerializer.dumps(b"x")

    async def many(sender: str) -> int:
        count = 0
        for number in range(200):
            lives = {"expiration_time": [soon_s], "in_cache": [False]}
            names = {"keys": [place(f"made up {number}").to_bytes()], "subkeys": [Protocol.IS_REGULAR_VALUE]}
            request = dht_pb2.StoreRequest(values=[value], **names, **lives)
            count += sum((await protocol.rpc_store(request, mock.Mock(remote_id=sender))).store_ok)
        return count

    stored = [await many(sender) for sender in ("a", "a", "b")]
    assert 40 < stored[0] < 80 and stored[1] == 0 and stored[2] > 30


def test_what_expired_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht, "FOREIGN_STORE_BYTES_MAX", 27 * dht.FOREIGN_KEY_BYTES)
    storage = Storage(new_guard())
    assert all([put(storage, entry(1, life_s=life_s), key=f"dipaco/{life_s}") for life_s in (0.05, 20.0, 30.0)])
    assert not put(storage, entry(1), key="dipaco/4")
    end_s = time.monotonic() + 5
    while not put(storage, entry(1), key="dipaco/4"):
        assert time.monotonic() < end_s


def test_what_expired_under_a_key_that_lives_on_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats of those who are gone, under a key that others renew for ever."""
    now_s = time.time()
    monkeypatch.setattr(dht, "RECOUNT_EVERY_S", 0.0)
    storage = Storage(new_guard())
    with mock.patch.object(timed_storage, "get_dht_time", lambda: now_s):
        assert all(put(storage, entry(number, life_s=10.0 + 90 * (number == 1))) for number in range(1, 60))
    before = storage._sent.total()
    with mock.patch.object(timed_storage, "get_dht_time", lambda: now_s + 20.0):
        storage._recount()
    assert 0 < storage._sent.total() < before / 20


def test_renewals_leave_nothing_behind() -> None:
    storage = Storage(new_guard())
    for number in range(500):
        assert put(storage, entry(1, life_s=30 + number / 100))
    assert len(storage.expiration_heap) < 200 and len(storage.data[place(KEY)].value.expiration_heap) < 200


async def test_of_an_answer_the_good_is_believed_and_the_rest_left_out() -> None:
    good, expired, elsewhere = entry(1), entry(2, life_s=-1), entry(3, key="dipaco/y/peers")
    guard = new_guard()
    guard.know(KEY)
    junk = dictionary_of(good, expired, elsewhere)
    with junk.freeze():
        junk.store("no bytes", 7, time.time() + 30)
    assert await judged(guard, junk) == {good.peer}
    assert await judged(guard, dictionary_of(expired)) == set()


@pytest.mark.parametrize("data", [b"\xdd\x7f\xff\xff\xff", b"\xc7\x05\x40\x94\x90\x90\x90\x90"])
def test_hivemind_unpacks_nothing_that_is_not_modest(data: bytes) -> None:
    install()
    with pytest.raises(ValueError, match="too many items"):
        MSGPackSerializer.loads(data)


def test_a_refused_write_to_a_full_store_frees_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht, "FOREIGN_STORE_BYTES_MAX", 80_000)
    storage = Storage(new_guard())
    assert put(storage, entry(1, text="x" * 7000), key="dipaco/a")
    for number in range(2, 6):
        assert not put(storage, entry(number, text="x" * 7000), key="dipaco/a")
        assert not put(storage, entry(number, text="x" * 7000), key="dipaco/b")
    assert put(storage, entry(1, text="y" * 7000, life_s=40), key="dipaco/a")


async def test_a_newcomer_to_the_table_costs_no_look_at_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: many keys. A walk through 16384 others, which their owner had put there itself, stopped everything for a
    second or more; and whoever came with another key was handed megabytes."""
    protocol = a_protocol(new_guard())
    handed, walked = mock.AsyncMock(), mock.Mock(return_value=[])
    monkeypatch.setattr(protocol, "call_store", handed)
    monkeypatch.setattr(protocol.storage, "items", walked)
    for number in range(5):
        peer = peer_named(f"{number}")
        await protocol.update_routing_table(node_id_of(peer), peer)
    await asyncio.sleep(0)
    assert not handed.called and not walked.called
    assert all(node_id_of(peer_named(f"{number}")) in protocol.routing_table for number in range(5))


async def test_a_node_is_nowhere_but_where_its_peer_id_puts_it() -> None:
    """Attack: a key whose node is beside the key of all heartbeats, or at five places there at once, as whoever answers
    searches says of it. What others stored was with it alone, and after a heartbeat's life nobody saw anybody."""
    protocol, liar = a_protocol(new_guard()), peer_named("liar")
    near = [DHTID(int.from_bytes(hash_key(KEY), "big") ^ distance) for distance in range(1, 6)]
    for node_id in (*near, node_id_of(peer_named("peer 3"))):
        await protocol.update_routing_table(node_id, liar)
    assert liar not in protocol.routing_table
    await protocol.update_routing_table(node_id_of(liar), liar)
    assert protocol.routing_table.get(peer_id=liar) == node_id_of(liar)
    assert protocol.routing_table.get(node_id=node_id_of(peer_named("peer 3"))) == b"peer 3"


async def test_of_the_nodes_that_an_answer_names_those_are_asked_that_are_where_they_should_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    liar, honest = peer_named("liar"), peer_named("honest")
    said = {place(f"{number}"): liar for number in range(5)} | {node_id_of(honest): honest}

    async def call_find(protocol: Protocol, peer: str, keys: Collection[DHTID]) -> Any:
        return {key: (None, dict(said)) for key in keys}

    monkeypatch.setattr(HivemindProtocol, "call_find", call_find)
    protocol = Protocol(_initialized_with_create=True)
    found = await protocol.call_find("one", [KEYS[0]])  # type: ignore[arg-type]
    assert found == {KEYS[0]: (None, {node_id_of(honest): honest})}


async def test_a_node_that_cannot_be_pinged_takes_nobody_elses_place_away() -> None:
    """Attack: a ping that wants to be answered by one, in the name of another node. One for each took all nodes from
    everybody's table, and nobody found anybody any more."""
    table, one = (protocol := a_protocol(new_guard())).routing_table, peer_named("one")
    await protocol.update_routing_table(node_id_of(one), one)
    others = [peer_named(f"peer {number}") for number in range(20)]
    for other in others:
        await protocol.update_routing_table(node_id_of(other), one, responded=False)
    assert [table.get(node_id=node_id_of(other)) for other in others] == others
    assert one not in table
    await protocol.update_routing_table(None, others[3], responded=False)
    assert others[3] not in table


async def test_a_record_that_is_meant_for_the_cache_hides_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: hivemind tells what is in the cache, if that lives longer, and nothing else: one request to each node
    near a key hid for an hour who lives, or who leads a module."""
    protocol = await a_node(monkeypatch, new_guard())
    assert [await stored(protocol, entry(number)) for number in (1, 2)] == [[True], [True]]
    assert await stored(protocol, entry(3, life_s=60), in_cache=True) == [True]
    assert await told(protocol) == {entry(number).peer for number in (1, 2, 3)}


async def test_what_is_asked_for_again_is_packed_once_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: one peer asks for sixteen full keys, again and again: 80 ms of everybody's time for 350 bytes."""
    protocol = await a_node(monkeypatch, new_guard())
    now_s = time.time()
    monkeypatch.setattr(dht, "get_dht_time", lambda: now_s)
    packed, pack = list[int](), DictionaryDHTValue.packb

    def packb(dictionary: DictionaryDHTValue) -> bytes:
        packed.append(len(dictionary.data))
        return bytes(pack(dictionary))

    monkeypatch.setattr(DictionaryDHTValue, "packb", packb)
    for number in (1, 2, 3):
        assert await stored(protocol, entry(number, life_s=10 + number)) == [True]
        assert [len(await told(protocol)) for _ in range(3)] == 3 * [number]
    assert packed == [1, 2, 3]
    now_s += 12
    assert await told(protocol) and packed == [1, 2, 3, 3], "the first has expired by now"


async def test_of_nodes_that_do_not_answer_few_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: a node answers each search with others that it makes up, and something of each was kept for good."""
    monkeypatch.setattr(dht, "SILENT_MAX", 20)
    silent = Blacklist(5.0, 2.0)
    await a_node(monkeypatch, new_guard(), blacklist=silent)
    for number in range(100):
        silent.register_failure(f"made up {number}")  # type: ignore[arg-type]
    assert len(silent.ban_counter) == len(silent.banned_peers) == 20
    assert "made up 99" in silent and "made up 3" not in silent
    silent.register_success("made up 99")  # type: ignore[arg-type]
    assert "made up 99" not in silent and len(silent.ban_counter) == 19


async def test_a_malformed_node_id_is_refused_and_fails_in_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: each left a traceback in the log, which has 16 MiB: soon it told of nothing else."""
    protocol, odd = await a_node(monkeypatch, new_guard()), dht_pb2.NodeInfo(node_id=b"x" * 21)
    for answering in (
        protocol.rpc_find(dht_pb2.FindRequest(keys=[hash_key(KEY)], peer=odd), mock.Mock()),
        protocol.rpc_store(dht_pb2.StoreRequest(peer=odd), mock.Mock()),
    ):
        with pytest.raises(AssertionError, match="DHTID must be in"):
            await answering
    assert not protocol.rpc_ping.called  # type: ignore[attr-defined]


async def test_few_nodes_wait_for_a_place_in_a_full_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: a key for each ping. Of every one half a kilobyte was kept for good."""
    protocol = a_protocol(new_guard())
    monkeypatch.setattr(protocol, "call_ping", mock.AsyncMock())
    for peer in map(peer_named, map(str, range(1500))):
        await protocol.update_routing_table(node_id_of(peer), peer)
    table = protocol.routing_table
    assert max(len(bucket.replacement_nodes) for bucket in table.buckets) == 20
    assert len(table.uid_to_peer_id) == len(table.peer_id_to_uid) < 45 * len(table.buckets)


class Asked:
    """Another node, and what it is asked for at once; it knows nothing under most keys."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.answers = list[tuple[str, int]](), True

        async def call_find(protocol: Protocol, peer: str, keys: Collection[DHTID]) -> Any:
            self.calls.append((peer, len(keys)))
            return {key: (None, {}) for key in keys} if self.answers else None

        monkeypatch.setattr(HivemindProtocol, "call_find", call_find)
        self.protocol = Protocol(_initialized_with_create=True)

    async def find(self, peer: str, *keys: DHTID) -> Any:
        return await self.protocol.call_find(peer, keys)  # type: ignore[arg-type]


async def test_what_searches_want_of_a_node_at_one_moment_goes_there_in_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Asked(monkeypatch)
    answers = await asyncio.gather(*(asked.find("a", key) for key in (*KEYS, KEYS[-1])), asked.find("b", KEYS[0]))
    assert [list(each) for each in answers] == [[key] for key in (*KEYS, KEYS[-1], KEYS[0])]
    assert sorted(asked.calls) == [("a", 2), ("a", FIND_KEYS_MAX), ("a", FIND_KEYS_MAX), ("b", 1)]
    assert await asked.find("a", KEYS[0]) == {KEYS[0]: (None, {})}
    assert asked.calls[-1] == ("a", 1) and not asked.protocol._requests


async def test_of_a_node_that_does_not_answer_no_search_hears_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    asked.answers = False
    assert await asyncio.gather(*(asked.find("a", key) for key in KEYS[:3])) == [None, None, None]
    assert asked.calls == [("a", 3)]


async def test_a_search_that_is_given_up_takes_the_answer_from_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    first, second = (asyncio.create_task(asked.find("a", key)) for key in KEYS[:2])
    for _ in range(3):  # both have joined the request
        await asyncio.sleep(0)
    first.cancel()
    assert await second == {KEYS[1]: (None, {})} and first.cancelled()
    assert asked.calls == [("a", 2)]


def test_a_full_key_can_be_read() -> None:
    """Attack: as many signed records as a key has room for. If they were too many to be unpacked, every node that
    answers with them would seem dead, and leave everybody's table."""
    storage = Storage(new_guard())
    for number in range(1, SUBKEYS_MAX + 1):
        assert put(storage, entry(number, text="x" * 500))
    assert not put(storage, entry(SUBKEYS_MAX + 1))
    assert len(dht._loads(MSGPackSerializer.dumps(storage.get(place(KEY)).value))) == SUBKEYS_MAX


class Node:
    """A node whose keys are all full, and another that asks it; both are hivemind's but for the line between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = dictionary_of(*(entry(number, text="x" * 700) for number in range(1, 300)))
        self.answers = list[dht_pb2.FindResponse]()
        self.told, self.responded = list[bytes](), list[bool]()
        one, self.asker = (Protocol(_initialized_with_create=True) for _ in range(2))
        one.storage, one.node_info = Storage(new_guard()), None
        one.routing_table = SimpleNamespace(get_nearest_neighbors=lambda *_, **__: [])
        one.bucket_size, one.rpc_ping = 20, mock.AsyncMock()
        told = {"type": dht_pb2.FOUND_DICTIONARY, "value": MSGPackSerializer.dumps(self.full), "expiration_time": 0.0}
        one.storage.told = lambda key: told

        async def rpc_find(request: dht_pb2.FindRequest, timeout: float) -> dht_pb2.FindResponse:
            answer = await one.rpc_find(request, mock.Mock())
            self.answers.append(answer)
            return dht_pb2.FindResponse.FromString(answer.SerializeToString())

        async def update(node_id: object, peer_id: object, responded: bool = True) -> None:
            self.responded.append(responded)

        self.asker.node_info = dht_pb2.NodeInfo(node_id=place("asker").to_bytes())
        self.asker.wait_timeout, self.asker.rpc_semaphore = 3.0, asyncio.Semaphore(8)
        self.asker.routing_table = SimpleNamespace(get=lambda **_: None)
        self.asker.on_found = lambda key, entries: self.told.append(key)
        monkeypatch.setattr(self.asker, "get_stub", lambda peer: SimpleNamespace(rpc_find=rpc_find))
        monkeypatch.setattr(self.asker, "update_routing_table", update)
        monkeypatch.setattr(self.asker, "_validate_record", lambda *words: True)


async def test_what_an_answer_has_no_room_for_is_asked_for_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: somebody fills every key within a look. If each node that is asked for them seemed dead, everybody's
    table would soon be empty."""
    node = Node(monkeypatch)
    keys = KEYS[:FIND_KEYS_MAX]
    found = await asyncio.gather(*(node.asker.call_find("one", [key]) for key in keys))  # type: ignore[list-item]
    assert [set(each) for each in found] == [{key} for key in keys]
    assert sorted(node.told) == sorted(key.to_bytes() for key in keys)
    assert all(answer.ByteSize() <= ANSWER_BYTES_MAX for answer in node.answers)
    left_out = [sum(result.type == LEFT_OUT for result in answer.results) for answer in node.answers]
    assert left_out[0] > 0 and not any(left_out[1:]) and len(node.answers) <= 3
    assert FULL_KEYS * len(MSGPackSerializer.dumps(node.full)) < ANSWER_BYTES_MAX
    await asyncio.sleep(0)
    assert False not in node.responded


async def test_a_node_that_always_leaves_a_key_out_is_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: it drags a search out."""
    calls = []

    async def call_find(protocol: Protocol, peer: str, keys: Collection[DHTID]) -> Any:
        calls.append(set(keys))
        return {KEYS[1]: (None, {})} if KEYS[1] in keys else {}

    monkeypatch.setattr(HivemindProtocol, "call_find", call_find)
    protocol = Protocol(_initialized_with_create=True)
    found = await asyncio.gather(*(protocol.call_find("one", [key]) for key in KEYS[:2]))  # type: ignore[list-item]
    assert found == [{}, {KEYS[1]: (None, {})}] and calls == [set(KEYS[:2]), {KEYS[0]}]


def test_an_entry_whose_owner_is_a_dictionary_is_not_stored() -> None:
    """Attack: hivemind stores it and cannot read it again, so it voids every answer with what else is asked for."""
    validator, owner = _Validator(new_guard()), MSGPackSerializer.dumps(DictionaryDHTValue())
    value, expires_s = MSGPackSerializer.dumps(b"x"), time.time() + 30

    def judged(subkey: bytes) -> bool:
        return validator.validate(DHTRecord(hash_key("of another run"), subkey, value, expires_s))

    assert judged(MSGPackSerializer.dumps("peer")) and not judged(owner)
    poisoned = DictionaryDHTValue()
    poisoned.store(MSGPackSerializer.loads(owner), value, expires_s)
    with pytest.raises(ValueError, match="extensions inside extensions"):
        dht._loads(MSGPackSerializer.dumps(poisoned))


def test_a_peers_id_is_spelt_out_once_and_not_if_it_is_long() -> None:
    assert dht._peer_id(b"x" * 38) is dht._peer_id(b"x" * 38)
    with pytest.raises(ValueError, match="10000 bytes"):
        dht._peer_id(b"x" * 10_000)
