"""Lists of documents in a reply: as many as fit, and the asker asks again for what follows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..errors import IntegrityError
from ..protocol.decrees import Decree
from ..protocol.documents import Contribution, Grant, ModuleVersion, Receipt, Rejection, Sealed, Sharding, unseal
from ..protocol.gate import Appraisal
from ..protocol.judgement import Check, Judgement
from ..swarm.api import BODY_BYTES_MAX, Reply

ITEMS_BYTES_MAX = BODY_BYTES_MAX // 2
"""Of one page; a single document is at most 192 KiB, so a page always holds some."""

D = TypeVar("D", Appraisal, Check, Contribution, Decree, Grant, Judgement, ModuleVersion, Receipt, Rejection, Sharding)
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Page(Reply, Generic[P]):
    """Signed documents, as many as fit; the asker asks again for what follows, until a page is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPage:
    """A page of checks, as they came."""

    next: int | None = None
    """The number to go on with."""
    body: bytes
    """A page of checks."""


def items_reply(documents: Iterable[Sealed[D]]) -> Page[D]:
    """A page: the first of `documents`, as many as fit."""
    return stored_reply(sealed.to_bytes() for sealed in documents)


def stored_reply(stored: Iterable[bytes | None]) -> Page[D]:
    """The same of documents as they lie on our disk; None stands for one that is not there. They were checked before
    they came there, and the asker checks them: to do so for each asker would keep all others waiting half a second."""
    page: list[bytes] = []
    size = 0
    for data in stored:
        if data is not None:
            size += len(data) + 1
            if size > ITEMS_BYTES_MAX:
                break
            page.append(data)
    return Page({}, b"[" + b",".join(page) + b"]")


def read_items(kind: type[D], reply: Reply | CheckPage) -> list[Sealed[D]]:
    """The checked documents of a page; raises IntegrityError."""
    try:
        items = json.loads(reply.body)
    except (ValueError, RecursionError):
        raise IntegrityError(f"a page of {kind.KIND}s that is no JSON") from None
    if not isinstance(items, list):
        raise IntegrityError(f"a page of {kind.KIND}s that is no list")
    return [unseal(kind, item) for item in items]
