"""What the archive has of a module and what only its leader has: brought together at the start, handed in later.

The two differ when the archive was away, or when this peer led before and was deposed, or crashed, with versions that
the archive never got. Where they contradict each other, the archive's count.
"""

from __future__ import annotations

import logging

from ..errors import DipacoError, IntegrityError, Refused, SwarmError
from ..protocol.admission import Reason
from ..protocol.documents import Contribution, ModuleVersion, Sealed
from ..protocol.signing import PeerId
from .archive import Archive
from .ledger import Ledger
from .node import Node

log = logging.getLogger(__name__)


class Custody:
    """One leader's dealings with the archive, in one term."""

    def __init__(self, node: Node, archive: Archive, ledger: Ledger, *, term: int) -> None:
        self._node = node
        self._archive = archive
        self._ledger = ledger
        self._term = term
        self._pruned = 0
        self.archived = 0
        """The versions up to this one are in the archive."""

    async def reconcile(self) -> None:
        """Make our ledger agree with the archive, and take its open contributions. Raises DipacoError."""
        common, theirs = await self._meet()
        if theirs:
            self._ledger.truncate(common)
            for sealed in theirs:
                self._ledger.append(sealed)
            common = self._ledger.head.version
        self._ledger.settle(common)
        self.archived = self._pruned = common
        for contribution in await self._archive.open_contributions(self._ledger.module):
            self._ledger.add(contribution)

    async def keep(self, sealed: Sealed[Contribution], payload: bytes) -> tuple[PeerId, ...]:
        """Put a contribution where it survives us; who holds it. Raises Refused if the archive does not take it."""
        self._ledger.add(sealed)
        try:
            return self._node.peer, await self._archive.keep_contribution(sealed, payload, term=self._term)
        except (SwarmError, IntegrityError) as error:
            log.info("%s: a contribution is on this disk only: %s", self._ledger.module, error)
            return (self._node.peer,)

    async def hand_in(self) -> None:
        """Give the archive the versions that it lacks; what fails is tried again after the next round.

        Raises Refused only if the archive knows another leader.
        """
        try:
            for sealed in self._ledger.versions[self.archived :]:
                await self._hand_in(sealed)
                self.archived = sealed.document.version
                self._ledger.settle(self.archived)
        except DipacoError as error:
            if isinstance(error, Refused) and error.reason == Reason.NOT_LEADER:
                raise
            log.info("the archive has version %d of %s: %s", self.archived, self._ledger.module, error)

    def prune(self, payloads: dict[int, list[str]]) -> None:
        """Drop what no trainer's base needs any more and the archive has; the archive itself keeps everything.

        `payloads` are the digests of what each version counts; what is dropped leaves it.
        """
        if self._node.keeps_everything:
            return
        keep = self._node.run.config.rounds.staleness + 2
        newest = min(self.archived, max(self._ledger.head.version - keep, 0))
        for sealed in self._ledger.versions[self._pruned : newest]:
            version = sealed.document
            names = [ref.digest for ref in (version.snapshot, version.state, version.update) if ref is not None]
            for name in names + payloads.pop(version.version, []):
                self._node.store.drop(name)
            self._pruned = version.version

    async def _meet(self) -> tuple[int, list[Sealed[ModuleVersion]]]:
        """The newest version that is the same in both, and what the archive has after it."""
        module, ours = self._ledger.module, self._ledger.versions
        for common in range(len(ours), 0, -1):
            theirs = await self._archive.chain(module, after=common - 1)
            if theirs and theirs[0].document.digest == ours[common - 1].document.digest:
                return common, theirs[1:]
        return 0, await self._archive.chain(module, after=0)

    async def _hand_in(self, sealed: Sealed[ModuleVersion]) -> None:
        """The version, after what it counts: the archive needs both to show how it was made."""
        known = {contribution.id for contribution in await self._archive.open_contributions(self._ledger.module)}
        for share in sealed.document.shares:
            spent = self._ledger.spent.get(share.contribution)
            if spent is not None and spent.id not in known:
                payload = self._node.store.get(spent.document.payload.digest)
                if payload is None:
                    raise IntegrityError(f"the payload of {spent.id[:8]}, which the archive lacks, is not here either")
                await self._archive.keep_contribution(spent, payload, term=self._term)
        refs = (sealed.document.update, sealed.document.state)
        blobs = [self._node.store.get(ref.digest) for ref in refs if ref is not None]
        await self._archive.keep_version(sealed, [blob for blob in blobs if blob is not None])
