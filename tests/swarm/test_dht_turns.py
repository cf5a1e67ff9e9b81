"""What senders ask of our node of the DHT costs nobody else more than a moment."""

from __future__ import annotations

import asyncio
import io
import time
from dataclasses import replace
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
    new_guard,
    peer_named,
    stored,
    told,
)
from google.protobuf.proto import serialize_length_prefixed
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
from hivemind.proto import dht_pb2, p2pd_pb2

from dipaco_p2p.errors import Refused
from dipaco_p2p.swarm.hivemind import dht, p2pd
from dipaco_p2p.swarm.hivemind.dht import (
    FIND_KEYS_MAX,
    Protocol,
    hash_key,
    node_id_of,
)


class Passes:
    """Counts the passes of the loop, and what is checked in each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checked, self._validate = [0], Protocol._validate_record
        monkeypatch.setattr(Protocol, "_validate_record", lambda *words: self._note() and self._validate(*words))

    def _note(self) -> bool:
        self.checked[-1] += 1
        return True

    async def __aenter__(self) -> list[int]:
        async def run() -> None:
            while True:
                await asyncio.sleep(0)
                self.checked.append(0)

        self._running = asyncio.create_task(run())
        return self.checked

    async def __aexit__(self, *error: object) -> None:
        self._running.cancel()


async def test_others_run_while_the_signatures_of_an_answer_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: a node near our keys answers each look with all the records that a message has room for, under sixteen
    keys, forged ones or those of keys that it made up: nobody else ran for seconds."""
    full, guard = [entry(number) for number in range(1, 101)], new_guard()
    async with Passes(monkeypatch) as checked:
        assert await judged(guard, dictionary_of(*full)) == {one.peer for one in full}
    assert sum(checked) == 100 and max(checked) <= dht.CHECKS_AT_ONCE
    assert await judged(guard, dictionary_of(*full), within_s=-1.0) == set(), "an answer is read only for so long"


async def test_others_run_while_the_signatures_of_what_is_brought_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: one peer brings forged records by the thousand, all at once. Nobody else ran, and other peers' records
    came after all of them."""
    guard, done = new_guard(), list[str]()
    guard.know(KEY)
    protocol = await a_node(monkeypatch, guard)

    async def bring(sender: str, number: int) -> None:
        record = replace(entry(number), signature="0" * 128) if sender == "forger" else entry(number)
        assert await stored(protocol, record, sender=sender) == [sender == "honest"]
        done.append(sender)

    async with Passes(monkeypatch) as checked:
        flood = [bring("forger", number) for number in range(1, 101)]
        await asyncio.gather(*flood, bring("honest", 101))
    assert sum(checked) == len(done) == 101 and max(checked) <= 4
    assert done.index("honest") < 10
    assert await told(protocol) == {entry(101).peer}


async def test_others_run_while_one_peer_asks_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: sixteen walks through the routing table for each small request, as many requests as a line carries."""
    protocol, walks, done = await a_node(monkeypatch, new_guard()), [0], list[str]()

    def walk(*_: object, **__: object) -> list[object]:
        walks[-1] += 1
        return []

    monkeypatch.setattr(protocol.routing_table, "get_nearest_neighbors", walk)

    async def ask(asker: str) -> None:
        keys = [key.to_bytes() for key in KEYS[:FIND_KEYS_MAX]]
        await protocol.rpc_find(dht_pb2.FindRequest(keys=keys), mock.Mock(remote_id=asker))
        done.append(asker)

    asking = asyncio.gather(*(ask("flood") for _ in range(100)), ask("honest"))
    while not asking.done():
        await asyncio.sleep(0)
        walks.append(0)
    assert sum(walks) == 101 * FIND_KEYS_MAX and max(walks) <= 2 * FIND_KEYS_MAX
    assert done.index("honest") < 10
    many = asyncio.gather(*(ask("flood") for _ in range(dht.WAITING_PER_PEER_MAX + 20)), return_exceptions=True)
    assert [type(one) for one in await many if one is not None] == 20 * [Refused]


