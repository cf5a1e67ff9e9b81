"""What a DHT node of ours parses, stores and believes: the checks that need no DHT.

A node sees only the hash of a key. So a value that claims to be one of our records must name the key that hashes to
it; anything else is taken for the metadata of a foreign program, and kept only if it is small and short-lived, and
never under a key that we know to be ours.

msgpack from a stranger is parsed only after `is_modest` has read its tokens, which builds nothing. A parser that trusts
its input pays for it: an array may announce as many items as there are bytes, each costs fifty bytes of memory or more,
and extension types nested 200 deep, which takes 730 bytes, overflow the C stack of msgpack 1.x and end the process.
Format: github.com/msgpack/msgpack/blob/master/spec.md
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from ...clock import Clock
from ...errors import IntegrityError
from ...protocol.records import CLOCK_SKEW_MAX_S, PREFIX, RECORD_BYTES_MAX, Record, check_record, read_record

FOREIGN_BYTES_MAX = 1024
KNOWN_KEYS_MAX = 8192
DICTIONARY_CODE = 0x50
"""hivemind's extension type for a dictionary; inside is msgpack again, without extensions."""


class RecordGuard:
    """Judges values offered to, or found by, our node. `hash_key` is the DHT's own hash of a key."""

    def __init__(
        self, *, clock: Clock, ttl_max_s: float, hash_key: Callable[[str], bytes], counts: Counter[str]
    ) -> None:
        self._clock, self._ttl_max_s, self._hash_key, self._counts = clock, ttl_max_s, hash_key, counts
        self._known: dict[bytes, str] = {}

    def know(self, key: str) -> None:
        """Remember a key of ours: only signed records are let in under it."""
        assert key.startswith(PREFIX), f"keys of ours begin with {PREFIX}: {key}"
        self._known[self._hash_key(key)] = key
        if len(self._known) > KNOWN_KEYS_MAX:
            del self._known[next(iter(self._known))]

    def knows(self, key_hash: bytes) -> bool:
        """Whether this is where a key of ours is."""
        return key_hash in self._known

    def name_of(self, key_hash: bytes) -> str | None:
        """The key of ours that is here."""
        return self._known.get(key_hash)

    def allows(self, key_hash: bytes, owner: object, value: object, *, size_bytes: int, expires_s: float) -> bool:
        """Whether `value`, stored under a sub-key `owner` (None: without one) may be kept; never raises."""
        record = _read(value) if isinstance(value, bytes) else None
        if record is not None and record.key.startswith(PREFIX):
            allowed = self._allows_record(record, key_hash, owner, expires_s)
        else:
            allowed = key_hash not in self._known and size_bytes <= FOREIGN_BYTES_MAX and self._is_soon(expires_s)
        self._counts["records_refused"] += not allowed
        return allowed

    def _allows_record(self, record: Record, key_hash: bytes, owner: object, expires_s: float) -> bool:
        if record.peer != owner or record.expires_s != expires_s or self._hash_key(record.key) != key_hash:
            return False
        try:
            check_record(record, key=record.key, now_s=self._clock.now_s(), ttl_max_s=self._ttl_max_s)
        except IntegrityError:
            return False
        return True

    def _is_soon(self, expires_s: float) -> bool:
        return expires_s <= self._clock.now_s() + self._ttl_max_s + CLOCK_SKEW_MAX_S


@lru_cache(maxsize=4096)
def _read(data: bytes) -> Record | None:
    """A node meets the same record many times; its signature is checked once. What it says is not kept here."""
    try:
        return dataclasses.replace(read_record(data), body={}) if len(data) <= RECORD_BYTES_MAX else None
    except IntegrityError:
        return None


class _Token(NamedTuple):
    """One token: where what follows it begins, how many items it announces, and its extension type, if it has one."""

    end: int
    items: int = 0
    extension: int | None = None
    payload: int = 0


def is_modest(data: bytes, *, items_max: int) -> bool:
    """Whether `data` is one value, or one dictionary of hivemind's, of at most `items_max` items in all. An
    item counts where it is announced, and again where it is."""
    try:
        first = _token(data, 0)
        if first.extension is None:
            return _has_room(data, items_max)
        is_whole = first.extension == DICTIONARY_CODE and first.end == len(data)
        return is_whole and _has_room(data[first.payload :], items_max)
    except IndexError:  # it ends within a token
        return False


def _has_room(data: bytes, left: int) -> bool:
    """Whether `data` has no extension types and announces no more items than `left`."""
    position = 0
    while position < len(data):
        token = _token(data, position)
        left -= 1 + token.items
        if left < 0 or token.extension is not None:
            return False
        position = token.end
    return position == len(data)


# First byte: (bytes of the length, what it counts); and the sizes of what has no length.
_LENGTHS = {
    0xC4: (1, "bytes"),
    0xC5: (2, "bytes"),
    0xC6: (4, "bytes"),
    0xC7: (1, "extension"),
    0xC8: (2, "extension"),
    0xC9: (4, "extension"),
    0xD9: (1, "bytes"),
    0xDA: (2, "bytes"),
    0xDB: (4, "bytes"),
    0xDC: (2, "array"),
    0xDD: (4, "array"),
    0xDE: (2, "map"),
    0xDF: (4, "map"),
}
_FIXED = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


def _token(data: bytes, start: int) -> _Token:
    """The token at `start`; raises IndexError if `data` ends before it does."""
    kind, after = data[start], start + 1
    if kind in _LENGTHS:
        length_bytes, counts = _LENGTHS[kind]
        length = int.from_bytes(data[after : after + length_bytes], "big")
        return _sized(data, after + length_bytes, length, counts)
    if kind in _FIXED_EXTENSIONS:
        return _sized(data, after, _FIXED_EXTENSIONS[kind], "extension")
    if 0x80 <= kind <= 0x9F:
        return _sized(data, after, kind & 0x0F, "map" if kind < 0x90 else "array")
    return _sized(data, after, kind & 0x1F if 0xA0 <= kind <= 0xBF else _FIXED.get(kind, 0), "bytes")


def _sized(data: bytes, after: int, length: int, counts: str) -> _Token:
    if counts == "extension":
        token = _Token(after + 1 + length, extension=data[after], payload=after + 1)
    elif counts == "bytes":
        token = _Token(after + length)
    else:
        token = _Token(after, items=length if counts == "array" else 2 * length)
    if token.end > len(data):
        raise IndexError(token.end)
    return token
