"""A node of the DHT without a network, records of many peers, and what it stores and tells."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.serializer import MSGPackSerializer

from dipaco_p2p.clock import SystemClock
from dipaco_p2p.protocol.records import Record, sign_record
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.swarm.hivemind import dht
from dipaco_p2p.swarm.hivemind.dht import (
    FIND_KEYS_MAX,
    Protocol,
    Storage,
    _Validator,
    hash_key,
    install,
    node_id_of,
)
from dipaco_p2p.swarm.hivemind.guard import RecordGuard

KEY = "dipaco/x/peers"


def new_guard() -> RecordGuard:
    return RecordGuard(clock=SystemClock(), ttl_max_s=60, hash_key=hash_key, counts=Counter())


def place(key: str) -> DHTID:
    return DHTID.generate(source=key)


def entry(number: int, *, key: str = KEY, life_s: float = 30.0, text: str = "") -> Record:
    signer = Signer(number.to_bytes(32, "big"))
    return sign_record(signer, key=key, counter=1, expires_s=time.time() + life_s, body={"text": text})


def kept(storage: Storage, key: str = KEY) -> Any:
    return storage.get(place(key)).value.data


def put(storage: Storage, record: Record, *, key: str = KEY) -> bool:
    return storage.store_subkey(place(key), record.peer, record.to_bytes(), record.expires_s)


async def judged(guard: RecordGuard, dictionary: DictionaryDHTValue, *, within_s: float = 9.0) -> set[str]:
    protocol = Protocol(_initialized_with_create=True)
    protocol.record_validator = _Validator(guard)
    await protocol._read(hash_key(KEY), dictionary, asyncio.get_running_loop().time() + within_s)
    return set(dictionary.data)


def dictionary_of(*records: Record) -> DictionaryDHTValue:
    dictionary = DictionaryDHTValue()
    with dictionary.freeze():
        for record in records:
            dictionary.store(record.peer, MSGPackSerializer.dumps(record.to_bytes()), record.expires_s)
    return dictionary


def a_protocol(guard: RecordGuard) -> Protocol:
    """Of a node that knows twenty others."""
    protocol = Protocol(_initialized_with_create=True)
    protocol.node_id, protocol.bucket_size, protocol.num_replicas = DHTID.generate(), 20, 5
    protocol.node_info = dht_pb2.NodeInfo(node_id=protocol.node_id.to_bytes())
    protocol.record_validator = _Validator(guard)
    protocol.storage = protocol.cache = Storage(guard)
    protocol.routing_table = RoutingTable(protocol.node_id, protocol.bucket_size, 5)
    for number in range(20):
        peer = peer_named(f"peer {number}")
        protocol.routing_table.add_or_update_node(node_id_of(peer), peer)
    return protocol


def peer_named(name: str) -> PeerID:
    return PeerID(name.encode())


async def a_node(monkeypatch: pytest.MonkeyPatch, guard: RecordGuard, *, blacklist: Any = None) -> Protocol:
    install()
    protocol = a_protocol(guard)
    protocol.routing_table = SimpleNamespace(get_nearest_neighbors=lambda *_, **__: [])
    monkeypatch.setattr(protocol, "rpc_ping", mock.AsyncMock())
    node = SimpleNamespace(protocol=protocol, blacklist=blacklist or mock.Mock())
    monkeypatch.setattr(dht.DHTNode, "create", mock.AsyncMock(return_value=node))
    await dht.create_node(SimpleNamespace(peer_id=peer_named("us")), guard, client_mode=False, on_found=mock.Mock())
    return protocol


async def stored(protocol: Protocol, record: Record, *, in_cache: bool = False, sender: str = "") -> list[bool]:
    names, values = [MSGPackSerializer.dumps(record.peer)], [MSGPackSerializer.dumps(record.to_bytes())]
    lives = {"expiration_time": [record.expires_s], "in_cache": [in_cache]}
    request = dht_pb2.StoreRequest(keys=[hash_key(KEY)], subkeys=names, values=values, **lives)
    return list((await protocol.rpc_store(request, mock.Mock(remote_id=sender or record.peer))).store_ok)


async def told(protocol: Protocol) -> set[str]:
    answer = await protocol.rpc_find(dht_pb2.FindRequest(keys=[hash_key(KEY)]), mock.Mock(remote_id="asker"))
    return set(MSGPackSerializer.loads(answer.results[0].value).data)


KEYS = [place(f"{number}") for number in range(2 * FIND_KEYS_MAX + 2)]