async def test_who_brings_more_than_may_wait_is_refused_and_costs_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    protocol = await a_node(monkeypatch, new_guard())
    many = range(1, dht.WAITING_PER_PEER_MAX + 20)
    answers = await asyncio.gather(*(stored(protocol, entry(number), sender="one") for number in many))
    assert answers.count([False]) == 19
    assert await stored(protocol, entry(500), sender="one") == [True]


async def test_a_request_that_is_no_honest_nodes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    protocol, now_s, names = await a_node(monkeypatch, new_guard()), time.time() + 30, {"in_cache": [False]}
    lives = {"keys": [hash_key(KEY)], "expiration_time": [now_s], **names}
    handed = dht_pb2.StoreRequest(subkeys=[Protocol.IS_DICTIONARY], values=[b""], **lives)
    with pytest.raises(ValueError, match="dictionary"):
        await protocol.rpc_store(handed, mock.Mock(remote_id="one"))
    long = dht_pb2.StoreRequest(subkeys=[b"x"], values=[bytes(dht.REQUEST_BYTES_MAX)], **lives)
    with mock.patch.object(protocol, "_validate_record") as validate:
        assert (await protocol.rpc_store(long, mock.Mock(remote_id="one"))).store_ok == [False]
    assert not validate.called


async def test_of_those_who_want_to_be_pinged_few_are_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: pings that want to be answered by one, which their sender never answers, as many as a line carries."""
    protocol, pinged, may_answer = a_protocol(new_guard()), list[str](), asyncio.Event()

    async def call_ping(peer: PeerID, validate: bool) -> DHTID:
        pinged.append(peer.to_bytes().decode())
        await may_answer.wait()
        return node_id_of(peer)

    async def ping(name: str) -> bool:
        peer = peer_named(name)
        request = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=node_id_of(peer).to_bytes()), validate=True)
        return bool((await protocol.rpc_ping(request, mock.Mock(remote_id=peer))).available)

    monkeypatch.setattr(protocol, "call_ping", call_ping)
    asking = asyncio.gather(*(ping("one") for _ in range(50)), ping("other"), return_exceptions=True)
    for _ in range(5):
        await asyncio.sleep(0)
    assert pinged == ["one"] * dht.PINGED_BACK_PER_PEER_MAX + ["other"]
    may_answer.set()
    answers = await asking
    assert answers.count(True) == len(pinged) and answers[-1] is True
    assert {type(one) for one in answers} == {bool, Refused}


async def test_a_call_that_its_caller_gives_up_leaves_nothing_behind() -> None:
    """Attack: somebody asks and gives up at once, again and again; each time a few hundred bytes stayed for good."""
    control, reader, begun = ControlClient(mock.Mock(), _initialized_with_create=True), asyncio.StreamReader(), []
    p2pd.quieten(SimpleNamespace(_client=SimpleNamespace(control=control)))  # type: ignore[arg-type]

    async def handler(data: bytes, peer: object) -> bytes:
        begun.append(data)
        await asyncio.Event().wait()
        return b""

    def say(call: int, **said: Any) -> None:
        message = p2pd_pb2.PersistentConnectionResponse(callId=bytes([call] * 16), **said)
        with io.BytesIO() as buffer:
            serialize_length_prefixed(message, buffer)
            reader.feed_data(buffer.getvalue())

    control.unary_handlers["find"] = handler
    request = p2pd_pb2.CallUnaryRequest(peer=b"one", proto="find", data=b"x")
    reading = asyncio.create_task(control._read_from_persistent_conn(reader))
    say(1, requestHandling=request)
    say(1, cancel=p2pd_pb2.Cancel())  # before it has begun
    say(2, requestHandling=request)
    for _ in range(5):
        await asyncio.sleep(0)
    assert begun == [b"x"] and len(control._handler_tasks) == 1
    say(2, cancel=p2pd_pb2.Cancel())
    reader.feed_eof()
    await reading
    for _ in range(3):
        await asyncio.sleep(0)
    assert not control._handler_tasks
