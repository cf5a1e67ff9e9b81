"""Ranges of old versions, as one peer sees them: who should keep each, what it is made of, and how to get that.

Keepers use it (keeper.py), those who challenge them (challenges.py), and whoever verifies a run from the swarm alone.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Sequence

from ..errors import DipacoError, IntegrityError, Refused, SwarmError
from ..node.calls import IDS_MAX, GetChain, GetContributions
from ..node.items import read_items
from ..node.ledger import Ledger
from ..node.node import Observer, Reader, ask, fetch_in_time
from ..node.reading import fetch_keepers
from ..protocol.documents import BlobRef, Contribution, ModuleVersion, Sealed
from ..protocol.keeping import GONE_LIVES, RANGE_VERSIONS, KeepersCount, Range, keepers
from ..protocol.signing import PeerId, short
from ..protocol.versions import is_final
from ..topology import ModuleId
from .archive import SeedArchive
from .rollback import brought

log = logging.getLogger(__name__)

HOLDERS_MAX = 8
"""Whom a blob or a document is asked of."""


class Offers:
    """Who offers to keep ranges, and may."""

    def __init__(self, node: Observer, ledgers: Callable[[], Collection[Ledger]]) -> None:
        """`ledgers` say who has worked: a stranger's offer does not count, since it costs nothing."""
        self._node = node
        self._ledgers = ledgers
        self._seen: dict[PeerId, tuple[int, float]] = {}
        """The share that each offered last, and when it was seen."""
        self._now: dict[PeerId, int] = {}
        self._keepers: dict[Range, list[PeerId]] = {}
        self.count: KeepersCount | None = None
        """The coordinator's newest, as far as it is known here."""

    @property
    def peers(self) -> Collection[PeerId]:
        """Who may be a keeper of something."""
        return self._now.keys()

    def look(self, *, own: int = 0) -> None:
        """See who is there now; `own` is what we offer ourselves. Who went away stays a keeper for GONE_LIVES."""
        node, now_s = self._node, self._node.clock.now_s()
        shares = {peer: beat.keeps for peer, beat in node.watch.heartbeats.items()} | {node.peer: own}
        for peer, share in shares.items():
            if share and self._has_worked(peer):
                self._seen[peer] = share, now_s
            else:
                self._seen.pop(peer, None)
        gone_s = GONE_LIVES * node.run.config.liveness.heartbeat_ttl_s
        barred = frozenset[PeerId]() if self.count is None else self.count.barred(now_s)
        self._seen = {
            peer: seen
            for peer, seen in self._seen.items()
            if now_s - seen[1] <= gone_s and not node.decrees.is_banned(peer)
        }
        offers = {peer: share for peer, (share, _) in self._seen.items() if peer not in barred}
        if offers != self._now:
            self._now, self._keepers = offers, {}

    def keepers(self, wanted: Range) -> list[PeerId]:
        """Who should keep a range, the likeliest first."""
        if wanted not in self._keepers:
            self._keepers[wanted] = keepers(self._node.run.id, wanted, self._now)
        return self._keepers[wanted]

    def holders(self, wanted: Range) -> list[PeerId]:
        """Who may have what belongs to a range, of those alive: its keepers, seeds and owners until they drop it, and
        others that offer to keep, who may have kept it before."""
        node = self._node
        grant = node.mandates.grant(wanted.module)
        likely = [*self.keepers(wanted), *node.watch.seeds(), *(grant.group if grant else ()), *sorted(self.peers)]
        alive = (peer for peer in dict.fromkeys(likely) if peer in node.watch.heartbeats and peer != node.peer)
        return list(itertools.islice(alive, HOLDERS_MAX))

    def tellers(self, module: ModuleId) -> list[PeerId]:
        """Who may have the chain of a module, and its contributions, of those alive."""
        return self.holders(Range(module, 0))

    async def learn_count(self) -> None:
        """Hear from the coordinator whom it has barred, if it is there."""
        found = await fetch_keepers(self._node)
        if found is not None and (self.count is None or found.number > self.count.number):
            self.count = found

    def _has_worked(self, peer: PeerId) -> bool:
        ledgers = self._ledgers()
        is_out = any(ledger.standings.of(peer).is_out for ledger in ledgers)
        return not is_out and any(ledger.standings.has_worked(peer) for ledger in ledgers)


