"""Why a record was not believed, and how often. Such a record is counted here, and is neither stored nor shown.

The same record again is not counted again, as far as it is remembered: a peer that repeats a forgery with every answer
does not make the figure meaningless.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from enum import StrEnum
from typing import TypeVar

from dipaco_p2p import strict
from dipaco_p2p.canonical import canonical_bytes, digest
from dipaco_p2p.errors import ConfigError, IntegrityError
from dipaco_p2p.protocol.documents import (
    DOCUMENT_BYTES_MAX,
    Contribution,
    Grant,
    ModuleVersion,
    Receipt,
    Rejection,
    Sealed,
    unseal,
)
from dipaco_p2p.protocol.judgement import Check, Judgement

REMEMBERED_MAX = 4096
PAGE_ITEMS_MAX = 8192
"""Of one answer: far more than the smallest documents that fit into a body."""

D = TypeVar("D", Check, Contribution, Grant, Judgement, ModuleVersion, Receipt, Rejection)


class Reason(StrEnum):
    """Why a record was refused."""

    OVERSIZED = "oversized"
    MALFORMED = "malformed"
    SIGNATURE = "bad-signature"
    RUN = "another-run"
    MODULE = "another-module"
    AUTHOR = "wrong-author"
    """Signed by a peer that may not say this."""
    SUCCESSOR = "does-not-follow"
    """A version that does not follow its parent, or counts what must not count."""
    FINAL = "contradicts-final"
    """A version in place of one that the coordinator has signed."""
    LEADER = "unknown-leader"
    """A version, not final, by a peer that no mandate names."""
    IDENTITY = "not-the-one-named"
    """A contribution that no version names, or not as the version says."""
    AGAIN = "said-otherwise-before"
    """A second measurement of a path and round by the same peer."""
    TOO_MANY = "too-many"
    """More notes or measurements of one round than there may be."""


class Refusals:
    """Counts by reason."""

    def __init__(self, counts: dict[str, int] | None = None) -> None:
        self.counts: Counter[str] = Counter(counts or {})
        self._seen: OrderedDict[str, None] = OrderedDict()

    def note(self, reason: Reason, record: object) -> None:
        """Count it, unless this very record was counted lately; `record` may be anything."""
        key = f"{reason} {_print_of(record)}"
        if key not in self._seen:
            self.counts[reason] += 1
            self._seen[key] = None
            if len(self._seen) > REMEMBERED_MAX:
                self._seen.popitem(last=False)

    def read_page(self, kind: type[D], body: bytes) -> list[Sealed[D]]:
        """The sound documents of an answer; the others are counted."""
        try:
            items = json.loads(body)
        except (ValueError, RecursionError):
            items = None
        if not isinstance(items, list) or len(items) > PAGE_ITEMS_MAX:
            self.note(Reason.MALFORMED, body)
            return []
        return [sealed for item in items if (sealed := self.read(kind, item)) is not None]

    def read(self, kind: type[D], item: object) -> Sealed[D] | None:
        """One document; None for anything else, which is counted."""
        try:
            return unseal(kind, item)
        except IntegrityError:
            self.note(_reason(kind, item), item)
            return None


def _reason(kind: type[D], item: object) -> Reason:
    """What is wrong with something that `unseal` refused."""
    document = item.get("document") if isinstance(item, dict) else None
    try:
        if len(canonical_bytes(document)) > DOCUMENT_BYTES_MAX:
            return Reason.OVERSIZED
        strict.load(kind, document, where="this record")
    except (ConfigError, ValueError, TypeError, RecursionError):
        return Reason.MALFORMED
    return Reason.SIGNATURE


def _print_of(record: object) -> str:
    if isinstance(record, bytes):
        return digest(record)
    try:
        return digest(canonical_bytes(record))
    except (ValueError, TypeError, RecursionError):
        return "not even JSON"
