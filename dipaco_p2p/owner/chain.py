"""One module at this peer: its ledger, its outer state, its blobs, and the contributions it may still owe to somebody.

- A **mirror** takes contributions and versions from the leader of the newest term that names it, and from nobody else.
  It makes every version again from its contributions before it cosigns, so that a leader cannot pass off another one.
- It follows the leader, also to another branch: the leader is who decides between branches (leader.py). Contributions
  that the other branch lacks are then `lost`, and submitted once more (leadership.py).
- A **trainer** keeps the chain of the modules that it follows, and of the newest version the snapshot and the update.
  Others fetch these from it, too; and after the loss of a whole group the chain goes on from whoever has it.
- An **archive** (archive.py) keeps everything for ever, and its coordinator's signature makes a version final.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from ..canonical import Parts
from ..errors import DipacoError, Refused, SwarmError, Unreachable
from ..node.ledger import Ledger, RemoteLedger
from ..node.node import Member, fetch_kept
from ..node.reading import vouched
from ..node.shardings import learn_shardings
from ..program.files import reach
from ..program.tasks import as_long_as
from ..protocol.admission import judge
from ..protocol.documents import Contribution, ModuleVersion, Sealed, cosign, is_cosigned
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId, short
from ..protocol.versions import bases_after, blobs_of, is_final
from ..topology import ModuleId
from .evidence import Evidence
from .final import found_of, is_counted, left_behind
from .handover import Handover
from .intake import admission_rules
from .kept_appraisals import Appraiser, copy_kept, measure_nothing, names_of, read_kept
from .originals import Originals
from .outer_state import KeptState
from .rollback import due_after, undo_again
from .room import Room, surplus
from .timing import Timing
from .version import Admitted, Made, PayloadLost, made_and_kept, make_again, stored

log = logging.getLogger(__name__)

T = TypeVar("T")


class Chains:
    """The chains that this peer keeps, one per module of the run, each opened when it is first asked for."""

    def __init__(self, node: Member) -> None:
        self.node, self._chains = node, dict[ModuleId, ModuleChain]()
        node.uploads.is_proven, node.watch.workers = self.is_proven, lambda: self.workers
        self.on_expired: Callable[[Sealed[Contribution], str], None] = lambda sealed, reason: None
        """Told of every contribution that expires here, and why."""
        self.appraise: Appraiser = measure_nothing
        """This peer's own judge."""
        self.earlier: frozenset[PeerId] = frozenset(node.run.manifest.workers)
        """Whose work the stage before counts."""
        self.room = Room(node, lambda: (chain.ledger for chain in self._chains.values()), is_proven=self.is_proven)
        self.kept: Callable[[ModuleId], Sequence[Sealed[ModuleVersion]]] = lambda module: ()
        """The chain of a module as this peer keeps it for others (keeper.py), also of those that it does not follow."""
        self.find_kept: Callable[[str], bytes | None] = lambda contribution: None
        """The same of a contribution, by its id."""

    def __getitem__(self, module: ModuleId) -> ModuleChain:
        if module not in self._chains:
            self._chains[module] = ModuleChain(self, module)
        return self._chains[module]

    def all(self) -> list[ModuleChain]:
        """Those of all modules of the run."""
        return [self[module] for module in self.node.run.topology.modules()]

    @property
    def workers(self) -> frozenset[PeerId]:
        """Whose work the last versions count, as far as they are here; of modules without any, the manifest's."""
        reached, chains = self.node.watch.reached, self._chains.values()
        known = (chain.ledger for chain in chains if chain.ledger.versions or not reached(chain.module))
        return frozenset().union(*(ledger.workers for ledger in known))

    @property
    def forgers(self) -> frozenset[PeerId]:
        """Whom any chain here found to have forged, and has wait: the work was of all modules of a path."""
        return frozenset().union(*(chain.ledger.standings.waiting for chain in self._chains.values()))

    def find_stored(self, contribution: str) -> bytes | None:
        """The canonical bytes of a contribution that a chain here keeps, or that this peer keeps for others."""
        for chain in self._chains.values():
            if found := chain.ledger.open.get(contribution) or chain.ledger.spent.get(contribution):
                return found.to_bytes()
        return self.find_kept(contribution)

    def is_proven(self, peer: PeerId) -> bool:
        """Whether `peer` has worked, in this stage as far as that is known here, or in the one before."""
        return peer in self.earlier or any(one.ledger.standings.has_worked(peer) for one in self._chains.values())

    def drop_payloads(self, names: Iterable[str]) -> None:
        """Drop these blobs, but for payloads that some chain keeps: anybody can send another's once more."""
        named = {one.document.payload.digest for chain in self._chains.values() for one in chain.ledger.kept.values()}
        for name in [name for name in names if name not in named]:
            self.node.store.drop(name)


