"""Our node of the Kademlia DHT: hivemind's, with bounds on what strangers may ask of it, send it and leave with it.

Traps in hivemind 1.1.12 that are designed around, each of them found by an attack (tests/hostile):
- whatever a peer sends is unpacked before anything is checked (guard.py says what that can do);
- a request may name any number of keys, and each costs a walk through the routing table;
- nobody else runs while the signatures of all that messages hold are checked, which takes seconds;
- one bad entry in an answer makes the whole answer void, and one that claims to live for ever ends the search;
- who marks a record as one for the cache hides all that is stored under its key, if that expires sooner;
- a refused write may shorten the life of what is stored, and a plain value may oust a dictionary;
- what is stored under one key, or handed to a new neighbour, may outgrow the largest message and then gets nowhere;
- a node says itself where it is, may take any number of places in the routing table, and names others where it likes;
- a newcomer to that table costs a walk through all that is stored, and is handed what it should store, though records
  are repeated anyway and more nodes are asked for one than keep it; and who comes when a bucket is full stays for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from hivemind.dht import node as hivemind_node
from hivemind.dht import protocol as hivemind_protocol
from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol as HivemindProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration, get_dht_time

from ...errors import Refused
from ...protocol.reasons import Reason
from ...protocol.records import KEY_BYTES_MAX, KEY_RECORDS_MAX, RECORD_BYTES_MAX
from ...protocol.signing import PeerId
from ..frames import Caller, Share, Turns
from .guard import RecordGuard, is_modest

REPLICAS = 5
RPC_TIMEOUT_S = 3.0
MESSAGE_BYTES_MAX = 2 * 1024 * 1024
"""Of one request to a DHT node or its answer; the daemon refuses longer ones."""
ANSWER_BYTES_MAX = MESSAGE_BYTES_MAX - 1024
"""Of an answer, beside which the message says whose it is."""
FIND_KEYS_MAX = 16
"""That one request may name, and that we ask a node for at once."""
FULL_KEYS = 6
"""Whose answer fits into a message even if all of them are full."""
LEFT_OUT = 3
"""The type of a result for whose value an answer had no room; hivemind has 0 to 2."""
RESULT_BYTES = 8
"""What one result takes in an answer besides itself, at most."""
GATHER_S = 0.01
"""How long a request waits for more keys: the searches of one look want them of the same nodes."""
NEAREST = 2 * REPLICAS
"""Nodes that a read asks, all at once so that requests to the same node go together: those that keep the key's
replicas, and as many that came nearer since it was written."""
TOLD_MAX = 20
"""Nodes that an answer names for each key: as many as honest ones do."""
STORE_KEYS_MAX = 4
"""That one request may bring; an honest node brings one."""
REQUEST_BYTES_MAX = STORE_KEYS_MAX * (RECORD_BYTES_MAX + 1024)
WAITING_MAX, WAITING_PER_PEER_MAX = 512, 128
"""Requests that wait for their turn: a leader of many modules renews all its heads at once."""
PINGED_BACK_MAX, PINGED_BACK_PER_PEER_MAX = 64, 4
"""At once, of those who join and want to know whether they can be reached."""
CHECKS_AT_ONCE = 8
"""Entries of an answer that are checked before others run: a signature takes a fifth of a millisecond, or more."""
READ_S = 5.0
"""How long an answer is read, half of what a search may take: on a busy machine a full key takes two. Of what was left
unread a later look knows the beginning, and gets further."""
SILENT_MAX = 4096
"""Nodes without an answer that are remembered, so as not to ask them soon again."""
SUBKEYS_MAX = KEY_RECORDS_MAX
ENTRY_BYTES_MIN = KEY_BYTES_MAX // SUBKEYS_MAX
"""What an entry has room for from the start: in a full key, too, it can be renewed by one that is longer."""
KEYS_MAX = 16384
FOREIGN_STORE_BYTES_MAX = 32 * 1024 * 1024
"""Of what is kept under keys that are not ours; those of our own run have room of their own."""
FOREIGN_KEY_BYTES = FOREIGN_STORE_BYTES_MAX // KEYS_MAX
"""What a key takes of that at least, for what is in memory besides."""
SENDER_PART = 8
"""Of what is still free there, one sender may have as large a part as it has put there already, and no more."""
RECOUNT_EVERY_S = 1.0
_SUBKEY_BYTES = 64
"""What an entry takes in an answer besides its value."""
ITEMS_MAX = 8 * SUBKEYS_MAX + 64
"""Of one unpacked value, each counted twice (guard.py): a full dictionary has four for each entry."""
SUBKEY_BYTES_MAX = 1024
PEER_ID_BYTES_MAX = 64
_SERIALIZED_BYTES_MAX = RECORD_BYTES_MAX + 8
Found = Callable[[bytes, list[tuple[object, bytes]]], None]
"""Told of a key's hash, and of the entries (owner, data) that some node says are there; all have passed the guard."""


