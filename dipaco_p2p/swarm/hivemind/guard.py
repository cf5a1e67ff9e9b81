"""What a DHT node of ours stores and believes: the checks that need no DHT.

A node sees only the hash of a key. So a value that claims to be one of our records must name the key that hashes to
it; anything else is taken for the metadata of a foreign program, and kept only if it is small and short-lived, and
never under a key that we know to be ours.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import lru_cache

from ...clock import Clock
from ...errors import IntegrityError
from ...protocol.records import CLOCK_SKEW_MAX_S, RECORD_BYTES_MAX, Record, check_record, read_record

KEY_PREFIX = "dipaco/"
FOREIGN_BYTES_MAX = 1024
KNOWN_KEYS_MAX = 8192


class RecordGuard:
    """Judges values offered to, or found by, our node. `hash_key` is the DHT's own hash of a key."""

    def __init__(
        self, *, clock: Clock, ttl_max_s: float, hash_key: Callable[[str], bytes], counts: Counter[str]
    ) -> None:
        self._clock, self._ttl_max_s, self._hash_key, self._counts = clock, ttl_max_s, hash_key, counts
        self._known: dict[bytes, str] = {}

    def know(self, key: str) -> None:
        """Remember a key of ours: only signed records are let in under it."""
        assert key.startswith(KEY_PREFIX), f"keys of ours begin with {KEY_PREFIX}: {key}"
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
        if record is not None and record.key.startswith(KEY_PREFIX):
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
