"""One module as a trainer follows it: its head's parameters, checked to the bit, and nothing else of the run.

Close behind the head, the quantised updates are fetched, in turn (sources.py), and applied; far behind, a snapshot.
Either way the bytes must have the digest that the leader signed, and the chain of versions must lead back to the run's
genesis.

A leader's word is not enough: somebody that it did not choose must have made the version again, while anybody lives
who could.

Whoever comes late to a long run begins at a **checkpoint**, one of the newest versions that the coordinator has signed:
it signs one version of a number, on the chain that goes on, so nothing before it has to be read to train from it. What
was before is read at leisure, a page with each round, since the chain that this peer keeps must be whole: then it knows
who has worked, and may own the module.
"""

from __future__ import annotations

import asyncio
import itertools
import logging

import numpy as np
from numpy.typing import NDArray

from ..canonical import Parts
from ..core.model.layout import decode_module
from ..errors import IntegrityError, Refused, SwarmError
from ..node.calls import WAIT_MAX_S, GetChain, GetVersions
from ..node.items import Page, read_items
from ..node.ledger import RemoteLedger
from ..node.node import CONTROL_TIMEOUT_S, Member, ask, fetch
from ..node.reading import vouched
from ..protocol.documents import ModuleVersion, Sealed, Share
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId
from ..protocol.versions import check_successor, genesis_version, is_final
from ..swarm.calls import Request
from ..topology import ModuleId, PathId
from .chain import ModuleChain
from .sources import Sources
from .version import kept, updated

log = logging.getLogger(__name__)

RETRY_S = 0.5
FAR_BEHIND = 16
"""Final versions, of which more are not read before training begins."""
READ_BEFORE = 4
"""Versions before the newest final one that are read: they say who trained each path last."""


