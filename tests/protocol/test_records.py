"""Records of the DHT: signed, bounded, expiring; and their keys, as documented and different for different things."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco_p2p.canonical import canonical_bytes, digest
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.protocol.records import (
    PREFIX,
    RECORD_BYTES_MAX,
    Record,
    check_record,
    claims_key,
    heads_key,
    newest,
    peers_key,
    read_record,
    sign_record,
)
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.topology import ModuleId, PathId, Topology

ALICE, BOB = Signer(bytes([1]) * 32), Signer(bytes([2]) * 32)
NOW_S = 1_000_000.0


def record_of(signer: Signer = ALICE, *, counter: int = 1, expires_s: float = NOW_S + 10, **body: object) -> Record:
    return sign_record(signer, key="dipaco/test", counter=counter, expires_s=expires_s, body=body)


def test_a_record_reads_back() -> None:
    record = record_of(path=3, note="ü")
    assert read_record(record.to_bytes()) == record


@pytest.mark.parametrize(
    "change",
    [
        {"key": "dipaco/other"},
        {"peer": BOB.peer},
        {"counter": 2},
        {"expires_s": NOW_S + 11},
        {"body": {"path": 4}},
        {"signature": "0" * 128},
        {"signature": ""},
    ],
)
def test_any_change_breaks_the_signature(change: dict[str, object]) -> None:
    forged = dataclasses.replace(record_of(path=3), **change)
    with pytest.raises(IntegrityError, match="not signed"):
        read_record(forged.to_bytes())


@pytest.mark.parametrize(
    "change",
    [
        {"counter": True},
        {"counter": -1},
        {"counter": 2**63},
        {"counter": 1.0},
        {"expires_s": 5},
        {"body": []},
        {"key": ""},
        {"key": "a" * 129},
        {"key": "é"},
        {"peer": None},
        {"extra": 1},
    ],
)
def test_wrong_types_and_fields_are_refused(change: dict[str, object]) -> None:
    plain = json.loads(record_of().to_bytes()) | change
    with pytest.raises(IntegrityError):
        read_record(canonical_bytes(plain))


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        read_record(data)


def test_a_record_that_is_too_large_is_refused_unread() -> None:
    with pytest.raises(IntegrityError, match="at most"):
        read_record(b"[" * (RECORD_BYTES_MAX + 1))


def test_a_record_is_bound_to_its_key_and_time() -> None:
    record = record_of()
    check_record(record, key="dipaco/test", now_s=NOW_S, ttl_max_s=10)
    for key, now_s, ttl_max_s, why in [
        ("dipaco/other", NOW_S, 10, "found under"),
        ("dipaco/test", NOW_S + 10, 10, "expired"),
        ("dipaco/test", NOW_S - 4, 10, "wants to live"),
        ("dipaco/test", NOW_S, 6, "wants to live"),
    ]:
        with pytest.raises(IntegrityError, match=why):
            check_record(record, key=key, now_s=now_s, ttl_max_s=ttl_max_s)


def test_newest_takes_the_greatest_counter_of_each_owner_in_any_order() -> None:
    records = [record_of(counter=1), record_of(counter=3), record_of(counter=2), record_of(BOB, counter=1)]
    twins = [record_of(counter=3, note="a"), record_of(counter=3, note="b")]
    expected = newest(records + twins)
    assert newest(reversed(records + twins)) == expected
    assert expected[ALICE.peer].counter == 3 and expected[BOB.peer].counter == 1


RUN, OTHER_RUN = digest(b"run"), digest(b"other run")


def keys(run: str, grid: Topology) -> list[str]:
    claims = [claims_key(run, path) for path in grid.paths()]
    return [peers_key(run), *claims, *(heads_key(run, module) for module in grid.modules())]


def test_keys_are_written_as_documented() -> None:
    assert peers_key(RUN) == f"dipaco/{RUN[:16]}/peers"
    assert claims_key(RUN, PathId((0, 1, 1))) == f"dipaco/{RUN[:16]}/claims/P0-1-1"
    assert heads_key(RUN, ModuleId(1, 0)) == f"dipaco/{RUN[:16]}/heads/L1.M0"


def test_no_two_things_share_a_key() -> None:
    grid = Topology((1, 12, 12))
    found = keys(RUN, grid) + keys(OTHER_RUN, grid)
    assert len(set(found)) == len(found) == 2 * (1 + 144 + 25)
    assert all(key.startswith(PREFIX) for key in found)


def test_the_longest_key_fits_a_record() -> None:
    deepest = PathId((999,) * 20)
    assert sign_record(Signer(bytes(32)), key=claims_key(RUN, deepest), counter=0, expires_s=1.0, body={})
