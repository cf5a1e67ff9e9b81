"""What a volunteer keeps on its disk of its own, so that after any end it goes on where it stood.

    state-<path>.json      the path's inner states: moments and error feedback (`InnerStates`)
    version-, open-*.json  the chains of the modules that it trains, mirrors or leads, and the newest parameters;
                           so that a restart fetches only what is newer (owner/chain.py)
    outbox/                contributions whose push has begun and has not ended: a restart pushes them again, which is
                           the same contribution and counts once
    receipts.jsonl         what leaders signed for, the newest last

There is no data cursor: a round's batches follow from the path, the round and the part of the shard alone. Everything
is written before it is needed, whole or not at all, and bounded. Whatever the disk has changed is found by a digest or
a signature, said in one line, and then is as if it had never been there.

Which of a path's inner states is the newest stands in the chain: the newest version of its modules that counts the path
names the state after that work, and who has it. The last two of each path are kept, since the newest may not be counted
yet; whoever trains the path next fetches it from here.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from dipaco_p2p import strict
from dipaco_p2p.canonical import canonical_bytes, digest, is_digest
from dipaco_p2p.errors import ConfigError, DipacoError, EnvironmentUnfit, IntegrityError, SwarmError
from dipaco_p2p.node.node import Member, fetch_in_time
from dipaco_p2p.node.sizes import state_bytes_max, states_kept
from dipaco_p2p.node.store import Store
from dipaco_p2p.program.files import disk, write_atomically
from dipaco_p2p.protocol.documents import BlobRef, Contribution, Receipt, Sealed, Share, unseal
from dipaco_p2p.protocol.signing import PeerId, short
from dipaco_p2p.topology import PathId

from .trainer import PathTrainer

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

SENT = "sent"
"""The document that names the payloads of the last rounds."""
KEPT = 2
"""Rounds of which payloads and inner states are kept, at least."""


def outbox_of(store: Store) -> Store:
    """Where the payloads of our own work lie; whoever judges it reads them there."""
    return Store(store.folder / "outbox")


class Outbox:
    """At most one contribution per module, since the next one is made when the push of the last has ended."""

    def __init__(self, node: Member) -> None:
        self._store = outbox_of(node.store)
        self._sent = node.store
        self._clock = node.clock
        self._asked_s = node.run.config.rounds.deadline_s
        self._store.drop_unnamed(but=_named(self._rounds()))
        self._run = node.run.id

    def keep(self, payloads: Sequence[bytes]) -> list[BlobRef]:
        """What a round pushes, of all modules of its path; the names. It stays here for KEPT rounds and for a deadline
        of the run file, whatever becomes of the pushes: a leader's mirrors fetch it from us, and who judges our work
        needs every module's part, even when rounds take no longer than the judges need to ask."""
        refs, now_s = [self._store.put(payload) for payload in payloads], self._clock.now_s()
        sent = self._rounds()
        young = [(at_s, names) for at_s, names in sent[: 1 - KEPT] if 0 <= now_s - at_s < self._asked_s]
        kept = [*young, *sent[1 - KEPT :], (now_s, [ref.digest for ref in refs])]
        write_checked(self._sent, SENT, kept)
        _drop_others(self._store, _named(kept))
        return refs

    def _rounds(self) -> list[tuple[float, list[str]]]:
        """When each of the last rounds was sent, the newest last, and the names of its payloads."""
        found = read_checked(self._sent, SENT)
        try:
            return [(float(at_s), list(names)) for at_s, names in found or ()]
        except (ValueError, TypeError):  # an earlier release kept the names alone
            return []

    def add(self, contribution: Contribution, payload: bytes) -> None:
        """Its push begins. Raises EnvironmentUnfit."""
        self._store.keep(contribution.payload, payload)
        write_checked(self._store, str(contribution.module), strict.plain(contribution))

    def remove(self, contribution: Contribution) -> None:
        """There is a receipt, or a reason why there will be none."""
        self._store.drop_document(str(contribution.module))
        if contribution.payload.digest not in _named(self._rounds()):
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
        _drop_others(self._store, _named(self._rounds()) | {contribution.payload.digest for contribution, _ in found})
        return found