class Follower:
    """Holds the newest version that it has fetched and checked."""

    def __init__(self, node: Member, module: ModuleId, chain: ModuleChain | None = None) -> None:
        """`chain` keeps what is followed: for our next start, and for whoever takes the module over."""
        self._node = node
        self._chain = chain
        self._layout = node.run.layout(module)
        self.sources = Sources(node, module)
        self.module = module
        self.version: ModuleVersion = genesis_version(node.run.manifest, module)
        self.params: NDArray[np.float32] | None = None
        """Flat parameters of `version`; None until the first `sync`."""
        self.shares: dict[PathId, tuple[Share, ...]] = {}
        """Of every path, what the newest version up to `version` counts that counts anything of it."""
        self._unknown_since_s: float | None = None
        """Since when the leader says that our version is none of its chain."""
        self._doubted_s: float | None = None
        """Since when the leader shows versions that nobody vouches for."""
        self._is_on_lost_branch = False
        self._checkpoint: ModuleVersion | None = None
        """Where we began, while our chain lacks what was before."""
        self._followed: list[Sealed[ModuleVersion]] = []
        """What came after it, until the chain can take that."""
        if chain is not None:
            self._resume(chain)

    @property
    def is_complete(self) -> bool:
        return self.version.version >= self._node.run.rounds

    async def sync(self, *, after: int | None = None) -> None:
        """Come up to the head; with `after`, wait until there is a version greater than it.

        Waits through leaders that die and successors that take over; ends early only by cancellation.
        """
        is_first = self.params is None
        while True:
            began = None if self.params is not None or self.version.version else await self._begin_late()
            versions = began
            if began is None:
                versions = await self._ask_versions(wait_s=WAIT_MAX_S if self._must_wait(after) else 0.0)
            if self._is_on_lost_branch:
                self._start_over()
                after = None
            elif versions is None or not await self._try_advance(versions):
                await self._node.clock.sleep(RETRY_S)
                await self._node.watch.read_heads(self.module)
                if self._doubted_s is not None:  # does whoever should have signed still live?
                    await self._node.watch.read_peers()
            elif not versions and began is None and not self._must_wait(after):
                if not is_first:  # who comes late trains first: a page can have a thousand versions
                    await self._read_earlier()
                return

    async def _begin_late(self) -> list[Sealed[ModuleVersion]] | None:
        """Begin at a checkpoint, if the chain is long, and somebody shows one; what follows it there."""
        node, leader = self._node, self._node.watch.leader(self.module)
        head = node.watch.heads[self.module].get(leader) if leader is not None else None
        if leader is None or head is None or head.final <= FAR_BEHIND:
            return None
        for peer in dict.fromkeys([leader, *self._keepers()]):
            try:
                page = await RemoteLedger(node, peer, self.module).page(after=head.final - READ_BEFORE - 1)
                for before, sealed in itertools.pairwise(page):
                    check_successor(before.document, sealed.document, node.run.manifest)
            except (SwarmError, Refused, IntegrityError) as error:
                log.info("...%s shows no checkpoint of %s: %s", peer[-6:], self.module, error)
                continue
            signed = list(itertools.dropwhile(lambda sealed: not self._is_checkpoint(sealed), page))
            if signed:
                self._begin_at(signed[0].document)
                return self._trusted(signed[1:])
        return None

    def _begin_at(self, checkpoint: ModuleVersion) -> None:
        log.info("%s is followed from version %d on", self.module, checkpoint.version)
        self.version = self._checkpoint = checkpoint
        self._followed = []
        self._note_shares(checkpoint)
        chain = self._chain
        if chain is not None and not chain.is_owner and chain.ledger.final < chain.ledger.head.version:
            chain.give_up()  # what is not final here may be on another branch

    def _is_checkpoint(self, sealed: Sealed[ModuleVersion]) -> bool:
        run, document = self._node.run, sealed.document
        is_ours = (document.run, document.module) == (run.id, self.module)
        return is_ours and is_final(sealed, coordinator=run.manifest.author)

    async def _read_earlier(self) -> None:
        """Give our chain a page of what was before the checkpoint, from whoever shows it as the coordinator signed it;
        then all that came after."""
        chain, checkpoint = self._chain, self._checkpoint
        if chain is None or checkpoint is None:
            return
        if not chain.is_owner:  # an owner has read the whole chain of its leader
            last = checkpoint.version
            await self._read_page(chain, until=last)
            if chain.ledger.head.version < last:
                return
            if chain.ledger.at(last) == checkpoint:
                _append(chain, self._followed)
        self._checkpoint, self._followed = None, []

    async def _read_page(self, chain: ModuleChain, *, until: int) -> None:
        leader = self._node.watch.leader(self.module)
        for peer in dict.fromkeys([*self._keepers(), *([leader] if leader else [])]):
            after = chain.ledger.head.version
            if after >= until:
                return
            try:
                page = await RemoteLedger(self._node, peer, self.module).page(after=after)
                signed = list(itertools.takewhile(self._is_checkpoint, page[: until - after]))
                _append(chain, signed)
            except (SwarmError, Refused, IntegrityError) as error:
                log.info("...%s shows nothing of %s after version %d: %s", peer[-6:], self.module, after, error)
                continue
            if signed:
                return

    def _must_wait(self, after: int | None) -> bool:
        return after is not None and self.version.version <= after and not self.is_complete

    async def _ask_versions(self, *, wait_s: float) -> list[Sealed[ModuleVersion]] | None:
        """What follows our version, from the leader, else from an archive; None when neither answers."""
        version = self.version
        leader = self._node.watch.leader(self.module)
        if leader is not None:
            try:
                request = GetVersions(
                    module=self.module,
                    after=version.version,
                    digest=version.digest,
                    weight=version.weight,
                    wait_s=wait_s,
                )
                found = await self._call(leader, request, wait_s=wait_s)
                self._unknown_since_s = None
                if wait_s and not found:  # it may be done with waiting since a path is free again
                    self._node.watch.hurry(self.module)
                trusted = self._trusted(found)
                return trusted if trusted or not found else None
            except (SwarmError, Refused, IntegrityError) as error:
                log.info("the leader of %s gave nothing: %s", self.module, error)
                if isinstance(error, Refused) and error.reason == Reason.UNKNOWN_BASE:
                    self._is_on_lost_branch = self._is_given_up() and not await self._is_archived()
                    return None
        for peer in self._keepers():
            try:
                found = self._trusted(await self._call(peer, GetChain(module=self.module, after=version.version)))
                return found or (None if wait_s else found)
            except (SwarmError, Refused, IntegrityError) as error:
                log.info("a keeper of %s gave nothing: %s", self.module, error)
        return None

    def _trusted(self, versions: list[Sealed[ModuleVersion]]) -> list[Sealed[ModuleVersion]]:
        """Those that somebody besides their leader vouches for. Without the coordinator that is waited for as long as a
        heartbeat lives: nobody may be there who could."""
        node, has_coordinator = self._node, bool(self._node.watch.coordinators())
        if found := vouched(node, versions):
            self._doubted_s = None
            return found
        if self._doubted_s is None or has_coordinator:
            self._doubted_s = node.clock.now_s()
        is_over = node.clock.now_s() - self._doubted_s >= node.run.config.liveness.heartbeat_ttl_s
        return versions if is_over and not has_coordinator else []

    def _is_given_up(self) -> bool:
        """Whether our version is on no chain that goes on. A new leader may still take our branch over, if that is the
        better one, so it gets the life of a heartbeat to find it."""
        now_s = self._node.clock.now_s()
        if self._unknown_since_s is None:
            self._unknown_since_s = now_s
        return now_s - self._unknown_since_s >= self._node.run.config.liveness.heartbeat_ttl_s

    async def _is_archived(self) -> bool:
        """Whether an archive has our very version: then it is final, and the leader is wrong."""
        request = GetChain(module=self.module, after=self.version.version - 1)
        for seed in self._node.watch.seeds():
            try:
                reply = await ask(self._node, seed, request, timeout_s=CONTROL_TIMEOUT_S)
                kept = await read_items(ModuleVersion, reply)
                return bool(kept) and kept[0].document == self.version
            except (SwarmError, Refused, IntegrityError) as error:
                log.info("the archive said nothing of version %d of %s: %s", self.version.version, self.module, error)
        return False

    def _keepers(self) -> list[PeerId]:
        """Who has the chain when no leader answers."""
        grant = self._node.mandates.grant(self.module)
        group = [peer for peer in (grant.group if grant else ()) if peer in self._node.watch.heartbeats]
        return [peer for peer in dict.fromkeys([*self._node.watch.seeds(), *group]) if peer != self._node.peer]

    def _resume(self, chain: ModuleChain) -> None:
        """Begin with the newest version on this disk that somebody cosigned; what was damaged is fetched again."""
        ledger, coordinator = chain.ledger, self._node.run.manifest.author
        for sealed in ledger.versions:
            self._note_shares(sealed.document)
        for sealed in reversed(ledger.versions):
            if not sealed.cosignatures and sealed.document.author != coordinator:
                continue
            try:
                data = self._node.store.get(sealed.document.digest)
            except IntegrityError as error:
                log.warning("%s: %s", self.module, error)
                data = None
            if data is not None:
                self.params, self.version = decode_module(data, self._layout), sealed.document
                return

    def _start_over(self) -> None:
        """Our version is of a branch that its leader could not save: follow the chain that goes on, from genesis."""
        log.warning("%s: version %d was given up by the swarm", self.module, self.version.version)
        self.version, self.params = genesis_version(self._node.run.manifest, self.module), None
        self.shares, self._checkpoint, self._followed = {}, None, []
        self._is_on_lost_branch, self._unknown_since_s = False, None

    async def _call(
        self, peer: PeerId, request: Request[Page[ModuleVersion]], *, wait_s: float = 0.0
    ) -> list[Sealed[ModuleVersion]]:
        page = await ask(self._node, peer, request, timeout_s=wait_s + CONTROL_TIMEOUT_S)
        versions = await read_items(ModuleVersion, page)
        parent = self.version
        is_next = bool(versions) and versions[0].document.version == parent.version + 1
        if is_next and parent.version and not _is_after(versions[0].document, parent):
            raise Refused(f"version {parent.version} here is not theirs", reason=Reason.UNKNOWN_BASE)
        for sealed in versions:
            check_successor(parent, sealed.document, self._node.run.manifest)
            parent = sealed.document
        return versions

    async def _try_advance(self, versions: list[Sealed[ModuleVersion]]) -> bool:
        try:
            await self._advance(versions)
            return True
        except (SwarmError, IntegrityError, Refused) as error:
            log.warning("%s stays at version %d for now: %s", self.module, self.version.version, error)
            return False

    def _note_shares(self, version: ModuleVersion) -> None:
        for path in {share.path for share in version.shares}:
            self.shares[path] = tuple(share for share in version.shares if share.path == path)

    async def _advance(self, versions: list[Sealed[ModuleVersion]]) -> None:
        if self.params is None or _is_snapshot_smaller(versions):
            snapshot = await self._load_snapshot(versions[-1].document if versions else self.version)
            for sealed in versions:
                self._note_shares(sealed.document)
            self._keep(versions, snapshot)
            return
        for sealed in versions:
            try:
                await self._apply(sealed)
            except (SwarmError, IntegrityError) as error:  # who knew the updates may be gone; the snapshot goes on
                log.info("%s: no update to version %d: %s", self.module, sealed.document.version, error)
                missing = versions[versions.index(sealed) :]
                self._keep(missing, await self._load_snapshot(versions[-1].document))
                for late in missing:
                    self._note_shares(late.document)
                return

    async def _apply(self, sealed: Sealed[ModuleVersion]) -> None:
        version = sealed.document
        assert version.update is not None and self.params is not None
        is_next = self._is_next_here(version)
        blob = await self.sources.update(version, keep=is_next)  # before it is applied: others wait for it
        params, snapshot = await asyncio.to_thread(updated, self._node.run, self.params, blob, version)
        if is_next and self._is_next_here(version):  # here: in the event loop heartbeats would wait for large ones
            await kept(version, [(version.snapshot, snapshot), (version.update, [blob])], self._node.store)
        self.params, self.version = params, version
        self._note_shares(version)
        self._keep([sealed], snapshot, blob)

    def _is_next_here(self, version: ModuleVersion) -> bool:
        """Whether our own chain will keep this version."""
        chain = self._chain
        return chain is not None and not chain.is_owner and chain.ledger.head.version == version.version - 1

    def _keep(self, versions: list[Sealed[ModuleVersion]], snapshot: Parts, update: bytes | None = None) -> None:
        if self._checkpoint is not None:
            self._followed += versions
        elif self._chain is not None and versions:
            self._chain.note(versions, snapshot, update)

    async def _load_snapshot(self, version: ModuleVersion) -> Parts:
        limit = self._node.run.snapshot_bytes_max(self.module)
        if version.snapshot.size > limit:
            raise IntegrityError(f"a snapshot of {self.module} with {version.snapshot.size} bytes, limit {limit}")
        data = await fetch(self._node, version.snapshot, holders=self.sources.holders(version))
        self.params, self.version = decode_module(data, self._layout), version
        return [data]


def _append(chain: ModuleChain, versions: list[Sealed[ModuleVersion]]) -> None:
    """Keep documents that come later than their parameters. Raises IntegrityError where one does not follow."""
    for sealed in versions:
        if not chain.is_owner and sealed.document.version == chain.ledger.head.version + 1:
            chain.ledger.append(sealed)


def _is_after(version: ModuleVersion, parent: ModuleVersion) -> bool:
    """Whether it can have been made from this very parent: two leaders may have made the same of different work."""
    weight = version.weight - sum(share.tokens for share in version.shares)
    return (version.parent, weight) == (parent.digest, parent.weight) and version.term >= parent.term


def _is_snapshot_smaller(versions: list[Sealed[ModuleVersion]]) -> bool:
    """Whether the newest snapshot is fewer bytes than all the updates up to it."""
    updates = [sealed.document.update for sealed in versions]
    if any(sealed.document.rollback is not None for sealed in versions):  # no update leads there
        return True
    return bool(versions) and sum(ref.size for ref in updates if ref) >= versions[-1].document.snapshot.size
