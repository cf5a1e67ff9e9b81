"""The archive of a run, on the seed node: every version, what it was made of, and who leads in which term.

It takes a version only if it follows the chain, comes from the leader of the newest term, and its update really gives
the digest that it claims; so what the archive serves needs no trust in the leader.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.core.codec import decode_module, encode_module
from dipaco_p2p.core.compress import decode_compressed
from dipaco_p2p.core.outer import apply_update
from dipaco_p2p.errors import ConfigError, IntegrityError, Refused
from dipaco_p2p.protocol.admission import Reason
from dipaco_p2p.protocol.documents import BlobRef, Contribution, ModuleVersion, Sealed, unseal
from dipaco_p2p.protocol.grants import sign_grant
from dipaco_p2p.protocol.signing import PeerId, Signer, short
from dipaco_p2p.protocol.versions import check_successor
from dipaco_p2p.runtime.items import items_reply
from dipaco_p2p.runtime.ledger import DAMAGED_HINT, Ledger
from dipaco_p2p.runtime.run import Run
from dipaco_p2p.runtime.store import Store
from dipaco_p2p.runtime.transfer import Uploads
from dipaco_p2p.swarm.api import Reply, Swarm
from dipaco_p2p.topology import ModuleId

TERMS = "terms"
OnDeposed = Callable[[ModuleId, PeerId], Awaitable[None]]
IsLeading = Callable[[ModuleId, PeerId, int], Awaitable[bool]]


class SeedArchive:
    """All ledgers of a run, and the terms that were granted.

    Grants are signed with `signer`, the coordinator's key; an archive that is only read needs none.
    """

    def __init__(self, run: Run, store: Store, signer: Signer | None = None) -> None:
        self._run = run
        self._store = store
        self._uploads: Uploads | None = None
        self._terms: dict[ModuleId, tuple[int, PeerId]] = self._read_terms()
        self._listeners: list[Callable[[ModuleVersion], None]] = []
        self._signer = signer
        self._deposed: OnDeposed = _nobody
        self._is_leading: IsLeading = _nobody_leads
        self._granting = asyncio.Lock()
        self._keeping = {module: asyncio.Lock() for module in run.topology.modules()}
        self.ledgers = {module: Ledger(run, store, module) for module in run.topology.modules()}
        for ledger in self.ledgers.values():
            ledger.settle(ledger.head.version)  # a crash between writing a version and this

    def serve(
        self, swarm: Swarm, uploads: Uploads, *, on_deposed: OnDeposed, is_leading: IsLeading | None = None
    ) -> None:
        """Answer leaders.

        `on_deposed` is told when a term goes to somebody else; `is_leading` says whether the holder of the newest
        term is still seen to lead: then nobody else gets the next one.
        """
        self._uploads = uploads
        self._deposed = on_deposed
        self._is_leading = is_leading or _nobody_leads
        for method, handler in {
            "archive.term": self._on_term,
            "archive.adopt": self._on_adopt,
            "archive.chain": self._on_chain,
            "archive.open": self._on_open,
            "archive.contribution": self._on_contribution,
            "archive.version": self._on_version,
        }.items():
            swarm.serve(method, handler)

    def listen(self, listener: Callable[[ModuleVersion], None]) -> None:
        """Hear of every version that is kept."""
        self._listeners.append(listener)

    def granted(self, module: ModuleId) -> tuple[int, PeerId]:
        """The newest term and its leader; at first the coordinator, in term 0."""
        return self._terms.get(module, (0, self._run.manifest.author))

    async def adopt(self, peer: PeerId, module: ModuleId, *, term: int) -> str:
        """Grant `term` to `peer`, and give the signature that says so.

        Raises Refused unless it is the next term (or already this peer's) and the last leader is gone.
        """
        async with self._granting:
            newest, holder = self.granted(module)
            if (term, peer) != (newest, holder) or module not in self._terms:
                if term != newest + 1:
                    raise Refused(f"the next term of {module} is {newest + 1}, not {term}", reason=Reason.NOT_LEADER)
                if holder != peer:
                    await self._depose(module, holder, newest)
                self._terms[module] = (term, peer)
                self._write_terms()
            assert self._signer is not None, "an archive grants only while it serves"
            return sign_grant(self._signer, run=self._run.id, module=module, term=term, leader=peer)

    async def _depose(self, module: ModuleId, holder: PeerId, term: int) -> None:
        """Before the grant, so that what the old leader has done is still taken."""
        if await self._is_leading(module, holder, term):
            raise Refused(f"{module} is led by ...{short(holder)}, which is alive", reason=Reason.NOT_LEADER)
        await self._deposed(module, holder)

    def keep_contribution(self, peer: PeerId, sealed: Sealed[Contribution], *, term: int) -> None:
        """Keep a contribution and its (already uploaded) payload; only from the leader."""
        document = sealed.document
        if document.run != self._run.id:
            raise Refused("a contribution to another run", reason=Reason.WRONG_RUN)
        self._require_module(document.module)
        if self.granted(document.module) != (term, peer):
            raise self._not_leader(document.module)
        self._require_blob(document.payload)
        self._store.write_document(f"contribution-{sealed.id}", canonical_bytes(sealed.to_dict()))
        self.ledgers[document.module].add(sealed)

    async def keep_version(self, peer: PeerId, sealed: Sealed[ModuleVersion]) -> None:
        """Keep the next version of a module, after applying its update ourselves."""
        version = sealed.document
        self._require_module(version.module)
        async with self._keeping[version.module]:
            if self._has(version):
                return
            self._require_author(peer, version)
            for ref in (version.update, version.state):
                self._require_blob(ref)
            self._require_contributions(version)
            ledger = self.ledgers[version.module]
            await asyncio.to_thread(self._check_bytes, ledger.head, version)
            ledger.append(sealed)
            ledger.settle(version.version)  # contributions stay, as documents of their own
        for listener in self._listeners:
            listener(version)

    def contribution(self, contribution_id: str) -> Sealed[Contribution]:
        """A contribution by id, also long after it was counted; raises IntegrityError if it is not here."""
        data = self._store.read_document(f"contribution-{contribution_id}")
        if data is None:
            raise IntegrityError(f"contribution {contribution_id[:8]} is not in the archive")
        return unseal(Contribution, json.loads(data))

    def _check_bytes(self, parent: ModuleVersion, version: ModuleVersion) -> None:
        layout = self._run.layout(version.module)
        check_successor(parent, version, self._run.manifest)
        before, update = self._blob(parent.snapshot), self._blob(version.update)
        params = apply_update(decode_module(before, layout), decode_compressed(update, size=layout.size))
        snapshot = encode_module(params, layout)
        if BlobRef.of(snapshot) != version.snapshot:
            raise Refused("the update does not give the version's digest", reason=Reason.MALFORMED)
        self._store.put(snapshot)

    def _has(self, version: ModuleVersion) -> bool:
        """Whether this very version is kept already; raises Refused if another one has its number."""
        ledger = self.ledgers[version.module]
        if version.version > ledger.head.version:
            return False
        kept = ledger.versions[version.version - 1].document if version.version else None
        if kept is None or kept.digest != version.digest:
            raise Refused(f"version {version.version} of {version.module} is another", reason=Reason.STALE_BASE)
        return True

    def _require_author(self, peer: PeerId, version: ModuleVersion) -> None:
        """Only the present leader hands in, and only its own; also what it made in an earlier term of its own."""
        newest, holder = self.granted(version.module)
        if holder != peer or version.author != peer or version.term > newest:
            raise self._not_leader(version.module)

    def _not_leader(self, module: ModuleId) -> Refused:
        newest, holder = self.granted(module)
        return Refused(f"{module} is led by ...{short(holder)} in term {newest}", reason=Reason.NOT_LEADER)

    def _require_module(self, module: ModuleId) -> None:
        if module not in self._run.topology:
            raise Refused(f"this run has no {module}", reason=Reason.WRONG_MODULE)

    def _require_blob(self, ref: BlobRef | None) -> None:
        if ref is None:
            raise Refused("a version names no update or no state", reason=Reason.MALFORMED)
        if self._store.size(ref.digest) != ref.size:
            raise Refused(f"upload blob {ref.digest[:8]} first", reason="payload-missing")
        if self._uploads is not None:
            self._uploads.claim(ref.digest)

    def _require_contributions(self, version: ModuleVersion) -> None:
        """What a version counts must be here before it, else nobody could ever recompute it."""
        open_here = self.ledgers[version.module].open
        for share in version.shares:
            if share.contribution not in open_here:
                raise Refused(f"contribution {share.contribution[:8]} is not here", reason="contribution-missing")

    def _blob(self, ref: BlobRef | None) -> bytes:
        data = self._store.get(ref.digest) if ref is not None else None
        if data is None:
            raise IntegrityError("a blob of this version or its parent is not in the archive")
        return data

    def _read_terms(self) -> dict[ModuleId, tuple[int, PeerId]]:
        data = self._store.read_document(TERMS)
        try:
            terms = json.loads(data) if data is not None else {}
            return {ModuleId.parse(module): (int(term), PeerId(peer)) for module, (term, peer) in terms.items()}
        except (ValueError, TypeError, AttributeError, ConfigError):
            raise IntegrityError(f"{TERMS}.json was damaged on disk", hint=DAMAGED_HINT) from None

    def _write_terms(self) -> None:
        self._store.write_document(TERMS, canonical_bytes({str(m): list(v) for m, v in self._terms.items()}))

    # -- over the swarm

    async def _on_term(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        return Reply({"term": self.granted(self._module(header))[0]})

    async def _on_adopt(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        return Reply({"grant": await self.adopt(sender, self._module(header), term=_whole(header, "term"))})

    async def _on_chain(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        return items_reply(self.ledgers[self._module(header)].versions[_whole(header, "after") :])

    async def _on_open(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        after, found = str(header.get("after", "")), self.ledgers[self._module(header)].open
        return items_reply(found[name] for name in sorted(found) if name > after)

    async def _on_contribution(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        self.keep_contribution(sender, unseal(Contribution, header.get("contribution")), term=_whole(header, "term"))
        return Reply({})

    async def _on_version(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        await self.keep_version(sender, unseal(ModuleVersion, header.get("version")))
        return Reply({})

    def _module(self, header: dict[str, Any]) -> ModuleId:
        try:
            module = ModuleId.parse(str(header.get("module")))
        except ConfigError as error:
            raise Refused(str(error), reason=Reason.MALFORMED) from None
        self._require_module(module)
        return module


class OwnArchive:
    """The seed's own way to its archive, when it leads a module as the last resort."""

    def __init__(self, archive: SeedArchive, peer: PeerId) -> None:
        self._archive = archive
        self._peer = peer

    async def adopt(self, module: ModuleId, *, term: int) -> str:
        return await self._archive.adopt(self._peer, module, term=term)

    async def term(self, module: ModuleId) -> int:
        return self._archive.granted(module)[0]

    async def chain(self, module: ModuleId, *, after: int) -> list[Sealed[ModuleVersion]]:
        return self._archive.ledgers[module].versions[after:]

    async def open_contributions(self, module: ModuleId) -> list[Sealed[Contribution]]:
        return list(self._archive.ledgers[module].open.values())

    async def keep_contribution(self, sealed: Sealed[Contribution], payload: bytes, *, term: int) -> PeerId:
        self._archive.keep_contribution(self._peer, sealed, term=term)
        return self._peer

    async def keep_version(self, sealed: Sealed[ModuleVersion], blobs: Sequence[bytes]) -> None:
        await self._archive.keep_version(self._peer, sealed)


async def _nobody_leads(module: ModuleId, peer: PeerId, term: int) -> bool:
    """Without a view of the swarm every holder counts as gone."""
    return False


async def _nobody(module: ModuleId, peer: PeerId) -> None:
    """Before `serve` there is no leader to depose."""


def _whole(header: dict[str, Any], name: str) -> int:
    value = header.get(name)
    if type(value) is not int or value < 0:
        raise Refused(f"`{name}` is {value!r}", reason=Reason.MALFORMED)
    return value
