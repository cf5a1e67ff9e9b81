"""What our DHT node stores for others, within bounds: hivemind's storage, which trusts whoever writes to it.

A refused write changes nothing, and plain values never oust sub-keys. Who is in a full key stays, as long as it renews
its record; newcomers have to wait. Keys of our own run have room of their own; all others share what is left.
"""

from __future__ import annotations

import heapq
from typing import Any

from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue

from .guard import RecordGuard

SUBKEYS_MAX = 1024
KEY_BYTES_MAX = 1536 * 1024
"""Of all records under one key: an answer has to fit into one message."""
ENTRY_BYTES_MIN = KEY_BYTES_MAX // SUBKEYS_MAX
"""What an entry has room for from the start: in a full key, too, it can be renewed by one that is longer."""
KEYS_MAX = 16384
FOREIGN_STORE_BYTES_MAX = 32 * 1024 * 1024
"""Of what is kept under keys that are not ours; those of our own run have room of their own."""
_SUBKEY_BYTES = 64
"""What an entry takes in an answer besides its value."""


class Storage(DHTLocalStorage):  # type: ignore[misc]
    """Values by key; `guard` knows which keys are ours."""

    def __init__(self, guard: RecordGuard) -> None:
        super().__init__()
        self._guard = guard
        self._foreign: dict[DHTID, int] = {}
        """Bytes under each key that is not ours."""
        self._foreign_bytes = 0

    def get(self, key: DHTID) -> Any:
        """A copy of a dictionary: hivemind's search merges what others answer into what it is given."""
        held = super().get(key)
        if held is None or not isinstance(held.value, DictionaryDHTValue):
            return held
        return type(held)(copied(held.value), held.expiration_time)

    def store(self, key: DHTID, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        if subkey is not None:
            return self.store_subkey(key, subkey, value, expiration_time)
        held = super().get(key)
        if held is not None and (isinstance(held.value, DictionaryDHTValue) or held.expiration_time >= expiration_time):
            return False
        return self._take_room(key, len(value)) and bool(super().store(key, value, expiration_time))

    def store_subkey(self, key: DHTID, subkey: Any, value: Any, expiration_time: float) -> bool:
        held = super().get(key)
        has_subkeys = held is not None and isinstance(held.value, DictionaryDHTValue)
        dictionary = held.value if has_subkeys else DictionaryDHTValue()
        old = dictionary.get(subkey)
        if old is not None and old.expiration_time >= expiration_time:
            return False
        total_bytes = size_bytes(dictionary) + _room(value) - (_room(old.value) if old is not None else 0)
        if total_bytes > KEY_BYTES_MAX or (old is None and len(dictionary) >= SUBKEYS_MAX):
            return False
        if not (self._take_room(key, total_bytes) and dictionary.store(subkey, value, expiration_time)):
            return False
        _compact(dictionary)
        if not has_subkeys:
            del self[key]
        if not has_subkeys or held.expiration_time < expiration_time:
            super().store(key, dictionary, expiration_time)
        _compact(self)
        return True

    def _take_room(self, key: DHTID, total_bytes: int) -> bool:
        """Whether `key` may have so many bytes in all; if so they are counted."""
        if self._guard.knows(key.to_bytes()):
            return True
        if not self._has_room(key, total_bytes):
            self._foreign = {other: held for other, held in self._foreign.items() if other in self.data}
            self._foreign_bytes = sum(self._foreign.values())
            if not self._has_room(key, total_bytes):
                return False
        self._foreign_bytes += total_bytes - self._foreign.get(key, 0)
        self._foreign[key] = total_bytes
        return True

    def _has_room(self, key: DHTID, total_bytes: int) -> bool:
        more_bytes = total_bytes - self._foreign.get(key, 0)
        is_counted = key in self._foreign or len(self._foreign) < KEYS_MAX
        return is_counted and self._foreign_bytes + more_bytes <= FOREIGN_STORE_BYTES_MAX


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


def _room(value: bytes) -> int:
    return max(ENTRY_BYTES_MIN, len(value) + _SUBKEY_BYTES)


def _compact(storage: Any) -> None:
    """hivemind's heap of expiries keeps an entry for every renewal until its time is over."""
    if len(storage.expiration_heap) > 2 * len(storage.data) + 64:
        storage.expiration_heap = list(storage.key_to_heap.values())
        heapq.heapify(storage.expiration_heap)