class ModuleChain:
    """What this peer keeps of one module, as its leader, its mirror or its trainer."""

    keeps_everything = False
    """Whether nothing here is ever dropped, and every version was made here: archive.py."""

    def __init__(self, chains: Chains, module: ModuleId, ledger: Ledger | None = None) -> None:
        self.node = chains.node
        self.module = module
        self.ledger = Ledger(self.node.run, self.node.store, module) if ledger is None else ledger
        self.state = KeptState(self.node)
        self.originals = Originals(self.node.run, module)
        self.evidence = Evidence(self.node, self.ledger)
        self.timing = Timing(self.node, module, is_proven=chains.is_proven)
        self.handover = Handover(self.node, is_proven=chains.is_proven)
        self.lost: set[str] = set()
        """Contributions that are here, and that the chain which goes on may lack."""
        self.chains = chains
        self._lock = asyncio.Lock()
        self._pruned, self._settled = 0, 0
        """How many versions, from the first on, have no blob here but perhaps what judges said, and not even that."""
        self._orphans: set[str] = set()
        """Blobs of versions that were given up."""

    # -- what this peer does itself

    def add(self, sealed: Sealed[Contribution]) -> None:
        """Keep a contribution whose payload is in the store."""
        self.ledger.add(sealed)
        self.node.uploads.claim(sealed.document.payload.digest)

    def bring_back(self, sealed: Sealed[Contribution]) -> None:
        """Before a receipt for a contribution that is admitted or counted: it says that it is on this disk, but a
        version that we took over ready made came without what it counts. Raises Refused without the payload."""
        is_final = self.ledger.counted.get(sealed.id, math.inf) <= self.ledger.final
        if not is_final and not self.keeps(sealed.id):
            if self.node.store.size(sealed.document.payload.digest) is None:
                raise Refused("upload the payload first", reason=Reason.PAYLOAD_MISSING)
            self.add(sealed)

    def append(self, sealed: Sealed[ModuleVersion], made: Made) -> None:
        """Keep the next version, which was made here."""
        for ref, parts in made.blobs:
            self.node.store.keep(ref, *parts)  # where it is since it was made
            self.node.uploads.claim(ref.digest)  # somebody may have sent it before
        self.ledger.append(sealed)
        self.state.note(sealed.document, made.state)

    def append_vouched(self, sealed: Sealed[ModuleVersion]) -> None:
        """Keep the next version as somebody else has made it again."""
        self.ledger.append(sealed)

    def note(self, versions: Sequence[Sealed[ModuleVersion]], snapshot: Parts, update: bytes | None = None) -> None:
        """What we have fetched as a trainer, the parameters of the last of it, and if it was fetched its update: kept
        unless we own the module, for then we know better. Others read it from us."""
        if self.is_owner:
            return
        ledger = self.ledger
        known = {(sealed.document.version, sealed.document.digest) for sealed in ledger.versions}
        versions = [one for one in versions if (one.document.version, one.document.digest) not in known]
        begin = versions[0].document.version - 1 if versions else 0
        if not versions or begin > ledger.head.version or begin < ledger.final:
            return
        if begin < ledger.head.version:  # we went over to another branch
            self._leave(begin)
        newest = versions[-1].document
        self.node.store.keep(newest.snapshot, *snapshot)
        if newest.update is not None and update is not None:
            self.node.store.keep(newest.update, update)
        for sealed in versions:
            ledger.append(sealed)
        self._prune(keep=1)

    @property
    def is_owner(self) -> bool:
        """Whether we are in the module's group."""
        grant = self.node.mandates.grant(self.module)
        return grant is not None and self.node.peer in grant.group

    def give_up(self, *, to: int = 0) -> None:
        """Leave the versions that are not final, after `to`: nobody can show what they were made of, or wants them."""
        self._leave(max(to, self.ledger.final))

    def settle(self) -> None:
        """Drop what is final, what final versions left behind, and what no base needs any more. An archive keeps it.
        What the newest versions count stays as long as their parameters if keepers find it with their owners alone."""
        for sealed in self.ledger.undone:
            self.expire(sealed, Reason.ROLLED_BACK)
        run, ledger, staleness = self.node.run, self.ledger, self.node.run.config.rounds.staleness
        for sealed in left_behind(ledger, ledger.final, staleness=staleness):
            if sealed.id not in self.lost:  # it is still to be offered to a leader, and reported with its reason
                self._leave_behind(sealed)
        for sealed in surplus(run, ledger, lost=self.lost, is_proven=self.chains.is_proven):
            self._leave_behind(sealed)
        hands_over = self.is_owner and not self.keeps_everything
        self._drop_payloads(ledger.settle(self.handover.until(ledger) if hands_over else ledger.final))
        self.evidence.settle()
        self.originals.forget(oldest_base=ledger.head.version - staleness)
        self._prune(keep=run.config.rounds.versions_kept)

    def _leave_behind(self, sealed: Sealed[Contribution]) -> None:
        """Its leader has told what became of it, unless it is lost."""
        if sealed.id in self.lost:
            return self.expire(sealed, Reason.STALE_BASE)
        self.node.history.add("left_behind", module=str(self.module), id=sealed.id, found=found_of(self.ledger, sealed))
        self.forget(sealed)

    def expire(self, sealed: Sealed[Contribution], reason: str) -> None:
        """A contribution that may not count, or cannot: it is reported, and kept no longer."""
        self.node.history.add("expired", module=str(self.module), id=sealed.id, reason=reason)
        self.chains.on_expired(sealed, reason)
        self.forget(sealed)

    def forget(self, sealed: Sealed[Contribution]) -> None:
        """Keep a contribution no longer: a final version counts it, or none will."""
        self.ledger.drop(sealed.id)
        self._drop_payloads([sealed.document.payload.digest])

    # -- what the leader asks

    def keep_contribution(self, sender: PeerId, sealed: Sealed[Contribution]) -> None:
        """Keep a contribution, its payload uploaded before; only from the leader."""
        document = sealed.document
        if document.run != self.node.run.id:
            raise Refused("a contribution to another run", reason=Reason.WRONG_RUN)
        if document.module != self.module:
            raise Refused(f"a contribution to {document.module}, not {self.module}", reason=Reason.WRONG_MODULE)
        self.require_leader(sender)
        if self.node.store.size(document.payload.digest) != document.payload.size:
            raise Refused(f"upload blob {document.payload.digest[:8]} first", reason=Reason.PAYLOAD_MISSING)
        self.add(sealed)
        self.timing.arrived(document)
        reach("mirror: contribution on disk, not acknowledged")

    async def keep_version(self, sender: PeerId, sealed: Sealed[ModuleVersion]) -> str:
        """Keep the leader's next version, after making it again; our cosignature. The same again changes nothing."""
        return await self._for_leader(sender, partial(self._keep_next, sender, sealed))

    async def _keep_next(self, sender: PeerId, sealed: Sealed[ModuleVersion]) -> str:
        ledger, version = self.ledger, sealed.document
        if self._has(sealed):
            await self._make_sure(sealed, source=sender)
        else:
            if ledger.head.digest != version.parent or ledger.head.version + 1 != version.version:
                await self._follow(RemoteLedger(self.node, sender, self.module), until=version.version - 1)
            await self._take(sealed, source=sender)
            self.timing.opened(version.version)
        signature = cosign(self.node.swarm.signer, sealed)
        ledger.cosign(version.version, {self.node.peer: signature})
        self.settle()
        return signature

    async def _for_leader(self, sender: PeerId, work: Callable[[], Awaitable[T]]) -> T:
        """What `work` gives on this chain while `sender` leads: a newer grant ends it, or whoever gives what is fetched
        a little at a time would keep the next leader out."""
        require = partial(self.require_leader, sender)
        require()
        async with self._lock:  # others may have had their turn before
            return await as_long_as(require, work, self.node.clock)

    def note_final(self, version: int, signature: str) -> None:
        """The leader says that the coordinator has cosigned the version after the final ones. Of a later one this says
        nothing of those before it: the coordinator may have signed other documents of the same parameters."""
        ledger, coordinator = self.ledger, self.node.run.manifest.author
        if version == ledger.final + 1 <= ledger.head.version:
            if is_cosigned(ledger.versions[version - 1], coordinator, signature):
                ledger.cosign(version, {coordinator: signature})
                self.settle()

    def adopt(self, sealed: Sealed[ModuleVersion]) -> bool:
        """As `Ledger.adopt`; what the document counts no more is submitted again."""
        before = set(self.ledger.open)
        is_adopted = self.ledger.adopt(sealed)
        self.lost.update(self.ledger.open.keys() - before)
        return is_adopted

    async def follow(self, peer: PeerId) -> None:
        """Take over the chain of `peer`, its blobs and its open contributions. Raises DipacoError."""
        async with self._lock:
            await self._follow(RemoteLedger(self.node, peer, self.module), until=None)

    async def look_back(self, peer: PeerId) -> None:
        """We own the module no more, and count contributions in versions that are not final: `peer`, which leads it or
        is the coordinator, may have gone on from before them. Raises DipacoError."""
        remote = RemoteLedger(self.node, peer, self.module)
        if self.is_owner:
            return
        self.settle()
        if not self.ledger.spent or (await remote.branch()).final <= self.ledger.final:
            return
        async with self._lock:
            if not self.is_owner:  # still
                await self._adopt_final(remote)
                self.settle()

    async def is_counted(self, sealed: Sealed[Contribution], peer: PeerId) -> bool | None:
        """Whether final versions count it, those that `peer` shows too (final.py). Raises DipacoError."""
        return await is_counted(self.node, self.ledger, sealed, None if self.keeps_everything else peer)

    async def welcome(self, sender: PeerId) -> None:
        """The leader has us as a mirror now: take over its chain. Raises DipacoError."""
        remote = RemoteLedger(self.node, sender, self.module)
        await self._for_leader(sender, partial(self._follow, remote, until=None))

    # -- versions of others

    def require_leader(self, sender: PeerId) -> None:
        """Raise Refused unless it leads, and we are in its group."""
        if (reason := self.node.decrees.reason(sender)) is not None:
            raise Refused(f"banned by the coordinator: {reason}", reason=Reason.BANNED)
        if (leader := self.node.mandates.leader(self.module)) != sender:
            term = self.node.mandates.term(self.module)
            raise Refused(f"{self.module} is led by ...{short(leader)} in term {term}", reason=Reason.NOT_LEADER)
        if not self.is_owner:
            # It leads, and may have asked before its group changed: it is no reason to lead no more.
            raise Refused(f"the group of {self.module} is without us", reason=Reason.BUSY)

    def _require_led_by(self, leader: PeerId) -> None:
        """Before a chain is changed, after what took time: somebody may have taken the module over meanwhile, perhaps
        we ourselves, and who begins to lead must find it as it will stay."""
        if self.node.mandates.leader(self.module) != leader:
            raise Refused(f"{self.module} is led by ...{short(leader)} no more", reason=Reason.NOT_LEADER)

    def _has(self, sealed: Sealed[ModuleVersion]) -> bool:
        """Whether this very version is here."""
        version = sealed.document.version
        return 0 < version <= self.ledger.head.version and self.ledger.versions[version - 1].document == sealed.document

    async def _make_sure(self, sealed: Sealed[ModuleVersion], *, source: PeerId) -> None:
        """What is here may have been taken over ready made; or a crash came between making and signing it."""
        ledger, version = self.ledger, sealed.document.version
        if self.node.peer in ledger.versions[version - 1].cosignatures:
            return
        if version != ledger.head.version or version == ledger.final:
            raise Refused(f"version {version} of {self.module} was not made here", reason=Reason.STALE_BASE)
        ledger.truncate(version - 1)
        await self._take(sealed, source=source)

    async def _take(self, sealed: Sealed[ModuleVersion], *, source: PeerId) -> None:
        """The next version, made again."""
        self.ledger.check(sealed)
        self.node.mandates.require_granted(sealed.document)
        led_by = self.node.mandates.leader(self.module)
        if sealed.document.is_fresh and self.state.is_here(self.ledger.head):
            raise Refused("the outer state before this version is not lost: it is here", reason=Reason.MALFORMED)
        made = await self._make_again(sealed.document, source=source)
        reach("mirror: version made again, not on disk")
        self._require_led_by(led_by)
        self.append(sealed, made)
        reach("mirror: version on disk, not cosigned")

    async def _make_again(self, version: ModuleVersion, *, source: PeerId) -> Made:
        node, parent, state = self.node, self.ledger.head, None
        if version.rollback is not None:
            return await undo_again(node, parent, version, source=source)
        if not version.is_fresh:
            state = await self.state.read(parent, holders=[source])
        if state is None:
            state = await self.state.read_params(parent, holders=[source])
        await learn_shardings(node)
        admitted = [self._admitted(share.contribution) for share in version.shares]
        said = await read_kept(node, version, holders=[source])
        norms, standings = self.ledger.norms, self.ledger.standings
        make = partial(
            make_again, node.run, parent, state, admitted, version, norms=norms, standings=standings, appraisals=said
        )
        try:
            async with node.averaging:
                return await made_and_kept(make, node.store)
        except PayloadLost as lost:  # whoever asks can give it once more
            raise Refused(str(lost), reason=Reason.CONTRIBUTION_MISSING) from None

    def _admitted(self, contribution: str) -> Admitted:
        """A contribution that a version counts: it must be here, and one that may count."""
        sealed = self.ledger.kept.get(contribution)
        if sealed is None or not self.keeps(contribution):
            raise Refused(f"contribution {contribution[:8]} is not here", reason=Reason.CONTRIBUTION_MISSING)
        rules = admission_rules(self.node.run, self.ledger, contributed={})
        verdict = judge(sealed.document, sender=sealed.document.author, contribution_id=sealed.id, rules=rules)
        if verdict.reason is not None:
            raise Refused(f"contribution {contribution[:8]} may not count: {verdict.detail}", reason=verdict.reason)
        return stored(self.node.run, self.node.store, self.module, sealed)

    def keeps(self, contribution: str) -> bool:
        """Whether a contribution is here with its payload."""
        sealed = self.ledger.kept.get(contribution)
        return sealed is not None and self.node.store.size(sealed.document.payload.digest) is not None

    async def _follow(self, remote: RemoteLedger, *, until: int | None) -> None:
        ledger, led_by = self.ledger, self.node.mandates.leader(self.module)
        common, theirs = await remote.meet(ledger.versions, until=until)
        shown = self._vouched(theirs)
        if shown or not self.keeps_everything:  # first: who stops here still has a whole chain
            await self._fetch_head(shown, remote.peer)
        kept = await remote.kept()
        self._require_led_by(led_by)
        if common < ledger.head.version and (theirs or until is not None):
            self._leave(common)
        if theirs and led_by == self.node.peer:  # whoever made these has not heard of what we gave receipts for
            self.lost.update(ledger.open)
        if not self.keeps_everything and ledger.final < ledger.head.version:
            await self._adopt_final(remote)  # first: what follows may count what ours do
            self._require_led_by(led_by)
        for sealed in shown:
            self.append_vouched(sealed)
        await self.copy(kept, remote.peer)
        if not self.keeps_everything:
            await copy_kept(self.node, [one for one in shown if one.document.version > ledger.final], remote.peer)
        for sealed in theirs[len(shown) :]:
            self._require_led_by(led_by)
            await self._take(sealed, source=remote.peer)
            ledger.cosign(sealed.document.version, {self.node.peer: cosign(self.node.swarm.signer, sealed)})
        self.settle()

    async def _adopt_final(self, remote: RemoteLedger) -> None:
        """Have final versions as the coordinator signed them: the same parameters may have come of another leader's
        document here. Where it signed others, our branch ends."""
        ledger, led_by, coordinator = self.ledger, self.node.mandates.leader(self.module), self.node.run.manifest.author
        theirs = await remote.chain(after=ledger.final, until=ledger.head.version)
        self._require_led_by(led_by)
        for sealed in theirs:
            number = sealed.document.version
            if not ledger.final < number <= ledger.head.version or not is_final(sealed, coordinator=coordinator):
                break
            if not self.adopt(sealed):
                self._leave(number - 1)
        told = [one.document.version for one in theirs if is_final(one, coordinator=coordinator)]
        for seed in self.node.watch.coordinators()[:1] if max(told, default=0) > ledger.final else ():
            if seed != remote.peer:  # the one that told us may lack signatures in between, too: the archive has all
                await self._adopt_final(RemoteLedger(self.node, seed, self.module))

    def _vouched(self, versions: list[Sealed[ModuleVersion]]) -> list[Sealed[ModuleVersion]]:
        """Those that a trainer would take. Others are made again here: who believes us believes what came before."""
        return vouched(self.node, versions)

    def _leave(self, version: int) -> None:
        """Leave our branch after `version`; what the coordinator has signed is never left: then theirs has to end."""
        ledger = self.ledger
        if version < ledger.final:
            raise Refused(f"version {ledger.final} of {self.module} here is final", reason=Reason.STALE_BASE)
        log.warning("%s: versions %d to %d were given up", self.module, version + 1, ledger.head.version)
        self.node.history.add("gave_up", module=str(self.module), after=version)
        for sealed in ledger.versions[version:]:  # another branch may name the same blobs
            self._orphans.update(blobs_of(sealed.document), names_of([sealed]))
        self._pruned, self._settled = min(self._pruned, version), min(self._settled, version)
        ledger.truncate(version)
        self.lost.update(ledger.open)
        reach("mirror: branch left, contributions not submitted again")

    async def copy(self, contributions: Iterable[Sealed[Contribution]], peer: PeerId) -> None:
        """Keep what another holder keeps and we lack, so that two have it again; of strangers' work so much as there is
        room for: whoever keeps it offers it to the module's leader."""
        for sealed in contributions:
            if sealed.document.module != self.module or self.keeps(sealed.id):
                continue
            try:
                self.chains.room.require_share(sealed)
                await fetch_kept(self.node, sealed.document.payload, holders=[peer])
                self.add(sealed)
            except DipacoError as error:
                log.info("%s: contribution %s was not copied: %s", self.module, sealed.id[:8], error)
                if isinstance(error, Unreachable):  # it would be as slow with the next one
                    return

    async def _fetch_head(self, shown: Sequence[Sealed[ModuleVersion]], peer: PeerId) -> None:
        """Have what the next version is made from; a rollback that is due is made from an earlier one."""
        try:
            await self.state.fetch(shown[-1].document if shown else self.ledger.head, peer)
        except SwarmError:
            if due_after(self.node, self.ledger, shown) is None:
                raise

    def _drop_payloads(self, names: Iterable[str]) -> None:
        self.chains.drop_payloads(names)

    def _prune(self, *, keep: int) -> None:
        """Drop the blobs of all versions but the newest `keep`, as nobody's base: what a peer keeps is bounded."""
        versions, oldest = self.ledger.versions, max(0, self.ledger.head.version - keep)
        settled, held = min(oldest, self.ledger.final), bases_after(versions, self.ledger.final)
        names = {name for sealed in versions[self._pruned : oldest] for name in blobs_of(sealed.document)}
        names |= self._orphans | names_of(versions[self._settled : settled])
        names -= {name for sealed in versions[oldest:] for name in blobs_of(sealed.document)}
        self._orphans, self._settled = names & held, max(self._settled, settled)
        for name in names - self._orphans:
            self.node.store.drop(name)
        self._pruned = max(self._pruned, oldest)
