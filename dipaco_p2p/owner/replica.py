"""What one mirror, or the archive, has of a leader's chain, and how it gets the rest.

A contribution is brought to it as it comes; versions in order, all of them to an archive and the newest to a mirror. A
holder that lacks what a version counts gets it once more.
"""

from __future__ import annotations

import asyncio
import math

from ..errors import DipacoError, IntegrityError, Refused, Unreachable
from ..node.ledger import RemoteLedger
from ..protocol.documents import Contribution, Custody, ModuleVersion, Sealed, is_cosigned
from ..protocol.gate import Appraisal
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId, short
from .chain import ModuleChain
from .kept_appraisals import read_kept
from .recovery import recover

AHEAD = 4
"""Versions whose contributions are brought to a holder that was away while it makes an earlier one again."""
BRINGERS = 2
"""Versions whose contributions are on their way at once, or a leader's uploads at the holder would oust each other."""


class _Lacking(IntegrityError):
    """Nobody who lives has what a version was made of."""


class Unfit(Refused):
    """A holder refuses one contribution for a reason in it. Anybody can write such a one, so the holder is not deaf."""


class Replica:
    """What one mirror, or the archive, has of our chain."""

    def __init__(self, chain: ModuleChain, peer: PeerId, *, is_archive: bool) -> None:
        node = self._node = chain.node
        self._chain = chain
        self._ledger = chain.ledger
        self.peer = peer
        self.is_archive = is_archive
        self.is_welcome = False
        """Whether it has our chain, as far as we know."""
        self.final = 0
        """The newest version of which it knows that it is final."""
        self.behind_s = math.inf
        """Since when it has not taken the versions that we bring."""
        self._said: set[str] = set()
        self._was_away = False
        """Whether it lacked what an older version counts: then it lacks the same of the next ones."""
        self.is_unprovable = False
        """Whether it is the coordinator's archive, and lacks contributions of our chain that nobody alive has."""
        self.is_diverged = False
        """Whether it is that archive, and has another branch than we. Then that one goes on."""
        self._remote = RemoteLedger(node, peer, chain.module)
        self._version: int | None = None
        """The newest version that it has, once it is known."""
        self._branch = 0
        """Counts the branches that were ours."""
        self._is_last_word = is_archive and peer == node.run.manifest.author
        """Only the coordinator's archive can make a version final; another one may lack what it likes."""
        self._lock = asyncio.Lock()
        self._bringing: dict[str, asyncio.Task[None]] = {}
        """By version, what it counts and is on its way."""
        self._bringers = asyncio.Semaphore(BRINGERS)

    @property
    def is_light(self) -> bool:
        """Whether it is an archive that takes contributions only where it asks for them."""
        beat = self._node.watch.heartbeats.get(self.peer)
        return self.is_archive and beat is not None and beat.light

    async def keep(self, sealed: Sealed[Contribution], payload: bytes) -> Custody:
        try:
            return await self._remote.keep(sealed, payload, is_new=True)
        except Refused as refused:
            if refused.reason in (Reason.BUSY, Reason.INTERNAL, Reason.UNKNOWN_METHOD, Reason.NOT_LEADER):
                raise
            raise Unfit(str(refused), reason=refused.reason) from None

    async def welcome(self) -> None:
        """Have it take over our chain."""
        async with self._lock:
            await self._remote.follow()
            self.is_welcome, self._said = True, set()

    @property
    def unsaid(self) -> list[Sealed[Appraisal]]:
        """What was said against work, and is not with it yet."""
        return [sealed for sealed in self._chain.evidence.said() if sealed.id not in self._said]

    async def bring(self) -> None:
        """Hand in what was said against work, and the versions that it lacks: all of them to the archive, the newest to
        a mirror, which fetches the others itself."""
        self.behind_s = min(self.behind_s, self._node.clock.now_s())
        async with self._lock:
            if unsaid := self.unsaid:
                await self._remote.keep_evidence(unsaid)
                self._said.update(sealed.id for sealed in unsaid)
            if self._version is None and self.is_archive:
                self._version = await self._compare()
            brought = -1
            while brought < (head := self._ledger.head.version):  # one more may be made meanwhile
                await self._bring_to(head)
                brought = head
            if not self.is_archive and self.final < self._ledger.final:
                await self._tell_final()
            self.behind_s = math.inf

    async def _bring_to(self, head: int) -> None:
        branch = self._branch
        begin = (self._version or 0) if self.is_archive else max(head - 1, 0)
        try:
            for sealed in self._ledger.versions[begin:head]:
                is_ours = self._node.peer == sealed.document.author
                is_news = self._version != sealed.document.version > self._ledger.final
                if self.is_archive or (is_ours and is_news):
                    await self._hand_in(sealed)
                    if self._branch != branch:
                        raise Unreachable(f"{self._chain.module} went over to another branch meanwhile")
                    self._version, self.is_welcome = sealed.document.version, True
        finally:
            await self._stop_bringing()

    async def _tell_final(self) -> None:
        """Until it knows that a version is final, a mirror keeps what it was made of."""
        final, signature = self._ledger.final, self._final_signature()
        self.final = await self._remote.tell_final(final, signature)
        if self.final < final:
            await self._remote.follow()
            self.final = await self._remote.tell_final(final, signature)

    async def _compare(self) -> int:
        """How much of our chain the archive has. Its signatures are ours from now on, and where it has the same version
        from another leader, that document is. Raises Refused when it has another version, or more than we have."""
        theirs = await self._remote.chain(after=self._ledger.final)
        for sealed in theirs:
            if not self._chain.adopt(sealed):
                self.is_diverged = self._is_last_word
                raise Refused(f"the archive has another version {sealed.document.version}", reason=Reason.STALE_BASE)
        self.is_diverged = False
        return self._ledger.final if not theirs else theirs[-1].document.version

    def reset(self) -> None:
        """We have gone over to another branch: what it had of ours is of no use."""
        self._version, self.is_welcome, self.is_unprovable = None, False, False
        self._branch += 1

    async def _hand_in(self, sealed: Sealed[ModuleVersion]) -> None:
        try:
            signature = await self._cosign(sealed)
        except DipacoError as error:
            self._version, self.is_welcome, self._was_away = None, False, False  # it is asked first once more
            if self.is_archive and isinstance(error, Refused) and error.reason == Reason.MALFORMED:
                self.is_unprovable = self._is_last_word  # such as one that says its outer state is lost, when it is not
            raise
        if not is_cosigned(sealed, self.peer, signature):
            raise IntegrityError(f"the cosignature of ...{short(self.peer)} is not valid")
        place = sealed.document.version - 1
        if place < len(self._ledger.versions) and self._ledger.versions[place].document == sealed.document:
            self._ledger.cosign(place + 1, {self.peer: signature})

    async def _cosign(self, sealed: Sealed[ModuleVersion]) -> str:
        is_late = sealed.document.version < self._ledger.head.version - self._node.run.config.rounds.staleness
        if not (is_late and self._was_away):
            try:
                signature = await self._ask_cosign(sealed)
                self.is_unprovable = False
                return signature
            except Refused as refused:
                if refused.reason != Reason.CONTRIBUTION_MISSING:
                    raise
        self._was_away = is_late
        await self._bring_work(sealed)
        return await self._ask_cosign(sealed)

    async def _bring_work(self, sealed: Sealed[ModuleVersion]) -> None:
        """Bring what a version counts, and begin with that of the next ones: a holder that was away lacks it too, and
        gets it while it makes this one again."""
        number = sealed.document.version
        for one in self._ledger.versions[number - 1 : number + AHEAD if self._was_away else number]:
            if one.id not in self._bringing:
                self._bringing[one.id] = asyncio.create_task(self._bring_work_of(one))
        try:
            await self._bringing.pop(sealed.id)
            self.is_unprovable = False
        except DipacoError as error:
            self.is_unprovable = self._is_last_word and isinstance(error, _Lacking)
            raise

    async def _bring_work_of(self, sealed: Sealed[ModuleVersion]) -> None:
        """Raises _Lacking if nobody has it."""
        async with self._bringers:
            await recover(self._chain, {share.contribution for share in sealed.document.shares})
            try:
                await read_kept(self._node, sealed.document, holders=sorted(self._node.watch.heartbeats))
            except Refused as refused:
                raise _Lacking(f"{refused}, nor with anybody") from None
            for share in sealed.document.shares:
                contribution = self._ledger.kept.get(share.contribution)
                payload = self._node.store.get(contribution.document.payload.digest) if contribution else None
                if contribution is None or payload is None:
                    raise _Lacking(f"contribution {share.contribution[:8]}, which it lacks, is not here either")
                await self._remote.keep(contribution, payload, is_new=False)

    async def _stop_bringing(self) -> None:
        bringing = [*self._bringing.values()]
        self._bringing.clear()
        for task in bringing:
            task.cancel()
        await asyncio.gather(*bringing, return_exceptions=True)

    async def _ask_cosign(self, sealed: Sealed[ModuleVersion]) -> str:
        return await self._remote.cosign(sealed, final=self._ledger.final, final_signature=self._final_signature())

    def _final_signature(self) -> str:
        """The coordinator's cosignature of the newest final version; empty if it is its author."""
        final = self._ledger.versions[self._ledger.final - 1] if self._ledger.final else None
        return final.cosignatures.get(self._node.run.manifest.author, "") if final is not None else ""