def blobs_of_version(archive: SeedArchive, module: ModuleId, version: int) -> tuple[BlobRef | str, ...]:
    """All blobs of a range that belong to `version`: what makes it again. Of a contribution that it counts and that is
    not known here, the id."""
    ledger = archive.ledgers[module]
    before, made = ledger.at(version - 1), ledger.at(version)
    begin = (before.snapshot, before.state) if version % RANGE_VERSIONS == 1 else ()
    known = {share.contribution: _sound(archive, share.contribution) for share in made.shares}
    payloads = [id_ if sealed is None else sealed.document.payload for id_, sealed in known.items()]
    return tuple(dict.fromkeys(filter(None, (*begin, *brought(made), made.appraisals, *payloads))))


def refs_of_version(archive: SeedArchive, module: ModuleId, version: int) -> tuple[BlobRef, ...] | None:
    """The same; None while a contribution that it counts is not known here."""
    blobs = blobs_of_version(archive, module, version)
    refs = tuple(blob for blob in blobs if not isinstance(blob, str))
    return refs if len(refs) == len(blobs) else None


def _sound(archive: SeedArchive, contribution: str) -> Sealed[Contribution] | None:
    """A contribution, unless it is missing, or was damaged on disk: then it is fetched again."""
    try:
        return archive.find(contribution)
    except (ValueError, IntegrityError):
        return None


class Gathering:
    """Brings chains, contributions and blobs from others into a store, each checked."""

    def __init__(self, node: Reader, archive: SeedArchive) -> None:
        """`node` has the store of `archive`."""
        self._node = node
        self._archive = archive

    async def follow(self, module: ModuleId, tellers: Sequence[PeerId], *, at_once: int = 1) -> list[PeerId]:
        """Have the chain of a module as far as it is final, and any of `tellers` shows it. Returns those of `tellers`
        that gave no answer."""
        gate, silent = asyncio.Semaphore(at_once), list[PeerId]()

        async def follow_one(peer: PeerId) -> None:
            try:
                async with gate:
                    await self._follow(module, peer)
            except DipacoError as error:
                log.info("%s: ...%s shows no more of the chain: %s", module, short(peer), error)
                if isinstance(error, SwarmError):
                    silent.append(peer)

        await asyncio.gather(*map(follow_one, tellers))
        return silent

    async def _follow(self, module: ModuleId, peer: PeerId) -> None:
        ledger, coordinator = self._archive.ledgers[module], self._node.run.manifest.author
        is_further = True
        while is_further:
            begin = ledger.head.version
            page = await read_items(ModuleVersion, await ask(self._node, peer, GetChain(module=module, after=begin)))
            final = list(itertools.takewhile(lambda one: is_final(one, coordinator=coordinator), page))
            for sealed in final:
                if sealed.document.version > ledger.head.version:  # else another has shown it meanwhile
                    ledger.append(sealed)
            is_further = len(final) == len(page) and ledger.head.version > begin

    async def learn(self, module: ModuleId, version: int, holders: Sequence[PeerId]) -> tuple[BlobRef, ...] | None:
        """The blobs of a version, once the contributions that it counts are here; None if nobody shows them."""
        ids = [share.contribution for share in self._archive.ledgers[module].at(version).shares]
        lacking = [id_ for id_ in ids if _sound(self._archive, id_) is None]
        for peer in holders if lacking else ():
            try:
                while lacking:
                    reply = await ask(self._node, peer, GetContributions(ids=tuple(lacking[:IDS_MAX])))
                    came = [sealed for sealed in await read_items(Contribution, reply) if sealed.id in lacking]
                    for sealed in came:
                        self._archive.keep(sealed)
                    lacking = [id_ for id_ in lacking if _sound(self._archive, id_) is None]
                    if not came:
                        break
            except DipacoError as error:
                log.info("...%s shows no contributions: %s", short(peer), error)
        return refs_of_version(self._archive, module, version)

    async def bring(self, ref: BlobRef, holders: Sequence[PeerId]) -> bool:
        """Whether a blob is here now. Raises EnvironmentUnfit for a disk that is full."""
        if self.has(ref):
            return True
        try:
            await fetch_in_time(self._node, ref, holders=holders, keep=True)
        except (SwarmError, Refused, IntegrityError) as error:
            log.info("blob %s is not to be had: %s", ref.digest[:8], error)
            return False
        return True

    def has(self, ref: BlobRef) -> bool:
        """Whether it is here, by its size."""
        return self._node.store.size(ref.digest) == ref.size

    async def bring_version(self, module: ModuleId, version: int, holders: Sequence[PeerId]) -> bool:
        """Whether all that makes a version again is here now."""
        refs = await self.learn(module, version, holders)
        return refs is not None and all([await self.bring(ref, holders) for ref in refs])