async def create_node(p2p: P2P, guard: RecordGuard, *, client_mode: bool, on_found: Found) -> DHTNode:
    """A node that believes what `guard` allows, and tells `on_found` of each answer as it comes: a search that hostile
    nodes drag out until it is given up has then not been in vain."""
    node = await DHTNode.create(
        p2p=p2p,
        node_id=node_id_of(p2p.peer_id),
        client_mode=client_mode,
        num_replicas=REPLICAS,
        wait_timeout=RPC_TIMEOUT_S,
        record_validator=_Validator(guard),
        num_workers=NEAREST,
        cache_locally=False,
        cache_nearest=0,
        cache_on_store=False,
        cache_refresh_before_expiry=0,
    )
    node.protocol.storage = node.protocol.cache = Storage(guard)
    node.protocol.on_found = on_found
    node.blacklist.ban_counter, node.blacklist.banned_peers.maxsize = _Silences(), SILENT_MAX
    return node


def hash_key(key: str) -> bytes:
    """Where `key` is in the DHT."""
    return bytes(DHTID.generate(source=key).to_bytes())


@functools.lru_cache(maxsize=KEYS_MAX)
def node_id_of(peer: PeerID) -> DHTID:
    """Where the node of `peer` is. If nodes chose that, or had several places in others' words, one key could have all
    the places near a DHT key, and what is stored there would be nowhere else."""
    return DHTID.generate(source=peer.to_bytes())


class _Silences(Counter[PeerID]):
    """How often each node gave no answer; of those that are remembered the first gives way. hivemind counts for good,
    and whoever answers searches with nodes that it makes up has them all counted."""

    def __setitem__(self, peer: PeerID, count: int) -> None:
        super().__setitem__(peer, count)
        if len(self) > SILENT_MAX:
            del self[next(iter(self))]


