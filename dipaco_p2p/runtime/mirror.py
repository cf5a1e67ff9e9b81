"""The chains that this peer keeps: of modules that it leads or mirrors, and of those that it only follows.

- A **mirror** takes contributions and versions from the leader of the newest term that names it, and from nobody else.
  It makes every version again from its contributions before it cosigns, so that a leader cannot pass off another one.
- It follows the leader, also to another branch: the leader is who decides between branches (owner.py). Contributions
  that the other branch lacks are then `lost`, and submitted once more (ownership.py).
- A **trainer** keeps the chain and the newest snapshot of the modules that it follows. So after the loss of a whole
  group the chain goes on from whoever has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence

from ..core.codec import decode_module
from ..core.compress import decode_compressed
from ..core.outer import OuterState, decode_state
from ..errors import BlobMissing, DipacoError, IntegrityError, Refused
from ..protocol.admission import Reason, judge
from ..protocol.branches import is_final
from ..protocol.documents import BlobRef, Contribution, Grant, ModuleVersion, Sealed, cosign, is_cosigned
from ..protocol.signing import PeerId, short
from ..topology import ModuleId
from .faults import reach
from .intake import admission_rules
from .ledger import Ledger
from .node import Node
from .recompute import Admitted, Made, make_again
from .remote import RemoteLedger
from .shardings import learn_shardings
from .transfer import fetch

log = logging.getLogger(__name__)

MISSING = "contribution-missing"
STATE_TRIES = 3
RETRY_S = 0.5


class Mirror:
    """All ledgers of one peer; `keeps_everything` is for the coordinator's archive, which drops nothing, ever."""

    keeps_everything = False

    def __init__(self, node: Node) -> None:
        self._node = node
        self._ledgers: dict[ModuleId, Ledger] = {}
        self._locks: dict[ModuleId, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._states: dict[ModuleId, tuple[str, OuterState]] = {}
        """The outer state after the newest version that was made here, by its digest."""
        self.lost: dict[ModuleId, set[str]] = defaultdict(set)
        """Contributions that are here, and that the chain which goes on may lack."""

    def ledger(self, module: ModuleId) -> Ledger:
        """What is kept of `module`; raises IntegrityError if it was damaged and must be whole."""
        if module not in self._ledgers:
            run, store = self._node.run, self._node.store
            self._ledgers[module] = Ledger(run, store, module, must_be_whole=self.keeps_everything)
        return self._ledgers[module]

    # -- what this peer does itself

    def add(self, sealed: Sealed[Contribution]) -> None:
        """Keep a contribution whose payload is in the store."""
        self.ledger(sealed.document.module).add(sealed)
        self._node.keep_upload(sealed.document.payload.digest)

    def append(self, sealed: Sealed[ModuleVersion], made: Made) -> None:
        """Keep the next version, which was made here."""
        for blob in (made.snapshot, made.update, made.state_blob):
            self._node.keep_upload(self._node.store.put(blob).digest)  # somebody may have sent it before
        self.ledger(sealed.document.module).append(sealed)
        self._states[sealed.document.module] = (sealed.document.digest, made.state)

    def note(self, versions: Sequence[Sealed[ModuleVersion]], snapshot: bytes) -> None:
        """What we have fetched as a trainer, and the parameters of the last of it: kept unless we own the module, for
        then we know better."""
        module = versions[-1].document.module
        if self.is_owner(module):
            return
        ledger = self.ledger(module)
        known = {sealed.document.digest for sealed in ledger.versions}
        versions = [sealed for sealed in versions if sealed.document.digest not in known]
        begin = versions[0].document.version - 1 if versions else 0
        if not versions or begin > ledger.head.version or begin < ledger.final:
            return
        if begin < ledger.head.version:  # we went over to another branch
            self._truncate(ledger, begin)
        self._node.store.put(snapshot)
        for sealed in versions:
            ledger.append(sealed)
        self._prune(ledger, keep=1)

    def is_owner(self, module: ModuleId) -> bool:
        """Whether we are in the module's group."""
        grant = self._node.watch.mandates.grant(module)
        return self.keeps_everything or (grant is not None and self._node.peer in grant.group)

    def give_up(self, module: ModuleId) -> None:
        """Leave the versions that are not final: nobody can show what they were made of."""
        self._truncate(self.ledger(module), self.ledger(module).final)

    async def state(self, version: ModuleVersion, *, holders: Sequence[PeerId] = ()) -> OuterState | None:
        """Parameters, momentum and residual after `version`; None if the last two are nowhere to be had.

        Raises BlobMissing if even the parameters are not.
        """
        digest, known = self._states.get(version.module, ("", None))
        if known is not None and digest == version.digest:
            return known
        params = decode_module(await self._fetch(version.snapshot, holders), self._node.run.layout(version.module))
        if version.state is None:
            return OuterState.fresh(params)
        try:
            momentum, residual = decode_state(await self._fetch(version.state, holders), params.size)
        except (BlobMissing, IntegrityError) as error:
            log.warning("%s: the outer state of version %d is lost: %s", version.module, version.version, error)
            return None
        return OuterState(params=params, momentum=momentum, residual=residual)

    async def state_patiently(self, version: ModuleVersion, *, holders: Sequence[PeerId]) -> OuterState | None:
        """As `state`, after some tries: momentum must not be lost with a message."""
        for _ in range(STATE_TRIES - 1):
            state = await self.state(version, holders=holders)
            if state is not None:
                return state
            await self._node.clock.sleep(RETRY_S)
        return await self.state(version, holders=holders)

    async def params(self, version: ModuleVersion, *, holders: Sequence[PeerId] = ()) -> OuterState:
        """A fresh outer state at `version`, for when its own is lost."""
        data = await self._fetch(version.snapshot, holders)
        return OuterState.fresh(decode_module(data, self._node.run.layout(version.module)))

    def settle(self, module: ModuleId) -> None:
        """Drop what is final, and what no base needs any more. An archive keeps it."""
        ledger = self.ledger(module)
        payloads = ledger.settle()
        if not self.keeps_everything:
            for name in payloads:
                self._node.store.drop(name)
            self._prune(ledger, keep=self._node.run.config.rounds.staleness + 2)

    # -- what the leader asks

    def keep_contribution(self, sender: PeerId, sealed: Sealed[Contribution]) -> None:
        """Keep a contribution, its payload uploaded before; only from the leader."""
        document = sealed.document
        if document.run != self._node.run.id:
            raise Refused("a contribution to another run", reason=Reason.WRONG_RUN)
        self._require_leader(document.module, sender)
        if self._node.store.size(document.payload.digest) != document.payload.size:
            raise Refused(f"upload blob {document.payload.digest[:8]} first", reason="payload-missing")
        self.add(sealed)
        reach("mirror: contribution on disk, not acknowledged")

    async def keep_version(self, sender: PeerId, sealed: Sealed[ModuleVersion]) -> str:
        """Keep the leader's next version, after making it again; our cosignature. The same again changes nothing."""
        module = sealed.document.module
        self._require_leader(module, sender)
        async with self._locks[module]:
            ledger = self.ledger(module)
            if self._has(ledger, sealed):
                await self._make_sure(ledger, sealed, source=sender)
            else:
                if ledger.head.digest != sealed.document.parent or ledger.head.version + 1 != sealed.document.version:
                    await self._follow(RemoteLedger(self._node, sender, module), until=sealed.document.version - 1)
                await self._take(ledger, sealed, source=sender)
            signature = cosign(self._node.swarm.signer, sealed)
            ledger.cosign(sealed.document.version, {self._node.peer: signature})
            self.settle(module)
            return signature

    async def recover(self, ledger: Ledger, version: ModuleVersion) -> None:
        """Look for the contributions of a version that we have not: others of the group kept them, too."""
        lacking = {share.contribution for share in version.shares} - ledger.kept.keys()
        for peer in sorted(self._node.watch.heartbeats) if lacking else ():
            if peer == self._node.peer or not lacking:
                continue
            try:
                kept = await RemoteLedger(self._node, peer, ledger.module).kept()
            except DipacoError as error:
                log.info("%s: ...%s does not say what it keeps: %s", ledger.module, short(peer), error)
                continue
            await self._copy(ledger, [sealed for sealed in kept if sealed.id in lacking], peer)
            lacking -= ledger.kept.keys()

    def note_final(self, module: ModuleId, version: int, signature: str) -> None:
        """The leader says that the coordinator has cosigned a version."""
        ledger, coordinator = self.ledger(module), self._node.run.manifest.author
        if ledger.final < version <= ledger.head.version:
            if is_cosigned(ledger.versions[version - 1], coordinator, signature):
                ledger.cosign(version, {coordinator: signature})
                self.settle(module)

    async def follow(self, peer: PeerId, module: ModuleId) -> None:
        """Take over the chain of `peer`, its blobs and its open contributions. Raises DipacoError."""
        async with self._locks[module]:
            await self._follow(RemoteLedger(self._node, peer, module), until=None)

    async def welcome(self, sender: PeerId, module: ModuleId) -> None:
        """The leader has us as a mirror now: take over its chain. Raises DipacoError."""
        self._require_leader(module, sender)
        await self.follow(sender, module)

    def learn_grant(self, module: ModuleId, sealed: Sealed[Grant]) -> bool:
        """Whether a grant that a caller shows counts."""
        return sealed.document.module == module and self._node.watch.mandates.believes(module, sealed)

    # -- versions of others

    def _require_leader(self, module: ModuleId, sender: PeerId) -> None:
        grant = self._node.watch.mandates.grant(module)
        leader = grant.leader if grant else self._node.run.manifest.author
        if leader != sender:
            term = grant.term if grant else 0
            raise Refused(f"{module} is led by ...{short(leader)} in term {term}", reason=Reason.NOT_LEADER)
        if not self.is_owner(module):
            raise Refused(f"the group of {module} is without us", reason=Reason.NOT_LEADER)

    def _has(self, ledger: Ledger, sealed: Sealed[ModuleVersion]) -> bool:
        """Whether this very version is here."""
        version = sealed.document.version
        return 0 < version <= ledger.head.version and ledger.versions[version - 1].document == sealed.document

    async def _make_sure(self, ledger: Ledger, sealed: Sealed[ModuleVersion], *, source: PeerId) -> None:
        """What is here may have been taken over ready made; or a crash came between making and signing it. An archive
        makes everything itself."""
        version = sealed.document.version
        if self.keeps_everything or self._node.peer in ledger.versions[version - 1].cosignatures:
            return
        if version != ledger.head.version or version == ledger.final:
            raise Refused(f"version {version} of {ledger.module} was not made here", reason=Reason.STALE_BASE)
        ledger.truncate(version - 1)
        await self._take(ledger, sealed, source=source)

    async def _take(self, ledger: Ledger, sealed: Sealed[ModuleVersion], *, source: PeerId) -> None:
        """The next version, made again."""
        ledger.check(sealed)
        if sealed.document.is_fresh and self._has_state(ledger.head):
            raise Refused("the outer state before this version is not lost: it is here", reason=Reason.MALFORMED)
        made = await self._make_again(ledger, sealed.document, source=source)
        reach("mirror: version made again, not on disk")
        self.append(sealed, made)
        reach("mirror: version on disk, not cosigned")

    async def _make_again(self, ledger: Ledger, version: ModuleVersion, *, source: PeerId) -> Made:
        parent, state = ledger.head, None
        if not version.is_fresh:
            state = await self.state(parent, holders=[source])
        if state is None:
            state = await self.params(parent, holders=[source])
        await learn_shardings(self._node)
        admitted = [self._admitted(ledger, share.contribution) for share in version.shares]
        return await asyncio.to_thread(make_again, self._node.run, parent, state, admitted, version)

    def _admitted(self, ledger: Ledger, contribution: str) -> Admitted:
        """A contribution that a version counts: it must be here, and one that may count."""
        sealed = ledger.kept.get(contribution)
        payload = self._node.store.get(sealed.document.payload.digest) if sealed is not None else None
        if sealed is None or payload is None:
            raise Refused(f"contribution {contribution[:8]} is not here", reason=MISSING)
        rules = admission_rules(self._node.run, ledger, contributed={})
        verdict = judge(sealed.document, sender=sealed.document.author, contribution_id=sealed.id, rules=rules)
        if verdict.reason is not None:
            raise Refused(f"contribution {contribution[:8]} may not count: {verdict.detail}", reason=verdict.reason)
        gradient = decode_compressed(payload, size=self._node.run.layout(ledger.module).size)
        return Admitted(sealed, gradient)

    async def _follow(self, remote: RemoteLedger, *, until: int | None) -> None:
        ledger = self.ledger(remote.module)
        common, theirs = await self._meet(ledger, remote, until)
        vouched = self._vouched(theirs)
        if not self.keeps_everything:  # first: who stops here still has a whole chain
            await self._fetch_head(vouched[-1].document if vouched else ledger.head, remote.peer)
        kept = await remote.kept()
        if common < ledger.head.version and (theirs or until is not None):
            self._truncate(ledger, common)
        for sealed in vouched:
            ledger.append(sealed)
        await self._copy(ledger, kept, remote.peer)
        for sealed in theirs[len(vouched) :]:
            await self._take(ledger, sealed, source=remote.peer)
            signature = cosign(self._node.swarm.signer, sealed)
            ledger.cosign(sealed.document.version, {self._node.peer: signature})
        self.settle(ledger.module)

    def _vouched(self, versions: list[Sealed[ModuleVersion]]) -> list[Sealed[ModuleVersion]]:
        """Those of a chain that somebody besides their maker has made again, who was entitled to: the others have to be
        made again here. An archive makes everything again, and leaves nothing out."""
        if self.keeps_everything:
            return []
        for count in range(len(versions), 0, -1):
            sealed = versions[count - 1]
            known = self._node.watch.mandates.peers(sealed.document.module)
            if (sealed.cosignatures.keys() - {sealed.document.author}) & known or is_final(
                sealed, coordinator=self._node.run.manifest.author
            ):
                return versions[:count]
        return []

    def _truncate(self, ledger: Ledger, version: int) -> None:
        """Leave our branch. What the coordinator has signed is never left: then it is theirs that has to end."""
        if self.keeps_everything or version < ledger.final:
            raise Refused(f"version {ledger.final} of {ledger.module} here is final", reason=Reason.STALE_BASE)
        log.warning("%s: versions %d to %d were given up", ledger.module, version + 1, ledger.head.version)
        ledger.truncate(version)
        self.lost[ledger.module].update(ledger.open)
        reach("mirror: branch left, contributions not submitted again")

    async def _meet(
        self, ledger: Ledger, remote: RemoteLedger, until: int | None
    ) -> tuple[int, list[Sealed[ModuleVersion]]]:
        """The newest version that is the same in both, and what they have after it, up to `until`."""
        ours, theirs = ledger.versions, (await remote.branch()).version
        end = theirs if until is None else min(theirs, until)
        common, step = min(len(ours), end), 1
        while common:
            page = await remote.page(after=common - 1)
            if page and page[0].document.digest == ours[common - 1].document.digest:
                break
            common, step = max(common - step, 0), 2 * step
        chain = await remote.chain(after=common, until=end)
        for sealed in list(chain):
            if len(ours) > common and ours[common].document.digest == sealed.document.digest:
                common += 1
                chain.pop(0)
        return common, chain

    async def _copy(self, ledger: Ledger, contributions: Iterable[Sealed[Contribution]], peer: PeerId) -> None:
        """Keep what another holder keeps and we lack, so that two have it again."""
        for sealed in contributions:
            if sealed.document.module != ledger.module or sealed.id in ledger.kept:
                continue
            try:
                self._node.store.put(await self._fetch(sealed.document.payload, [peer]))
                self.add(sealed)
            except DipacoError as error:
                log.info("%s: contribution %s was not copied: %s", ledger.module, sealed.id[:8], error)

    def _has_state(self, version: ModuleVersion) -> bool:
        return version.state is None or self._node.store.size(version.state.digest) is not None

    async def _fetch_head(self, version: ModuleVersion, peer: PeerId) -> None:
        """What the next version is made from; a trainer, from whom we may have it, has no outer state."""
        await self._fetch(version.snapshot, [peer])
        if version.state is not None:
            with contextlib.suppress(BlobMissing):
                await self._fetch(version.state, [peer])

    async def _fetch(self, ref: BlobRef, holders: Sequence[PeerId]) -> bytes:
        others = [*holders, *self._node.watch.seeds()]
        return await fetch(self._node, ref, holders=list(dict.fromkeys(others)), keep=True)

    def _prune(self, ledger: Ledger, *, keep: int) -> None:
        """Drop the blobs of versions that nobody's base is any more; from the newest that may go, until one is gone."""
        for sealed in reversed(ledger.versions[: max(0, ledger.head.version - keep)]):
            version = sealed.document
            refs = [ref for ref in (version.snapshot, version.update, version.state) if ref is not None]
            if all(self._node.store.size(ref.digest) is None for ref in refs):
                return
            for ref in refs:
                self._node.store.drop(ref.digest)
