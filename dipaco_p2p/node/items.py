"""Lists of documents in a reply: as many as fit, and the asker asks again for what follows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..errors import IntegrityError
from ..protocol.decrees import Decree
from ..protocol.documents import Contribution, Grant, ModuleVersion, Receipt, Rejection, Sealed, Sharding, unseal
from ..protocol.gate import Appraisal
from ..protocol.judgement import Check, Judgement
from ..protocol.signing import PeerId
from ..swarm.api import BODY_BYTES_MAX, Reply

ITEMS_BYTES_MAX = BODY_BYTES_MAX // 2
"""Of one page; a single document is at most 192 KiB, so a page always holds some."""

PAGE_BYTES_MAX = ITEMS_BYTES_MAX + len(b"[]")

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


async def read_items(
    kind: type[D], reply: Reply | CheckPage, *, author: PeerId | None = None, most: int | None = None
) -> list[Sealed[D]]:
    """The checked documents of a page: no more than `most`, and all of `author`, where these are given. Raises
    IntegrityError. Others run meanwhile: to check all that fits into a page takes seconds, and anybody sends one."""
    if len(reply.body) > PAGE_BYTES_MAX:
        raise IntegrityError(f"a page of {len(reply.body)} bytes, limit {PAGE_BYTES_MAX}")
    try:
        items = json.loads(reply.body)
    except (ValueError, RecursionError):
        raise IntegrityError(f"a page of {kind.KIND}s that is no JSON") from None
    if not isinstance(items, list):
        raise IntegrityError(f"a page of {kind.KIND}s that is no list")
    if most is not None and len(items) > most:
        raise IntegrityError(f"a page of {len(items)} {kind.KIND}s, limit {most}")
    found: list[Sealed[D]] = []
    for item in items:
        await asyncio.sleep(0)
        if author is not None and _said_author(item) != author:  # before its signature is checked
            raise IntegrityError(f"a {kind.KIND} that is not of {author}")
        found.append(unseal(kind, item))
    return found


def _said_author(item: object) -> object:
    document = item.get("document") if isinstance(item, dict) else None
    return document.get("author") if isinstance(document, dict) else None