class _Validator(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types.
    """hivemind asks this before it keeps or believes a value."""

    def __init__(self, guard: RecordGuard) -> None:
        self._guard = guard

    def validate(self, record: DHTRecord) -> bool:
        owner, value = None, None
        if len(record.value) <= _SERIALIZED_BYTES_MAX and len(record.subkey) <= SUBKEY_BYTES_MAX:
            with contextlib.suppress(Exception):  # Whatever a hostile encoding can raise, it is not a record.
                owner, value = _loads(record.subkey), _loads(record.value)
        if value is None or not isinstance(owner, str | None):  # a dictionary as sub-key would void our answers
            return False
        return self._guard.allows(
            record.key, owner, value, size_bytes=len(record.value), expires_s=record.expiration_time
        )


class Storage(DHTLocalStorage):  # type: ignore[misc]
    """Values by key; `guard` knows which keys are ours."""

    def __init__(self, guard: RecordGuard) -> None:
        super().__init__()
        self._guard = guard
        self.sender: PeerID | None = None
        """Who asked us last to store something; what we put ourselves is under keys of ours."""
        self._foreign: Counter[tuple[DHTID, PeerID | None]] = Counter()
        """Bytes under each key that is not ours, by who sent them."""
        self._sent: Counter[PeerID | None] = Counter()
        """The same of all those keys."""
        self._counted_s = -math.inf
        self._packed: dict[DHTID, tuple[bytes, float]] = {}
        """What was told of dictionaries last, and when the first of what is in it expires."""

    def get(self, key: DHTID) -> Any:
        """A copy of a dictionary: hivemind's search merges what others answer into what it is given."""
        held = super().get(key)
        if held is None or not isinstance(held.value, DictionaryDHTValue):
            return held
        return type(held)(copied(held.value), held.expiration_time)

    def told(self, key: DHTID) -> dict[str, Any]:
        """What a node that asks for `key` is told. A dictionary is packed once until it changes: anybody may ask as
        often as it likes."""
        held = super().get(key)
        if held is None:
            return {"type": dht_pb2.NOT_FOUND}
        if not isinstance(held.value, DictionaryDHTValue):
            return {"type": dht_pb2.FOUND_REGULAR, "value": held.value, "expiration_time": held.expiration_time}
        data, until_s = self._packed.get(key, (b"", -math.inf))
        if until_s <= get_dht_time():
            data = MSGPackSerializer.dumps(held.value)
            self._packed[key] = data, min((item.expiration_time for item in held.value.data.values()), default=math.inf)
            if len(self._packed) > len(self.data):
                self._packed = {other: packed for other, packed in self._packed.items() if other in self.data}
        return {"type": dht_pb2.FOUND_DICTIONARY, "value": data, "expiration_time": held.expiration_time}

    def store(self, key: DHTID, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        if subkey is not None:
            return self.store_subkey(key, subkey, value, expiration_time)
        held = super().get(key)
        if held is not None and (isinstance(held.value, DictionaryDHTValue) or held.expiration_time >= expiration_time):
            return False
        more_bytes = len(value) - (len(held.value) if held is not None else 0)
        return self._take_room(key, more_bytes) and bool(super().store(key, value, expiration_time))

    def store_subkey(self, key: DHTID, subkey: Any, value: Any, expiration_time: float) -> bool:
        held = super().get(key)
        has_subkeys = held is not None and isinstance(held.value, DictionaryDHTValue)
        dictionary = held.value if has_subkeys else DictionaryDHTValue()
        old = dictionary.get(subkey)
        if old is not None and old.expiration_time >= expiration_time:
            return False
        more_bytes = _room(value) - (_room(old.value) if old is not None else 0)
        if size_bytes(dictionary) + more_bytes > KEY_BYTES_MAX or (old is None and len(dictionary) >= SUBKEYS_MAX):
            return False
        if not (self._take_room(key, more_bytes) and dictionary.store(subkey, value, expiration_time)):
            return False
        self._packed.pop(key, None)
        _compact(dictionary)
        if not has_subkeys:
            del self[key]
        if not has_subkeys or held.expiration_time < expiration_time:
            super().store(key, dictionary, expiration_time)
        _compact(self)
        return True

    def _take_room(self, key: DHTID, more_bytes: int) -> bool:
        """Whether the sender may put so many bytes more under `key`; if so they are counted. A name of a key costs
        nothing, so what one peer may have of keys that are not ours is a part of what is free (as in frames.py)."""
        if self._guard.knows(key.to_bytes()):
            return True
        if more_bytes <= 0:  # counted to nobody until the next recount: who shortens others' values has no more room
            return True
        if key not in self.data:
            more_bytes = max(more_bytes, FOREIGN_KEY_BYTES)
        elif (key, self.sender) not in self._foreign:
            more_bytes = max(more_bytes, ENTRY_BYTES_MIN)  # what is noted of it takes room, too
        if not self._has_room(more_bytes):
            self._recount()
            if not self._has_room(more_bytes):
                return False
        self._foreign[key, self.sender] += more_bytes
        self._sent[self.sender] += more_bytes
        return True

    def _has_room(self, more_bytes: int) -> bool:
        free = FOREIGN_STORE_BYTES_MAX - self._sent.total()
        return self._sent[self.sender] + more_bytes <= free // SENDER_PART

    def _recount(self) -> None:
        """Forget what has expired. Not for each of a thousand entries that find no room."""
        if (now_s := time.monotonic()) < self._counted_s + RECOUNT_EVERY_S:
            return
        self._counted_s, self._sent = now_s, Counter()
        counted = Counter[DHTID]()
        for (key, _), count in self._foreign.items():
            counted[key] += count if key in self.data else 0
        held = {key: max(FOREIGN_KEY_BYTES, _value_bytes(self.data[key].value)) for key in +counted}
        self._foreign = Counter(  # of a key that shrank, since entries expired, everybody's part shrinks alike
            {
                place: count * min(held[place[0]], counted[place[0]]) // counted[place[0]]
                for place, count in self._foreign.items()
                if place[0] in held
            }
        )
        for (_, sender), count in self._foreign.items():
            self._sent[sender] += count


@dataclass(slots=True, eq=False)
class _Request:
    """What one node is asked for at once."""

    keys: set[DHTID]
    answers: asyncio.Task[Any] = field(init=False)


class Protocol(HivemindProtocol):  # type: ignore[misc]
    """What our node asks others and answers them."""

    on_found: Found = staticmethod(lambda key, entries: None)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._requests: dict[tuple[PeerID, int], _Request] = {}
        """That are not on their way yet, by node and by how many keys they may name."""
        self._waiting = Share(WAITING_MAX, per_peer=WAITING_PER_PEER_MAX)
        self._turns = Turns(2, per_peer=1)
        """Of those who bring records or look for some, which costs signatures and walks through the routing table: who
        asks a thousand times keeps neither others waiting nor our own work."""
        self._pinged_back = Share(PINGED_BACK_MAX, per_peer=PINGED_BACK_PER_PEER_MAX)

    @contextlib.asynccontextmanager
    async def _turn(self, request: Any, context: P2PContext) -> AsyncIterator[None]:
        """A pass of the loop for what one sender asks for, while others wait; raises Refused ("busy") for too much."""
        sender = Caller(PeerId(str(context.remote_id)))
        if request.ByteSize() > REQUEST_BYTES_MAX:
            raise Refused(f"a request of {request.ByteSize()} bytes", reason=Reason.OVERSIZE)
        with self._waiting.place(sender):
            async with self._turns.turn(sender):
                await asyncio.sleep(0)
                yield

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        if not request.validate:
            return await super().rpc_ping(request, context)
        with self._pinged_back.place(Caller(PeerId(str(context.remote_id)))):  # who does not answer takes seconds
            return await super().rpc_ping(request, context)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        if len(request.keys) > FIND_KEYS_MAX:
            raise ValueError(f"{len(request.keys)} keys at once; {FIND_KEYS_MAX} are the most")
        asker = DHTID.from_bytes(request.peer.node_id)  # first: what a task fails at fills the log
        async with self._turn(request, context):
            asyncio.create_task(self.rpc_ping(dht_pb2.PingRequest(peer=request.peer), context))
            answer, room = dht_pb2.FindResponse(peer=self.node_info), ANSWER_BYTES_MAX
            for key in map(DHTID.from_bytes, request.keys):
                result = dht_pb2.FindResult(**self.storage.told(key)) if room > 0 else dht_pb2.FindResult(type=LEFT_OUT)
                near = self.routing_table.get_nearest_neighbors(key, k=self.bucket_size, exclude=asker)
                for node_id, peer_id in near:
                    result.nearest_node_ids.append(node_id.to_bytes())
                    result.nearest_peer_ids.append(peer_id.to_bytes())
                room -= result.ByteSize() + RESULT_BYTES
                if room < 0:  # hivemind would fail to refuse what is longer, and keep it for good
                    result.Clear()
                    result.type = LEFT_OUT
                answer.results.append(result)
        return answer

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        if len(request.keys) > STORE_KEYS_MAX:
            raise ValueError(f"{len(request.keys)} keys at once; {STORE_KEYS_MAX} are the most")
        if self.IS_DICTIONARY in request.subkeys:
            raise ValueError("a dictionary; nobody is handed what others have stored")
        DHTID.from_bytes(request.peer.node_id)  # refuses a malformed one, as in rpc_find
        try:
            async with self._turn(request, context):
                self.storage.sender = context.remote_id  # nothing is awaited until all is stored
                return await super().rpc_store(request, context)
        except Refused:  # an error would look as if we were dead
            return dht_pb2.StoreResponse(store_ok=[False] * len(request.keys), peer=self.node_info)

    async def call_find(self, peer: PeerID, keys: Collection[DHTID]) -> Any:
        """As hivemind's, in one request with what other searches want of this node just now. In a swarm of twelve a
        request for each was most of what an idle peer cost. Each search still goes its own way: whoever leads one
        astray leads no other. What the answer had no room for is asked for once more, with no more than always fits: if
        a long answer counted as no answer, whoever filled some keys could take all nodes from everybody's table."""
        answers = await self._ask(peer, keys, most=FIND_KEYS_MAX)
        if answers is not None and (left := set(keys) - answers.keys()):
            answers |= await self._ask(peer, left, most=FULL_KEYS) or {}
        return answers

    async def _ask(self, peer: PeerID, keys: Collection[DHTID], *, most: int) -> Any:
        request = self._requests.get((peer, most))
        if request is None or len(request.keys.union(keys)) > most:
            request = self._requests[peer, most] = _Request(set(keys))
            request.answers = asyncio.create_task(self._find(peer, most, request))
        request.keys.update(keys)
        answers = await asyncio.shield(request.answers)
        return None if answers is None else {key: answers[key] for key in keys if key in answers}

    async def _find(self, peer: PeerID, most: int, request: _Request) -> Any:
        await asyncio.sleep(GATHER_S)
        if self._requests.get((peer, most)) is request:
            del self._requests[peer, most]
        answers = await super().call_find(peer, request.keys)
        until_s = asyncio.get_running_loop().time() + READ_S
        for key, (item, told) in (answers or {}).items():
            nearest = {node_id: one for node_id, one in [*told.items()][:TOLD_MAX] if node_id == node_id_of(one)}
            if item is not None and isinstance(item.value, DictionaryDHTValue):
                await self._read(key.to_bytes(), item.value, until_s)
                self.on_found(key.to_bytes(), _entries(item.value))
                item = _plain(item.value) if item.value.data else None
            answers[key] = item, nearest
        return answers

    async def _read(self, key_bytes: bytes, dictionary: DictionaryDHTValue, until_s: float) -> None:
        """Take out what is not good: others' junk, what has just expired, and what is still unread at `until_s`."""
        loop = asyncio.get_running_loop()
        for number, (subkey, (value, expires_s)) in enumerate(list(dictionary.data.items())):
            if number % CHECKS_AT_ONCE == 0:
                await asyncio.sleep(0)
            is_good = False
            with contextlib.suppress(Exception):  # whatever a stranger's bytes can raise, they are no record
                is_good = loop.time() < until_s and self._validate_record(
                    key_bytes, self.serializer.dumps(subkey), value, expires_s
                )
            if not is_good:
                del dictionary[subkey]

    async def update_routing_table(self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        """One place for each peer, its own. Of the nodes that wait for a place in a full bucket those that came first
        stay."""
        table, own = self.routing_table, node_id_of(peer_id)
        if not responded and own in table:
            del table[own]
        if not responded or node_id != own:
            return
        quiet = table.add_or_update_node(node_id, peer_id)
        waiting = table.buckets[table.get_bucket_index(node_id)].replacement_nodes
        if node_id in waiting and len(waiting) > self.bucket_size:
            del table[node_id]
        if quiet is not None:
            asyncio.create_task(self.call_ping(quiet[1]))

    async def call_store(self, peer: PeerID, *words: Any, **options: Any) -> list[bool] | None:
        """As hivemind's; a node that refuses a record counts as one without an answer: hivemind would report what the
        last node said, so that one full node could hide that others stored it."""
        stored: list[bool] | None = await super().call_store(peer, *words, **options)
        return stored if stored and any(stored) else None

    def _validate_dictionary(self, key_bytes: bytes, dictionary: DictionaryDHTValue) -> bool:
        """hivemind asks this of an answer; `_read` looks at each entry."""
        return True


def _plain(dictionary: DictionaryDHTValue) -> ValueWithExpiration:
    """The same entries, without the sender's word about how many they may be and how long they live in all."""
    copy = copied(dictionary)
    return ValueWithExpiration(copy, copy.latest_expiration_time)


def _entries(dictionary: DictionaryDHTValue) -> list[tuple[object, bytes]]:
    """Owner and record of each entry."""
    values: Iterable[tuple[object, object]] = ((owner, _loads(item.value)) for owner, item in dictionary.data.items())
    return [(owner, value) for owner, value in values if isinstance(value, bytes)]


def copied(dictionary: DictionaryDHTValue) -> DictionaryDHTValue:
    """The same entries in a new dictionary, whatever limits the old one names."""
    copy = DictionaryDHTValue()
    with copy.freeze():
        for subkey, item in dictionary.data.items():
            copy.store(subkey, item.value, item.expiration_time)
    return copy


def size_bytes(dictionary: DictionaryDHTValue) -> int:
    """What the entries of `dictionary` take, or have room for."""
    return sum(_room(item.value) for item in dictionary.data.values())


def _value_bytes(value: Any) -> int:
    """The same of a dictionary, without what has expired in it; of a plain value its length."""
    return size_bytes(value) if isinstance(value, DictionaryDHTValue) and len(value) >= 0 else len(value)


def _room(value: bytes) -> int:
    return max(ENTRY_BYTES_MIN, len(value) + _SUBKEY_BYTES)


def _compact(storage: Any) -> None:
    """hivemind's heap of expiries keeps an entry for every renewal until its time is over."""
    if len(storage.expiration_heap) > 2 * len(storage.data) + 64:
        storage.expiration_heap = list(storage.key_to_heap.values())
        heapq.heapify(storage.expiration_heap)


@functools.lru_cache(maxsize=KEYS_MAX)
def _peer_id(data: bytes) -> PeerID:
    """Each answer names the same twenty nodes for each key, and hivemind spells out each of them again. Raises
    ValueError for one that is too long for a peer's id: to spell that out would take seconds."""
    if len(data) > PEER_ID_BYTES_MAX:
        raise ValueError(f"a peer's id of {len(data)} bytes")
    return PeerID(data)


_trusting_loads = MSGPackSerializer.loads


def _loads(data: bytes) -> Any:
    """What hivemind unpacks; raises ValueError for what would cost too much, or crash."""
    if not is_modest(data, items_max=ITEMS_MAX):
        raise ValueError("msgpack with too many items, or extensions inside extensions")
    return _trusting_loads(data)


def install() -> None:
    """Make hivemind, in this whole process, build its nodes from `Protocol`, unpack only modest messages, and spell out
    each peer id once. Call it before a node is created; calling it again does nothing."""
    Protocol.__name__ = "DHTProtocol"  # part of what goes over the wire
    hivemind_node.DHTProtocol = Protocol
    hivemind_protocol.PeerID = _peer_id
    MSGPackSerializer.loads = staticmethod(_loads)
