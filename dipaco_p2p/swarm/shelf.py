"""The records that one peer has seen and may still believe, and the counters of its own.

A DHT may lose a record before its time (a hostile sub-key with an early expiry shortens the life of all its
neighbours), so a reader keeps what it saw until the expiry that the owner signed. Memory is bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from ..clock import Clock
from ..errors import IntegrityError
from ..protocol.records import Record, check_record, newest, read_record, sign_record
from ..protocol.signing import PeerId, Signer

KEYS_MAX = 4096
OWNERS_PER_KEY_MAX = 1024
EXPIRY_STEP_S = 0.001


class Shelf:
    """Valid records by key and owner; `ttl_max_s` bounds how far ahead any may expire."""

    def __init__(self, *, clock: Clock, ttl_max_s: float, counts: Counter[str]) -> None:
        self._clock, self._ttl_max_s, self._counts = clock, ttl_max_s, counts
        self._records: dict[str, dict[PeerId, Record]] = {}
        self._counter = 0

    def sign(self, signer: Signer, key: str, body: dict[str, Any], *, ttl_s: float) -> Record:
        """A new record of ours, on the shelf; its counter is above every earlier one, also of an earlier process.

        It never expires before the one that it replaces: in the DHT the later expiry wins, whatever the counter.
        """
        assert 0 < ttl_s <= self._ttl_max_s, f"a time to live of {ttl_s} s; at most {self._ttl_max_s} s is allowed"
        now_s = self._clock.now_s()
        self._counter = max(self._counter + 1, int(now_s * 1000))
        before = self.live(key).get(signer.peer)
        expires_s = max(now_s + ttl_s, before.expires_s + EXPIRY_STEP_S if before else 0.0)
        record = sign_record(signer, key=key, counter=self._counter, expires_s=expires_s, body=body)
        self._keep(key, [record])
        return record

    def admit(self, key: str, owner_and_data: Iterable[tuple[object, bytes]]) -> int:
        """Keep the good among what is said to be under `key`, and return their number; count the rest as refused."""
        now_s, good = self._clock.now_s(), []
        for owner, data in owner_and_data:
            try:
                good.append(checked(data, key=key, owner=owner, now_s=now_s, ttl_max_s=self._ttl_max_s))
            except IntegrityError:
                self._counts["records_refused"] += 1
        self._keep(key, good)
        return len(good)

    def live(self, key: str) -> dict[PeerId, Record]:
        """The newest record of each owner under `key` that has not expired."""
        now_s = self._clock.now_s()
        return {peer: record for peer, record in self._records.get(key, {}).items() if record.expires_s > now_s}

    def _keep(self, key: str, records: Iterable[Record]) -> None:
        merged = newest([*self.live(key).values(), *records])
        self._records.pop(key, None)
        if merged:
            self._records[key] = dict(list(merged.items())[:OWNERS_PER_KEY_MAX])
        while len(self._records) > KEYS_MAX:
            del self._records[next(iter(self._records))]


def checked(data: bytes, *, key: str, owner: object, now_s: float, ttl_max_s: float) -> Record:
    """The record that `data` says, if it may stand under `key` and sub-key `owner`; raises IntegrityError."""
    record = read_record(data)
    if record.peer != owner:
        raise IntegrityError(f"a record of {record.peer} was stored in the name of {str(owner)[:64]}")
    check_record(record, key=key, now_s=now_s, ttl_max_s=ttl_max_s)
    return record
