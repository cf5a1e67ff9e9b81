"""Our node's storage and the answers that it believes, without a network."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils.serializer import MSGPackSerializer

from dipaco_p2p.clock import SystemClock
from dipaco_p2p.protocol.records import Record, sign_record
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.swarm.hivemind import dht
from dipaco_p2p.swarm.hivemind.dht import (
    KEY_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    STORE_KEYS_MAX,
    SUBKEYS_MAX,
    Protocol,
    Storage,
    _parts,
    _Validator,
    hash_key,
    install,
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


def test_a_full_key_keeps_who_is_there_and_lets_them_renew() -> None:
    storage = Storage(new_guard())
    records = [entry(number, text="x" * 7000) for number in range(1, 250)]
    taken = [put(storage, record) for record in records]
    assert 0 < sum(taken) < 249 and not taken[-1] and all(taken[: sum(taken)])
    assert sum(len(item.value) for item in kept(storage).values()) <= KEY_BYTES_MAX
    assert put(storage, entry(1, life_s=40, text="y" * 7000)) and not put(storage, entry(500, text="x" * 7000))
    assert len(MSGPackSerializer.dumps(storage.get(place(KEY)).value)) < MESSAGE_BYTES_MAX


def test_in_a_full_key_an_honest_record_may_grow() -> None:
    storage = Storage(new_guard())
    assert put(storage, entry(1))
    while put(storage, entry(len(kept(storage)) + 1, text="x" * 2000)):
        pass
    assert put(storage, entry(1, life_s=40, text="x" * 900))


def test_small_records_are_bounded_in_number() -> None:
    storage = Storage(new_guard())
    for number in range(SUBKEYS_MAX + 10):
        storage.store_subkey(place(KEY), f"owner {number}", b"x", time.time() + 30)
    assert len(kept(storage)) == SUBKEYS_MAX


def test_keys_of_strangers_share_what_is_left_and_ours_have_room_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht, "FOREIGN_STORE_BYTES_MAX", 100_000)
    guard = new_guard()
    guard.know(KEY)
    storage = Storage(guard)
    taken = [put(storage, entry(1, text="x" * 5000), key=f"dipaco/{number}") for number in range(40)]
    assert 10 < sum(taken) < 20 and not taken[-1]
    assert storage.store(place("foreign"), bytes(1000), time.time() + 30) is False or sum(taken) < 20
    assert put(storage, entry(1, text="x" * 5000)), "our own key"


def test_what_expired_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht, "KEYS_MAX", 3)
    storage = Storage(new_guard())
    assert all([put(storage, entry(1, life_s=life_s), key=f"dipaco/{life_s}") for life_s in (0.05, 20.0, 30.0)])
    assert not put(storage, entry(1), key="dipaco/4")
    end_s = time.monotonic() + 5
    while not put(storage, entry(1), key="dipaco/4"):
        assert time.monotonic() < end_s


def test_renewals_leave_nothing_behind() -> None:
    storage = Storage(new_guard())
    for number in range(500):
        assert put(storage, entry(1, life_s=30 + number / 100))
    assert len(storage.expiration_heap) < 200 and len(storage.data[place(KEY)].value.expiration_heap) < 200


def judged(guard: RecordGuard, dictionary: DictionaryDHTValue) -> tuple[bool, set[str]]:
    protocol = Protocol(_initialized_with_create=True)
    protocol.record_validator = _Validator(guard)
    return protocol._validate_dictionary(hash_key(KEY), dictionary), set(dictionary.data)


def dictionary_of(*records: Record) -> DictionaryDHTValue:
    dictionary = DictionaryDHTValue()
    with dictionary.freeze():
        for record in records:
            dictionary.store(record.peer, MSGPackSerializer.dumps(record.to_bytes()), record.expires_s)
    return dictionary


def test_of_an_answer_the_good_is_believed_and_the_rest_left_out() -> None:
    good, expired, elsewhere = entry(1), entry(2, life_s=-1), entry(3, key="dipaco/y/peers")
    guard = new_guard()
    guard.know(KEY)
    assert judged(guard, dictionary_of(good, expired, elsewhere)) == (True, {good.peer})
    assert judged(guard, dictionary_of(expired))[0] is False


@pytest.mark.parametrize("data", [b"\xdd\x7f\xff\xff\xff", b"\xc7\x05\x40\x94\x90\x90\x90\x90"])
def test_hivemind_unpacks_nothing_that_is_not_modest(data: bytes) -> None:
    install()
    with pytest.raises(ValueError, match="too many items"):
        MSGPackSerializer.loads(data)


def test_a_refused_write_to_a_full_store_frees_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht, "FOREIGN_STORE_BYTES_MAX", 10_000)
    storage = Storage(new_guard())
    assert put(storage, entry(1, text="x" * 7000), key="dipaco/a")
    for number in range(2, 6):
        assert not put(storage, entry(number, text="x" * 7000), key="dipaco/a")
        assert not put(storage, entry(number, text="x" * 7000), key="dipaco/b")
    assert put(storage, entry(1, text="y" * 7000, life_s=40), key="dipaco/a")


def test_what_is_handed_over_goes_in_parts_that_fit_into_a_message() -> None:
    small, large = [b"x"] * 3000, [b"x" * 400_000] * 7
    full = dictionary_of(*(entry(number) for number in range(1, 500)))
    values = [*small, *large, full, full]
    parts = [values[part] for part in _parts(values)]
    assert [value for part in parts for value in part] == values
    assert max(map(len, parts)) <= STORE_KEYS_MAX
    assert all(len(MSGPackSerializer.dumps(part)) < MESSAGE_BYTES_MAX for part in parts)
