from __future__ import annotations

import hashlib
from collections import Counter

import pytest

from dipaco_p2p.clock import ManualClock
from dipaco_p2p.protocol.records import sign_record
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.swarm.hivemind.guard import FOREIGN_BYTES_MAX, RecordGuard

ALICE, BOB = Signer(bytes([1]) * 32), Signer(bytes([2]) * 32)
KEY = "dipaco/test"
NOW_S = ManualClock().now_s()


def hash_key(key: str) -> bytes:
    return hashlib.sha1(key.encode()).digest()


@pytest.fixture
def guard() -> RecordGuard:
    return RecordGuard(clock=ManualClock(), ttl_max_s=60, hash_key=hash_key, counts=Counter())


def test_a_signed_record_is_kept_only_where_and_as_long_as_it_says(guard: RecordGuard) -> None:
    expires_s = NOW_S + 30
    data = sign_record(ALICE, key=KEY, counter=1, expires_s=expires_s, body={}).to_bytes()

    def allowed(key: str = KEY, owner: object = ALICE.peer, at_s: float = expires_s, value: object = data) -> bool:
        return guard.allows(hash_key(key), owner, value, size_bytes=len(data), expires_s=at_s)

    assert allowed()
    assert not allowed(key="dipaco/other")
    assert not allowed(owner=BOB.peer)
    assert not allowed(owner=None)
    assert not allowed(at_s=expires_s + 1)
    assert not allowed(at_s=expires_s - 1)


def test_a_record_beyond_the_longest_time_to_live_is_refused(guard: RecordGuard) -> None:
    for ahead_s, expected in [(60.0, True), (64.0, False), (1e9, False), (-1.0, False)]:
        data = sign_record(ALICE, key=KEY, counter=1, expires_s=NOW_S + ahead_s, body={}).to_bytes()
        at_s = NOW_S + ahead_s
        assert guard.allows(hash_key(KEY), ALICE.peer, data, size_bytes=len(data), expires_s=at_s) is expected


def test_foreign_values_are_kept_if_small_and_soon_over_and_not_under_our_keys(guard: RecordGuard) -> None:
    def allowed(value: object, *, size_bytes: int = 10, at_s: float = NOW_S + 30) -> bool:
        return guard.allows(hash_key(KEY), None, value, size_bytes=size_bytes, expires_s=at_s)

    assert allowed({"any": "thing"}) and allowed(b"bytes") and allowed(b"x", size_bytes=FOREIGN_BYTES_MAX)
    assert not allowed(b"x", size_bytes=FOREIGN_BYTES_MAX + 1)
    assert not allowed(b"x", at_s=NOW_S + 1e9)
    guard.know(KEY)
    assert not allowed({"any": "thing"})
