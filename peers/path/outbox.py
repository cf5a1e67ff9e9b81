"""What a volunteer keeps on its disk of its own, so that after any end it goes on where it stood.

    state-<path>.json      the path's inner states: moments and error feedback (states.py)
    version-, open-*.json  the chains of the modules that it trains, mirrors or leads, and the newest parameters;
                           so that a restart fetches only what is newer (owner/chain.py)
    outbox/                contributions whose push has begun and has not ended: a restart pushes them again, which is
                           the same contribution and counts once
    receipts.jsonl         what leaders signed for, the newest last

There is no data cursor: a round's batches follow from the path, the round and the part of the shard alone. Everything
is written before it is needed, whole or not at all, and bounded. Whatever the disk has changed is found by a digest or
a signature, said in one line, and then is as if it had never been there.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from dipaco_p2p import strict
from dipaco_p2p.canonical import canonical_bytes, digest
from dipaco_p2p.errors import ConfigError, DipacoError, EnvironmentUnfit, IntegrityError
from dipaco_p2p.node.node import Member
from dipaco_p2p.node.store import Store
from dipaco_p2p.program.files import disk, write_atomically
from dipaco_p2p.protocol.documents import Contribution, Receipt, Sealed, unseal

log = logging.getLogger(__name__)

RECEIPTS_MAX = 4096


# -- documents that say whether they are whole


def write_checked(store: Store, name: str, body: Any) -> None:
    """Keep plain values under `name`, with their digest."""
    store.write_document(name, canonical_bytes({"body": body, "digest": digest(canonical_bytes(body))}))


def read_checked(store: Store, name: str) -> Any:
    """What was kept; None without it, and for what the disk has changed, which is dropped."""
    data = store.read_document(name)
    if data is None:
        return None
    try:
        found = json.loads(data)
        if found["digest"] == digest(canonical_bytes(found["body"])):
            return found["body"]
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    log.warning("%s.json was damaged on disk; we go on without it", name)
    store.drop_document(name)
    return None


# -- contributions on their way


class Outbox:
    """At most one contribution per module, since the next one is made when the push of the last has ended."""

    def __init__(self, node: Member) -> None:
        self._store = Store(node.store.folder / "outbox")
        self._store.drop_unnamed()
        self._run = node.run.id

    def add(self, contribution: Contribution, payload: bytes) -> None:
        """Its push begins. Raises EnvironmentUnfit."""
        self._store.keep(contribution.payload, payload)
        write_checked(self._store, str(contribution.module), strict.plain(contribution))

    def remove(self, contribution: Contribution) -> None:
        """There is a receipt, or a reason why there will be none."""
        self._store.drop_document(str(contribution.module))
        self._store.drop(contribution.payload.digest)

    def waiting(self) -> list[tuple[Contribution, bytes]]:
        """What an earlier process did not bring to its end; what was damaged is dropped."""
        found = []
        for name in self._store.documents(""):
            body = read_checked(self._store, name)
            try:
                contribution = None if body is None else strict.load(Contribution, body, where=f"{name} in the outbox")
                payload = None if contribution is None else self._store.get(contribution.payload.digest)
            except (ConfigError, IntegrityError) as error:
                log.warning("the contribution to %s that was on its way is lost: %s", name, error)
                contribution, payload = None, None
            if contribution is not None and payload is not None and contribution.run == self._run:
                found.append((contribution, payload))
            else:
                self._store.drop_document(name)
        _drop_others(self._store, {contribution.payload.digest for contribution, _ in found})
        return found


def _drop_others(store: Store, names: set[str]) -> None:
    """Drop the blobs of `store` that nothing names."""
    for path in (store.folder / "blobs").glob("*/*"):
        if path.name not in names:
            store.drop(path.name)


# -- receipts


class Receipts:
    """What leaders signed for, one JSON line each: the proof that a contribution has to be on the chain."""

    def __init__(self, node: Member) -> None:
        self._path = node.store.folder / "receipts.jsonl"
        self._is_whole = True
        """Whether the file is what it should be: the next receipt mends one that is not."""
        self.sealed: list[Sealed[Receipt]] = self._load()

    def add(self, sealed: Sealed[Receipt]) -> None:
        """Keep one more, and only the newest ones; a disk that will not is no reason to stop."""
        self.sealed.append(sealed)
        if len(self.sealed) > RECEIPTS_MAX:
            del self.sealed[: RECEIPTS_MAX // 2]
            self._is_whole = False
        try:
            if self._is_whole:
                self._append(sealed)
            else:
                self._rewrite()
        except (OSError, EnvironmentUnfit) as error:
            self._is_whole = False
            log.error("a receipt was not written to %s: %s", self._path, error)

    def _load(self) -> list[Sealed[Receipt]]:
        data = self._path.read_bytes() if self._path.exists() else b""
        lines = data.splitlines()
        found = [sealed for sealed in map(_receipt, lines) if sealed is not None]
        if len(found) < len(lines) or (data and not data.endswith(b"\n")):
            log.warning("%d of %d receipts were damaged on disk and dropped", len(lines) - len(found), len(lines))
            self._is_whole = False
        return found

    def _append(self, sealed: Sealed[Receipt]) -> None:
        with self._path.open("ab") as file:
            disk.write(file, _line(sealed))
            disk.sync(file)

    def _rewrite(self) -> None:
        write_atomically(self._path, b"".join(map(_line, self.sealed)))
        self._is_whole = True


def _line(sealed: Sealed[Receipt]) -> bytes:
    return canonical_bytes(sealed.to_dict()) + b"\n"


def _receipt(line: bytes) -> Sealed[Receipt] | None:
    try:
        return unseal(Receipt, json.loads(line))
    except (ValueError, DipacoError):
        return None
