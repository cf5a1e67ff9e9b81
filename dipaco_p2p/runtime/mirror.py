"""The chains that this peer keeps: of modules that it leads or mirrors, and of those that it only follows.

- A **mirror** takes contributions and versions from the leader of the newest term that names it, and from nobody else.
  It makes every version again from its contributions before it cosigns, so that a leader cannot pass off another one.
- It follows the leader, also to another branch: the leader is who decides between branches (owner.py). Contributions
  that the other branch lacks are then `lost`, and submitted once more (ownership.py).
- A **trainer** keeps the chain of the modules that it follows, and of the newest version the snapshot and the update.
  Others fetch these from it, too; and after the loss of a whole group the chain goes on from whoever has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence

from ..canonical import Parts
from ..errors import BlobMissing, DipacoError, Refused
from ..protocol.admission import Reason, judge
from ..protocol.branches import is_final
from ..protocol.documents import Contribution, ModuleVersion, Sealed, cosign, is_cosigned
from ..protocol.signing import PeerId, short
from ..topology import ModuleId
from .faults import reach
from .intake import admission_rules
from .ledger import Ledger
from .node import Node
from .outer_states import OuterStates
from .payloads import PayloadLost, stored
from .pruning import Pruning
from .recompute import Admitted, Made, made_and_kept, make_again
from .remote import RemoteLedger
from .rollbacks import undo_again
from .shardings import learn_shardings
from .transfer import fetch_kept

log = logging.getLogger(__name__)

MISSING = "contribution-missing"


class Mirror:
    """All ledgers of one peer; `keeps_everything` is for the coordinator's archive, which drops nothing, ever."""

    keeps_everything = False

    def __init__(self, node: Node) -> None:
        self._node = node
        self._ledgers: dict[ModuleId, Ledger] = {}
        self._locks: dict[ModuleId, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.states = OuterStates(node)
        self._pruning = Pruning(node.store)
        self.lost: dict[ModuleId, set[str]] = defaultdict(set)
        """Contributions that are here, and that the chain which goes on may lack."""
        self.on_expired: Callable[[Sealed[Contribution], str], None] = lambda sealed, reason: None
        """Told of every contribution that expires here, and why."""

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
        for ref, parts in made.blobs:
            self._node.store.keep(ref, *parts)  # where it is since it was made
            self._node.keep_upload(ref.digest)  # somebody may have sent it before
        self.ledger(sealed.document.module).append(sealed)
        self.states.note(sealed.document, made.state)

    def append_vouched(self, ledger: Ledger, sealed: Sealed[ModuleVersion]) -> None:
        """Keep the next version as somebody else has made it again."""
        ledger.append(sealed)

    def note(self, versions: Sequence[Sealed[ModuleVersion]], snapshot: Parts, update: bytes | None = None) -> None:
        """What we have fetched as a trainer, the parameters of the last of it, and if it was fetched its update: kept
        unless we own the module, for then we know better. Others read it from us."""
        module = versions[-1].document.module
        if self.is_owner(module):
            return
        ledger = self.ledger(module)
        known = {(sealed.document.version, sealed.document.digest) for sealed in ledger.versions}
        versions = [one for one in versions if (one.document.version, one.document.digest) not in known]
        begin = versions[0].document.version - 1 if versions else 0
        if not versions or begin > ledger.head.version or begin < ledger.final:
            return
        if begin < ledger.head.version:  # we went over to another branch
            self._truncate(ledger, begin)
        newest = versions[-1].document
        self._node.store.keep(newest.snapshot, *snapshot)
        if newest.update is not None and update is not None:
            self._node.store.keep(newest.update, update)
        for sealed in versions:
            ledger.append(sealed)
        self._pruning.versions(ledger, keep=1)

    def is_owner(self, module: ModuleId) -> bool:
        """Whether we are in the module's group."""
        grant = self._node.watch.mandates.grant(module)
        return self.keeps_everything or (grant is not None and self._node.peer in grant.group)

    def give_up(self, module: ModuleId) -> None:
        """Leave the versions that are not final: nobody can show what they were made of."""
        self._truncate(self.ledger(module), self.ledger(module).final)

    def settle(self, module: ModuleId) -> None:
        """Drop what is final, and what no base needs any more. An archive keeps it."""
        ledger = self.ledger(module)
        for sealed in ledger.undone:
            self.expire(sealed, Reason.ROLLED_BACK)
        payloads = ledger.settle()
        if not self.keeps_everything:
            self._pruning.payloads(payloads, self._ledgers.values())
            self._pruning.versions(ledger, keep=self._node.run.config.rounds.staleness + 2)

    def expire(self, sealed: Sealed[Contribution], reason: str) -> None:
        """A contribution that may not count, or cannot: it is reported, and kept no longer."""
        module, payload = sealed.document.module, sealed.document.payload.digest
        self._node.history.add("expired", module=str(module), id=sealed.id, reason=reason)
        self.on_expired(sealed, reason)
        self.ledger(module).drop(sealed.id)
        if not self.keeps_everything:
            self._pruning.payloads([payload], self._ledgers.values())

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
            self._require_leader(module, sender)  # still: others may have had their turn before
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

    async def recover(self, ledger: Ledger, contributions: Collection[str]) -> set[str]:
        """Look for contributions that are not here, or whose payload is lost here: others of the group kept them, too.
        What nobody gave."""
        lacking = {id_ for id_ in contributions if not self._keeps(ledger, id_)}
        for peer in sorted(self._node.watch.heartbeats) if lacking else ():
            if peer == self._node.peer or not lacking:
                continue
            try:
                kept = await RemoteLedger(self._node, peer, ledger.module).kept()
            except DipacoError as error:
                log.info("%s: ...%s does not say what it keeps: %s", ledger.module, short(peer), error)
                continue
            await self._copy(ledger, [sealed for sealed in kept if sealed.id in lacking], peer)
            lacking = {id_ for id_ in lacking if not self._keeps(ledger, id_)}
        return lacking

    def note_final(self, module: ModuleId, version: int, signature: str) -> None:
        """The leader says that the coordinator has cosigned the version after the final ones. Of a later one this says
        nothing of those before it: the coordinator may have signed other documents of the same parameters."""
        ledger, coordinator = self.ledger(module), self._node.run.manifest.author
        if version == ledger.final + 1 <= ledger.head.version:
            if is_cosigned(ledger.versions[version - 1], coordinator, signature):
                ledger.cosign(version, {coordinator: signature})
                self.settle(module)

    def adopt(self, ledger: Ledger, sealed: Sealed[ModuleVersion]) -> bool:
        """As `Ledger.adopt`; what the document counts no more is submitted again."""
        before = set(ledger.open)
        is_adopted = ledger.adopt(sealed)
        self.lost[ledger.module].update(ledger.open.keys() - before)
        return is_adopted

    async def follow(self, peer: PeerId, module: ModuleId) -> None:
        """Take over the chain of `peer`, its blobs and its open contributions. Raises DipacoError."""
        async with self._locks[module]:
            await self._follow(RemoteLedger(self._node, peer, module), until=None)

    async def look_back(self, peer: PeerId, module: ModuleId) -> None:
        """We own the module no more, and count contributions in versions that are not final: `peer`, which leads it or
        is the coordinator, may have gone on from before them. Raises DipacoError."""
        ledger, remote = self.ledger(module), RemoteLedger(self._node, peer, module)
        if self.is_owner(module):
            return
        self.settle(module)
        if not ledger.spent or (await remote.branch()).final <= ledger.final:
            return
        async with self._locks[module]:
            await self._adopt_final(ledger, remote)
            self.settle(module)

    async def welcome(self, sender: PeerId, module: ModuleId) -> None:
        """The leader has us as a mirror now: take over its chain. Raises DipacoError."""
        self._require_leader(module, sender)
        await self.follow(sender, module)

    # -- versions of others

    def _require_leader(self, module: ModuleId, sender: PeerId) -> None:
        if (reason := self._node.watch.decrees.reason(sender)) is not None:
            raise Refused(f"banned by the coordinator: {reason}", reason=Reason.BANNED)
        leader = self._led_by(module)
        if leader != sender:
            term = self._node.watch.mandates.term(module)
            raise Refused(f"{module} is led by ...{short(leader)} in term {term}", reason=Reason.NOT_LEADER)
        if not self.is_owner(module):
            raise Refused(f"the group of {module} is without us", reason=Reason.NOT_LEADER)

    def _led_by(self, module: ModuleId) -> PeerId:
        grant = self._node.watch.mandates.grant(module)
        return grant.leader if grant else self._node.run.manifest.author

    def _require_led_by(self, leader: PeerId, ledger: Ledger) -> None:
        """Before a chain is changed, after what took time: somebody may have taken the module over meanwhile, perhaps
        we ourselves, and who begins to lead must find it as it will stay."""
        if self._led_by(ledger.module) != leader:
            detail = f"{ledger.module} is led by ...{short(leader)} no more"
            raise Refused(detail, reason=Reason.NOT_LEADER)

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
        led_by = self._led_by(ledger.module)
        if sealed.document.is_fresh and self.states.is_here(ledger.head):
            raise Refused("the outer state before this version is not lost: it is here", reason=Reason.MALFORMED)
        made = await self._make_again(ledger, sealed.document, source=source)
        reach("mirror: version made again, not on disk")
        self._require_led_by(led_by, ledger)
        self.append(sealed, made)
        reach("mirror: version on disk, not cosigned")

    async def _make_again(self, ledger: Ledger, version: ModuleVersion, *, source: PeerId) -> Made:
        parent, state = ledger.head, None
        if version.rollback is not None:
            return await undo_again(self._node, parent, version, source=source)
        if not version.is_fresh:
            state = await self.states.read(parent, holders=[source])
        if state is None:
            state = await self.states.read_params(parent, holders=[source])
        await learn_shardings(self._node)
        admitted = [self._admitted(ledger, share.contribution) for share in version.shares]
        try:
            async with self._node.averaging:
                run, store = self._node.run, self._node.store
                return await made_and_kept(lambda: make_again(run, parent, state, admitted, version), store)
        except PayloadLost as lost:  # whoever asks can give it once more
            raise Refused(str(lost), reason=MISSING) from None

    def _admitted(self, ledger: Ledger, contribution: str) -> Admitted:
        """A contribution that a version counts: it must be here, and one that may count."""
        sealed = ledger.kept.get(contribution)
        if sealed is None or not self._keeps(ledger, contribution):
            raise Refused(f"contribution {contribution[:8]} is not here", reason=MISSING)
        rules = admission_rules(self._node.run, ledger, contributed={})
        verdict = judge(sealed.document, sender=sealed.document.author, contribution_id=sealed.id, rules=rules)
        if verdict.reason is not None:
            raise Refused(f"contribution {contribution[:8]} may not count: {verdict.detail}", reason=verdict.reason)
        return stored(self._node.run, self._node.store, ledger.module, sealed)

    def _keeps(self, ledger: Ledger, contribution: str) -> bool:
        """Whether a contribution is here with its payload."""
        sealed = ledger.kept.get(contribution)
        return sealed is not None and self._node.store.size(sealed.document.payload.digest) is not None

    async def _follow(self, remote: RemoteLedger, *, until: int | None) -> None:
        ledger, led_by = self.ledger(remote.module), self._led_by(remote.module)
        common, theirs = await remote.meet(ledger.versions, until=until)
        vouched = self._vouched(theirs)
        if vouched or not self.keeps_everything:  # first: who stops here still has a whole chain
            await self._fetch_head(vouched[-1].document if vouched else ledger.head, remote.peer)
        kept = await remote.kept()
        self._require_led_by(led_by, ledger)
        if common < ledger.head.version and (theirs or until is not None):
            self._truncate(ledger, common)
        if (
            not self.keeps_everything and ledger.final < ledger.head.version
        ):  # first: what follows may count what ours do
            await self._adopt_final(ledger, remote)
            self._require_led_by(led_by, ledger)
        for sealed in vouched:
            self.append_vouched(ledger, sealed)
        await self._copy(ledger, kept, remote.peer)
        for sealed in theirs[len(vouched) :]:
            await self._take(ledger, sealed, source=remote.peer)
            signature = cosign(self._node.swarm.signer, sealed)
            ledger.cosign(sealed.document.version, {self._node.peer: signature})
        self.settle(ledger.module)

    async def _adopt_final(self, ledger: Ledger, remote: RemoteLedger) -> None:
        """Have final versions as the coordinator signed them: the same parameters may have come of another leader's
        document here. Where it signed others, our branch ends."""
        led_by = self._led_by(ledger.module)
        theirs = await remote.chain(after=ledger.final, until=ledger.head.version)
        self._require_led_by(led_by, ledger)
        for sealed in theirs:
            number, coordinator = sealed.document.version, self._node.run.manifest.author
            if not ledger.final < number <= ledger.head.version or not is_final(sealed, coordinator=coordinator):
                break
            if not self.adopt(ledger, sealed):
                self._truncate(ledger, number - 1)
        told = [one.document.version for one in theirs if is_final(one, coordinator=self._node.run.manifest.author)]
        for seed in self._node.watch.coordinators()[:1] if max(told, default=0) > ledger.final else ():
            if seed != remote.peer:  # who told may lack signatures in between, as we do: the archive has all
                await self._adopt_final(ledger, RemoteLedger(self._node, seed, ledger.module))

    def _vouched(self, versions: list[Sealed[ModuleVersion]]) -> list[Sealed[ModuleVersion]]:
        """Those of a chain that somebody besides their maker has made again, who was entitled to: the others have to be
        made again here. An archive makes everything again and leaves nothing out, but for what the coordinator had made
        again before: its disk was lost, or this archive is a later one."""
        coordinator = self._node.run.manifest.author
        if self.keeps_everything:
            return list(itertools.takewhile(lambda sealed: is_final(sealed, coordinator=coordinator), versions))
        for count in range(len(versions), 0, -1):
            sealed = versions[count - 1]
            known = self._node.watch.mandates.peers(sealed.document.module)
            if (sealed.cosignatures.keys() - {sealed.document.author}) & known or is_final(
                sealed, coordinator=coordinator
            ):
                return versions[:count]
        return []

    def _truncate(self, ledger: Ledger, version: int) -> None:
        """Leave our branch. What the coordinator has signed is never left: then it is theirs that has to end."""
        is_last_word = self.keeps_everything and self._node.peer == self._node.run.manifest.author
        if is_last_word or version < ledger.final:
            raise Refused(f"version {ledger.final} of {ledger.module} here is final", reason=Reason.STALE_BASE)
        log.warning("%s: versions %d to %d were given up", ledger.module, version + 1, ledger.head.version)
        self._node.history.add("gave_up", module=str(ledger.module), after=version)
        self._pruning.given_up(ledger.module, ledger.versions[version:])
        ledger.truncate(version)
        self.lost[ledger.module].update(ledger.open)
        reach("mirror: branch left, contributions not submitted again")

    async def _copy(self, ledger: Ledger, contributions: Iterable[Sealed[Contribution]], peer: PeerId) -> None:
        """Keep what another holder keeps and we lack, so that two have it again."""
        for sealed in contributions:
            if sealed.document.module != ledger.module or self._keeps(ledger, sealed.id):
                continue
            try:
                await fetch_kept(self._node, sealed.document.payload, holders=[peer])
                self.add(sealed)
            except DipacoError as error:
                log.info("%s: contribution %s was not copied: %s", ledger.module, sealed.id[:8], error)

    async def _fetch_head(self, version: ModuleVersion, peer: PeerId) -> None:
        """What the next version is made from; a trainer, from whom we may have it, has no outer state."""
        await fetch_kept(self._node, version.snapshot, holders=[peer])
        if version.state is not None:
            with contextlib.suppress(BlobMissing):
                await fetch_kept(self._node, version.state, holders=[peer])
