"""One way to write a value as bytes, so that a digest or a signature means the same everywhere.

Canonical bytes are JSON in UTF-8 with sorted keys and no spaces. Only None, bool, int, finite float, str, list
and dict with string keys are allowed. Python writes the shortest decimal that reads back as the same float, so
equal floats give equal bytes. Bytes values travel as lower-case hex.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from .errors import IntegrityError

DIGEST_CHARS = 64
_DIGITS = frozenset("0123456789abcdef")
_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical_bytes(value: Any) -> bytes:
    """The canonical bytes of `value`; raises ValueError or TypeError for what JSON cannot say (NaN, sets, ...)."""
    return _JSON.encode(value).encode()


def read_canonical(data: bytes) -> Any:
    """The value that `data` says; raises IntegrityError if `data` is not the canonical form of anything.

    Refusing other spellings of a value keeps one value from having two digests.
    """
    try:
        value = json.loads(data)
        same = canonical_bytes(value) == data
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"not canonical JSON: {error}") from None
    if not same:
        raise IntegrityError("JSON that is not in canonical form")
    return value


Parts = Sequence[bytes | memoryview]
"""Bytes in parts, one after the other, so that large ones need not be copied into one. A part has one dimension."""


def digest(*parts: bytes | bytearray | memoryview) -> str:
    """SHA-256 of the exact bytes, as 64 lower-case hex digits: the name of a blob."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def is_digest(text: object) -> bool:
    """Whether `text` has the form of a digest."""
    return isinstance(text, str) and len(text) == DIGEST_CHARS and _DIGITS.issuperset(text)
