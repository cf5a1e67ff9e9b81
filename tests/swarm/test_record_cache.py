"""What a reader keeps of the records that it has seen: bounded, those that came first, and checked once."""

from __future__ import annotations

from collections import Counter

import pytest

from dipaco_p2p.clock import ManualClock
from dipaco_p2p.protocol.records import Record, sign_record
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.swarm import record_cache
from dipaco_p2p.swarm.record_cache import KEY_RECORDS_BYTES_MAX, RecordCache

KEY = "dipaco/x/peers"
NOW_S = 1000.0


def record(number: int, *, counter: int = 1, text: str = "", expires_s: float = NOW_S + 20) -> Record:
    signer = Signer(number.to_bytes(32, "big"))
    return sign_record(signer, key=KEY, counter=counter, expires_s=expires_s, body={"text": text})


@pytest.fixture
def cache() -> RecordCache:
    return RecordCache(clock=ManualClock(NOW_S), ttl_max_s=60, counts=Counter())


def admit(cache: RecordCache, *records: Record) -> int:
    return cache.admit(KEY, [(one.peer, one.to_bytes()) for one in records])


def test_who_came_first_stays_when_a_crowd_comes(cache: RecordCache) -> None:
    honest = [record(number) for number in range(1, 6)]
    admit(cache, *honest)
    admit(cache, *(record(number, text="x" * 7000) for number in range(10, 400)))
    live = cache.live(KEY)
    assert {one.peer for one in honest} <= live.keys() and len(live) < 395
    assert sum(len(one.to_bytes()) for one in live.values()) <= KEY_RECORDS_BYTES_MAX
    admit(cache, record(1, counter=2))
    assert cache.live(KEY)[honest[0].peer].counter == 2


def test_our_own_record_finds_room_in_a_full_shelf(cache: RecordCache) -> None:
    admit(cache, *(record(number, text="x" * 7000) for number in range(10, 400)))
    ours = Signer(bytes([9]) * 32)
    cache.sign(ours, KEY, {"text": "ours"}, ttl_s=20)
    assert cache.live(KEY)[ours.peer].body == {"text": "ours"}


def test_a_record_that_comes_again_is_not_checked_again(cache: RecordCache, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [record(number) for number in range(1, 6)]
    admit(cache, *records)
    checked, read = [], record_cache.read_record
    monkeypatch.setattr(record_cache, "read_record", lambda data: checked.append(data) or read(data))
    assert admit(cache, *records, record(6)) == 6
    assert checked == [record(6).to_bytes()]


def test_the_bytes_of_one_owner_do_not_pass_under_the_name_of_another(cache: RecordCache) -> None:
    one, other = record(1), record(2)
    admit(cache, one)
    assert cache.admit(KEY, [(other.peer, one.to_bytes()), (None, one.to_bytes()), (["x"], one.to_bytes())]) == 0