def _named(rounds: Iterable[tuple[float, Sequence[str]]]) -> set[str]:
    """The names of all payloads of these rounds."""
    return {name for _, names in rounds for name in names}


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


PREFIX = "state-"


class InnerStates:
    """The states that are in this peer's store; anyone may read them there, like all its blobs."""

    def __init__(self, node: Member) -> None:
        self._node = node

    def held(self) -> set[PathId]:
        """The paths of which there is a state here."""
        return {PathId.parse(name.removeprefix(PREFIX)) for name in self._node.store.documents(PREFIX)}

    def keep(self, path: PathId, *parts: bytes | memoryview) -> BlobRef:
        """Keep the newest state of `path`, and drop the oldest."""
        ref = BlobRef.of(*parts)
        self._node.store.keep(ref, *parts)
        names = [name for name in self._names(path) if name != ref.digest] + [ref.digest]
        count = states_kept(self._node.run.config)
        write_checked(self._node.store, f"{PREFIX}{path}", names[-count:])
        for name in names[:-count]:
            self._node.store.drop(name)
        return ref

    async def restore(self, trainer: PathTrainer, shares: Iterable[Share]) -> bool:
        """Bring `trainer` to its path's newest state; whether that is another volunteer's word, or may be.

        `shares` are what the newest versions count of the path. If nobody who is named there gives its state, the
        newest on this disk must do, and else the start; a history event says which.
        """
        named = sorted((share for share in shares if share.state is not None), key=self._preference)
        for share in named:
            if share.state is not None and await self._try(trainer, share.state, share.peer):
                trainer.goes_on_from(share.state, since=share.base_version)
                self._say(trainer.path, "ours" if share.peer == self._node.peer else "fetched", peer=share.peer)
                return share.peer != self._node.peer
        # Auditors take no state that no version names.
        if named and not self._node.run.config.audited and await self._from_disk(trainer):
            self._say(trainer.path, "older")
            return True  # what was fetched once is on this disk, too
        self._say(trainer.path, "lost" if named else "start")
        return False

    def _preference(self, share: Share) -> tuple[int, bool, int, str]:
        """The newest first; of replicas our own, then the one that trained most."""
        return -share.base_version, share.peer != self._node.peer, -share.tokens, share.contribution

    async def _try(self, trainer: PathTrainer, ref: BlobRef, peer: PeerId) -> bool:
        limit = state_bytes_max(self._node.run.config, trainer.path)
        holders = [peer] if peer in self._node.watch.heartbeats else []
        try:
            if ref.size > limit:
                raise IntegrityError(f"a state of {ref.size} bytes, limit {limit}")
            data = await fetch_in_time(self._node, ref, holders=holders)
            await asyncio.to_thread(trainer.load_state, data)
        except (SwarmError, IntegrityError) as error:
            log.info("%s: no state from ...%s: %s", trainer.path, short(peer), error)
            return False
        await asyncio.to_thread(self.keep, trainer.path, data)
        return True

    async def _from_disk(self, trainer: PathTrainer) -> bool:
        for name in reversed(self._names(trainer.path)):
            try:
                data = self._node.store.get(name)
                if data is not None:
                    await asyncio.to_thread(trainer.load_state, data)
                    return True
            except IntegrityError as error:
                log.info("%s: the state %s on this disk is of no use: %s", trainer.path, name[:8], error)
        return False

    def _names(self, path: PathId) -> list[str]:
        """Digests of the states that are kept, the newest last."""
        names = read_checked(self._node.store, f"{PREFIX}{path}")
        return [name for name in names if is_digest(name)] if isinstance(names, list) else []

    def _say(self, path: PathId, source: str, *, peer: str = "") -> None:
        self._node.history.add("state", path=str(path), source=source, peer=peer)
