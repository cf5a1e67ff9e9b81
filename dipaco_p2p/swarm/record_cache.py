"""The records that one peer has seen and may still believe, and the counters of its own.

A DHT may lose a record before its time (a hostile sub-key with an early expiry shortens the life of all its
neighbours), so a reader keeps what it saw until the expiry that the owner signed. Memory is bounded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..clock import Clock
from ..errors import IntegrityError
from ..protocol.records import (
    KEY_BYTES_MAX,
    KEY_RECORDS_MAX,
    Record,
    check_record,
    newest,
    read_record,
    sign_record,
)
from ..protocol.signing import PeerId, Signer

KEYS_MAX = 4096
OWNERS_PER_KEY_MAX = KEY_RECORDS_MAX
KEY_RECORDS_BYTES_MAX = KEY_BYTES_MAX * 4 // 3
"""Of all records under one key: more than one node keeps, so that what honest nodes say finds room beside a hostile
one's. Owners that are there already stay, so that a crowd of newcomers ousts nobody."""
EXPIRY_STEP_S = 0.001


@dataclass(frozen=True, slots=True)
class _Held:
    """A record and the bytes that it came in, so that one that comes again is not checked again."""

    record: Record
    data: bytes


@dataclass(frozen=True, slots=True)
class _Row:
    """All under one key; it is never changed, another takes its place."""

    held: dict[PeerId, _Held]
    records: dict[PeerId, Record]
    until_s: float
    """The first of them expires then."""


_NOTHING = _Row({}, {}, math.inf)


class RecordCache:
    """Valid records by key and owner; `ttl_max_s` bounds how far ahead any may expire."""

    def __init__(self, *, clock: Clock, ttl_max_s: float, counts: Counter[str]) -> None:
        self._clock, self._ttl_max_s, self._counts = clock, ttl_max_s, counts
        self._rows: dict[str, _Row] = {}
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
        ours = _Held(record, record.to_bytes())
        self._keep(key, [ours], {signer.peer: ours} | self._live(key))  # first, so that there is room for it
        return record

    def admit(self, key: str, owner_and_data: Iterable[tuple[object, bytes]]) -> int:
        """Keep the good among what is said to be under `key`, and return their number; count the rest as refused."""
        now_s, good, count = self._clock.now_s(), [], 0
        known = self._live(key)
        for owner, data in owner_and_data:
            count += 1
            if isinstance(owner, str) and (mine := known.get(PeerId(owner))) is not None and mine.data == data:
                continue
            try:
                record = read_record(data)
                if record.peer != owner:
                    raise IntegrityError(f"a record of {record.peer} was stored in the name of {str(owner)[:64]}")
                check_record(record, key=key, now_s=now_s, ttl_max_s=self._ttl_max_s)
                good.append(_Held(record, data))
            except IntegrityError:
                self._counts["records_refused"] += 1
                count -= 1
        if good:
            self._keep(key, good, dict(known))
        return count

    def lacking(self, key: str, other: RecordCache) -> list[tuple[PeerId, bytes]]:
        """What `other` has under `key` by its clock and we have not, by its owner."""
        mine, theirs = self._live(key), other._live(key)
        return [(peer, one.data) for peer, one in theirs.items() if peer not in mine or mine[peer].data != one.data]

    def version(self, key: str) -> object:
        """Something that is another when something new has come under `key`."""
        return self._rows.get(key)

    def live(self, key: str) -> Mapping[PeerId, Record]:
        """The newest record of each owner under `key` that has not expired."""
        row, now_s = self._rows.get(key, _NOTHING), self._clock.now_s()
        if now_s < row.until_s:
            return row.records
        return {peer: record for peer, record in row.records.items() if record.expires_s > now_s}

    def read(self, key: str) -> dict[PeerId, Record]:
        """As `live`, in a mapping of the caller's own, counted as one read of the key."""
        found = dict(self.live(key))
        self._counts["keys_read"] += 1
        self._counts["records_read"] += len(found)
        return found

    def _live(self, key: str) -> dict[PeerId, _Held]:
        row, now_s = self._rows.get(key, _NOTHING), self._clock.now_s()
        if now_s < row.until_s:
            return row.held
        return {peer: one for peer, one in row.held.items() if one.record.expires_s > now_s}

    def _keep(self, key: str, fresh: Iterable[_Held], held: dict[PeerId, _Held]) -> None:
        """Put `fresh` among `held`, which is ours from now on."""
        for one in fresh:
            old = held.get(one.record.peer)
            if old is None or newest([old.record, one.record])[one.record.peer] is one.record:
                held[one.record.peer] = one
        kept: dict[PeerId, _Held] = {}
        left_bytes = KEY_RECORDS_BYTES_MAX
        for peer, one in held.items():
            if len(one.data) <= left_bytes and len(kept) < OWNERS_PER_KEY_MAX:
                kept[peer] = one
                left_bytes -= len(one.data)
        self._rows.pop(key, None)
        if kept:
            records = {peer: one.record for peer, one in kept.items()}
            self._rows[key] = _Row(kept, records, min(record.expires_s for record in records.values()))
        while len(self._rows) > KEYS_MAX:
            del self._rows[next(iter(self._rows))]
