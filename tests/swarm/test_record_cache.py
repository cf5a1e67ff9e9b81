"""What a reader keeps of the records that it has seen: bounded, those that came first, and checked once."""

from __future__ import annotations

from collections import Counter

import pytest

from dipaco_p2p.clock import ManualClock
from dipaco_p2p.protocol.records import Record, sign_record
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.swarm import record_cache as shelf_module
from dipaco_p2p.swarm.record_cache import KEY_RECORDS_BYTES_MAX, RecordCache

KEY = "dipaco/x/peers"
NOW_S = 1000.0


def record(number: int, *, counter: int = 1, text: str = "", expires_s: float = NOW_S + 20) -> Record:
    signer = Signer(number.to_bytes(32, "big"))
    return sign_record(signer, key=KEY, counter=counter, expires_s=expires_s, body={"text": text})


@pytest.fixture
def shelf() -> RecordCache:
    return RecordCache(clock=ManualClock(NOW_S), ttl_max_s=60, counts=Counter())


def admit(shelf: RecordCache, *records: Record) -> int:
    return shelf.admit(KEY, [(one.peer, one.to_bytes()) for one in records])


def test_who_came_first_stays_when_a_crowd_comes(shelf: RecordCache) -> None:
    honest = [record(number) for number in range(1, 6)]
    admit(shelf, *honest)
    admit(shelf, *(record(number, text="x" * 7000) for number in range(10, 400)))
    live = shelf.live(KEY)
    assert {one.peer for one in honest} <= live.keys() and len(live) < 395
    assert sum(len(one.to_bytes()) for one in live.values()) <= KEY_RECORDS_BYTES_MAX
    admit(shelf, record(1, counter=2))
    assert shelf.live(KEY)[honest[0].peer].counter == 2


def test_our_own_record_finds_room_in_a_full_shelf(shelf: RecordCache) -> None:
    admit(shelf, *(record(number, text="x" * 7000) for number in range(10, 400)))
    ours = Signer(bytes([9]) * 32)
    shelf.sign(ours, KEY, {"text": "ours"}, ttl_s=20)
    assert shelf.live(KEY)[ours.peer].body == {"text": "ours"}


def test_a_record_that_comes_again_is_not_checked_again(shelf: RecordCache, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [record(number) for number in range(1, 6)]
    admit(shelf, *records)
    checked = []
    check = shelf_module.checked
    monkeypatch.setattr(shelf_module, "checked", lambda data, **rest: checked.append(data) or check(data, **rest))
    assert admit(shelf, *records, record(6)) == 6
    assert checked == [record(6).to_bytes()]


def test_the_bytes_of_one_owner_do_not_pass_under_the_name_of_another(shelf: RecordCache) -> None:
    one, other = record(1), record(2)
    admit(shelf, one)
    assert shelf.admit(KEY, [(other.peer, one.to_bytes()), (None, one.to_bytes()), (["x"], one.to_bytes())]) == 0
