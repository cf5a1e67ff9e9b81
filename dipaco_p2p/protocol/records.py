"""Signed records of the DHT: small, expiring, and believed only as far as their signature reaches.

A record is soft state (design, section 4.1): a key, its owner, a counter that only grows, an expiry, and a body of
plain JSON. Readers take the greatest counter of an owner; nobody can write in another's name, prolong a record, or
move it to another key, since all of these are signed. Keys are sharded by path, by module, and by the bucket of a peer
(neighbours.py), so that none grows with the swarm; `<run>` is the first 16 digits of the run's id:

    dipaco/<run>/peers              one heartbeat per live peer, in a swarm of one bucket
    dipaco/<run>/peers/0110         one per live peer of this bucket
    dipaco/<run>/peer/<id>          the heartbeat of this one, in a swarm of several
    dipaco/<run>/claims/P0-1-1      one claim per volunteer that trains this path
    dipaco/<run>/heads/L1.M0        one head per leader of this module
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..canonical import canonical_bytes, read_canonical
from ..errors import IntegrityError
from ..topology import ModuleId, PathId
from .signing import PeerId, Signer, verify

PREFIX = "dipaco/"
RECORD_BYTES_MAX = 8 * 1024
RECORD_VALUES_MAX = 256
"""Of the JSON values in a record, more or less: thousands of empty lists fit into its bytes, each fifty in memory."""
KEY_RECORDS_MAX = 300
KEY_BYTES_MAX = 256 * 1024
"""Of all records that a node keeps under one key: what is bucketed splits long before (neighbours.py)."""
KEY_CHARS_MAX = 128
COUNTER_MAX = 2**63 - 1
CLOCK_SKEW_MAX_S = 3.0
TTL_MAX_S = 3600.0
"""Longest life of a record that a node keeps for others, before it knows the run's own."""
_KIND = "record"
_TYPES: dict[str, type] = {
    "key": str,
    "peer": str,
    "counter": int,
    "expires_s": float,
    "body": dict,
    "signature": str,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What `peer` says under `key` until `expires_s` (seconds since the epoch)."""

    key: str
    peer: PeerId
    counter: int
    expires_s: float
    body: dict[str, Any]
    signature: str

    def to_bytes(self) -> bytes:
        """The canonical JSON that goes over the wire."""
        return canonical_bytes({name: getattr(self, name) for name in _TYPES})


def sign_record(signer: Signer, *, key: str, counter: int, expires_s: float, body: dict[str, Any]) -> Record:
    """A record of `signer`. Its key, counter and size are the programmer's to keep within bounds."""
    assert _is_key(key), f"a key is up to {KEY_CHARS_MAX} printable ASCII characters: {key!r}"
    assert 0 <= counter <= COUNTER_MAX and math.isfinite(expires_s)
    bare = Record(key=key, peer=signer.peer, counter=counter, expires_s=float(expires_s), body=body, signature="")
    record = dataclasses.replace(bare, signature=signer.sign(_KIND, _signed_part(bare)))
    size_bytes = len(record.to_bytes())
    assert size_bytes <= RECORD_BYTES_MAX, f"the record under {key} would have {size_bytes} bytes"
    return record


def read_record(data: bytes) -> Record:
    """The record that `data` says; raises IntegrityError for a wrong size, form, type or signature."""
    if len(data) > RECORD_BYTES_MAX:
        raise IntegrityError(f"a record of {len(data)} bytes; at most {RECORD_BYTES_MAX} are allowed")
    if sum(map(data.count, (b",", b"[", b"{"))) > RECORD_VALUES_MAX:
        raise IntegrityError(f"a record of more than {RECORD_VALUES_MAX} values")
    record = _from_plain(read_canonical(data))
    if not verify(record.peer, _KIND, _signed_part(record), record.signature):
        raise IntegrityError(f"the record under {record.key} is not signed by its owner {record.peer[:64]}")
    return record


def check_record(record: Record, *, key: str, now_s: float, ttl_max_s: float) -> None:
    """Raises IntegrityError unless `record` belongs under `key` and lives now, but not beyond `ttl_max_s` from now.

    The bound on the expiry keeps a hostile or badly set clock from blocking a key for ever.
    """
    if record.key != key:
        raise IntegrityError(f"a record of {record.key} was found under {key}")
    if "/peer/" in key and key.rpartition("/")[2] != record.peer:
        raise IntegrityError(f"a record of {record.peer} was found under {key}, which is another's")
    if record.expires_s <= now_s:
        raise IntegrityError(f"the record under {key} expired {now_s - record.expires_s:.1f} s ago")
    if record.expires_s > now_s + ttl_max_s + CLOCK_SKEW_MAX_S:
        excess_s = record.expires_s - now_s
        raise IntegrityError(f"the record under {key} wants to live {excess_s:.0f} s; {ttl_max_s:.0f} s is the most")


def newest(records: Iterable[Record]) -> dict[PeerId, Record]:
    """The record with the greatest counter of each owner.

    Of two with the same counter (an owner that contradicts itself) all readers keep the one with the greater signature.
    """
    best: dict[PeerId, Record] = {}
    for record in records:
        held = best.get(record.peer)
        if held is None or (record.counter, record.signature) > (held.counter, held.signature):
            best[record.peer] = record
    return best


def _is_key(key: object) -> bool:
    return isinstance(key, str) and 0 < len(key) <= KEY_CHARS_MAX and key.isascii() and key.isprintable()


def _signed_part(record: Record) -> bytes:
    return canonical_bytes({name: getattr(record, name) for name in _TYPES if name != "signature"})


def _from_plain(value: object) -> Record:
    if not isinstance(value, dict) or value.keys() != _TYPES.keys():
        raise IntegrityError("a record must have exactly the fields " + ", ".join(_TYPES))
    for name, kind in _TYPES.items():
        if type(value[name]) is not kind:
            raise IntegrityError(f"`{name}` of a record must be {kind.__name__}, not {type(value[name]).__name__}")
    if not _is_key(value["key"]):
        raise IntegrityError(f"`key` of a record must be up to {KEY_CHARS_MAX} printable ASCII characters")
    if not 0 <= value["counter"] <= COUNTER_MAX:
        raise IntegrityError(f"`counter` of a record is out of range: {value['counter']}")
    return Record(**value)


def peers_key(run: str, bucket: str = "") -> str:
    return f"{PREFIX}{run[:16]}/peers/{bucket}" if bucket else f"{PREFIX}{run[:16]}/peers"


def peer_key(run: str, peer: PeerId) -> str:
    return f"{PREFIX}{run[:16]}/peer/{peer}"


def claims_key(run: str, path: PathId) -> str:
    return f"{PREFIX}{run[:16]}/claims/{path}"


def heads_key(run: str, module: ModuleId) -> str:
    return f"{PREFIX}{run[:16]}/heads/{module}"
