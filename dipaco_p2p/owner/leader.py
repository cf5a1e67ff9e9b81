"""The leader of one module: takes contributions in, closes rounds, makes and publishes versions.

Order that a crash must not break: a contribution is on this disk and on another one before its receipt is signed; a
version is on this disk before anybody hears of it, and made again by a mirror before trainers do. Only if nobody else
is alive that could keep a copy, this disk alone must do.

Two leaders of a module, after a partition or a race, make two branches. The senior one (protocol/grants.py) goes on:
it takes over the better branch (protocol/versions.py), and what the other one had counted is open again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from ..core.outer.outer_step import OuterState
from ..errors import Refused, Unreachable
from ..node.ledger import head_record
from ..node.shardings import learn_shardings
from ..program.files import reach
from ..program.tasks import SingleFlight, changed_or_later, repeat
from ..protocol.documents import Contribution, Custody, Grant, ModuleVersion, Receipt, Sealed, seal
from ..protocol.grants import Mandate
from ..protocol.reasons import Reason
from ..protocol.rounds import Entry, OpenRound, Round
from ..protocol.signing import PeerId
from ..protocol.verdicts import Verdicts
from ..protocol.versions import Branch, Known
from .chain import ModuleChain
from .expelling import Expelling
from .intake import Intake, Measured, receipt_for, require_claim
from .recovery import recover_payload
from .replication import Replication, tried
from .rollback import due, prepare, undo
from .takeover import Takeover
from .telling import told_paths, told_round, told_version
from .trials import Trials
from .version import Made, PayloadLost, StepNotFinite, made_and_kept, make_version

log = logging.getLogger(__name__)

TICK_S = 0.5
CATCH_UP_S = 5.0


class Leader:
    """Leads one module under its mandate, from `start` to `stop`."""

    def __init__(self, chain: ModuleChain) -> None:
        node = self._node = chain.node
        self.module = chain.module
        self._chain = chain
        self._ledger = chain.ledger
        self._replication = Replication(chain)
        self._intake = Intake(node.run, node.store, self._ledger, chain.originals)
        self._mandate: Mandate = node.mandates.newest(self.module)
        self._state: OuterState | None = None
        self._is_fresh = False
        """Whether the outer state was lost, so that the next version says so."""
        self._verdicts: Verdicts | None = None
        """What judges said of the work in the round that closes."""
        self._round = self._new_round()
        self._lock = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._arrived = asyncio.Event()  # a contribution was admitted, perhaps the last that the round waits for
        self.trials = Trials(chain, limit_s=chain.timing.deadline_s, on_over=self._arrived.set)
        self._expelling = Expelling(chain)
        self._coming = SingleFlight[tuple[Custody, ...]]()
        self._catch_up_s, self._seen_s = 0.0, node.clock.now_s()
        self._is_leading, self._was_frozen, self._published = False, False, 0
        """What trainers may see: a version is cosigned first, if anybody lives who can."""

    @property
    def head(self) -> ModuleVersion:
        return self._ledger.head

    @property
    def grant(self) -> Grant:
        """Under which we lead."""
        return self._mandate[-1].document

    @property
    def is_leading(self) -> bool:
        """Until we stop, or somebody else is granted the module: a version of a later term says so, too."""
        grant, head = self._node.mandates.grant(self.module), self.head
        return self._is_leading and grant is not None and grant.leader == self._node.peer and head.term <= grant.term

    @property
    def deaf(self) -> set[PeerId]:
        """Mirrors that live and take nothing: others should be there in their place."""
        return self._replication.deaf()

    @property
    def diverged_archives(self) -> list[PeerId]:
        return self._replication.diverged

    @property
    def is_complete(self) -> bool:
        """Whether the last version is made, and safe without us."""
        return self._ledger.is_complete and self._replication.is_final and self._replication.is_told

    async def start(self, *, last_group: Collection[PeerId] = (), is_patient: bool = False) -> None:
        """Gather what the last group and others have, take their open contributions over, and announce the head.

        Raises Unreachable if `is_patient` and there should be a newer version than all that can be had now.
        """
        newest = await Takeover(self._chain).gather(last_group)
        if is_patient and self.head.version < newest:
            raise Unreachable(f"version {newest} of {self.module} is not to be had, only {self.head.version}")
        await self._reopen(is_patient=is_patient)
        self._is_leading = True
        self._require_leading()  # to gather takes a while
        await self._announce()
        self._replication.welcome()

    async def run(self) -> None:
        """Close rounds as they become ready, until cancelled, stopped, or somebody else is granted the module."""
        async with asyncio.TaskGroup() as tasks:  # side by side: no round waits for a mirror that is frozen
            again = partial(repeat, clock=self._node.clock, every_s=TICK_S, is_wanted=self._goes_on)
            rounds = self._look_again, self._roll_back, self._tick, self._take_back
            tasks.create_task(again(*rounds, sooner=self._arrived))
            # Also when all is done: a mirror that joins has to be told.
            tasks.create_task(again(self._catch_up, self._expelling.gather))

    def _goes_on(self) -> bool:
        """Whether we still lead. Once we do not, it is for good, even if the newest mandate names us again: one of our
        loops has ended, and rounds would never close."""
        self._is_leading = self.is_leading
        return self._is_leading

    async def stop(self) -> None:
        """Admit nothing more; what was admitted is where the next leader finds it."""
        was_leading, self._is_leading = self._is_leading, False
        self.trials.close()
        with contextlib.closing(self._replication), contextlib.suppress(Refused):
            async with self._lock:
                if was_leading and not self._replication.is_final:
                    await self._replication.hand_in()
        await self._wake()

    async def renew(self) -> None:
        """The group has changed, and we still lead it: say so, and let new mirrors take over our chain."""
        self._mandate = self._node.mandates.newest(self.module)
        async with self._lock:
            await self._announce()
        self._replication.welcome()

    async def merge(self, peer: PeerId, branch: Branch) -> None:
        """Take over the branch of another leader if it is better than ours. Raises DipacoError."""
        async with self._lock:
            if await Takeover(self._chain).take(peer, branch):
                await self._reopen()
                await self._announce()
                self._replication.begin_anew()

    # -- what trainers ask

    async def contribute(
        self, sender: PeerId, sealed: Sealed[Contribution], *, by: PeerId | None = None
    ) -> Sealed[Receipt]:
        """Admit a contribution whose payload is uploaded; raises Refused with the reason. Idempotent.

        `by` says who forwards it: whoever owned the module may have given a receipt for it."""
        self._require_leading()
        promised = by if by in self._node.mandates.peers(self.module) else None
        decreed = self._node.decrees.state
        decreed = replace(decreed, banned={}) if promised else decreed  # a ban takes back no receipt
        self._intake.judge(sender, sealed, decreed=decreed)
        custody: tuple[Custody, ...] = ()
        if not self._intake.has(sealed.id):
            self.trials.require(sealed.document)
            with self._intake.arriving(sealed):
                custody = await self._coming.do(sealed.id, partial(self._receive, sealed, promised))
            if by is None:
                self._chain.timing.arrived(sealed.document)
        else:
            self._chain.bring_back(sealed)
        reach("owner: admitted, receipt not signed")
        signed = receipt_for(sealed, self._node.swarm.signer, self._ledger, term=self.grant.term, custody=custody)
        receipt = self._intake.receipts.setdefault(sealed.id, signed)
        self._node.history.add("receipt_signed", module=str(self.module), id=sealed.id, round=receipt.document.round)
        reach("owner: receipt signed, not sent")
        return receipt

    async def versions_after(self, known: Known, *, wait_s: float) -> list[Sealed[ModuleVersion]]:
        """What follows `known`, as far as it is published; waits up to `wait_s` seconds for there to be something.

        Raises Refused for what this chain does not have: the caller followed a branch that was given up."""
        self._ledger.require(known)
        clock, deadline_s, was_refused = self._node.clock, self._node.clock.now_s() + wait_s, self._round.was_refused
        while self._published <= known.version and self.is_leading and clock.now_s() < deadline_s:
            if self._round.was_refused and not was_refused:  # a path is free again: who waits has time for it
                break
            await changed_or_later(self._changed, clock, deadline_s - clock.now_s())
        self._require_leading()
        self._ledger.require(known)  # still: the branch may have changed meanwhile
        return self._ledger.versions[known.version : self._published]

    def open_round(self) -> OpenRound:
        """What is in, of the version that trainers may see; what auditors caught may be done by others meanwhile."""
        self._require_leading()
        caught = self.trials.caught(self._intake.works)
        open_, versions, timing = self._round.but(caught), self._ledger.versions, self._chain.timing
        refused = [*self.trials.refused_lately(), *caught]
        return told_round(self._node, open_, versions, published=self._published, timing=timing, refused=refused)

    def receipts(self) -> dict[str, Sealed[Receipt]]:
        """By contribution: of the open round and the ones before."""
        return self._intake.receipts if self.is_leading else {}

    def _require_leading(self) -> None:
        if not self.is_leading:
            raise Refused(f"{self.module} is not led here any more", reason=Reason.NOT_LEADER)

    async def _receive(self, sealed: Sealed[Contribution], promised: PeerId | None) -> tuple[Custody, ...]:
        """Measure it, keep it, admit it; who holds it as well."""
        self._node.invitations.require(sealed.document.author, self._chain.chains.is_proven, promised=promised)
        try:
            measured = await self._measure(sealed)
        except PayloadLost:
            raise Refused("upload the payload first", reason=Reason.PAYLOAD_MISSING) from None
        self._intake.judge(sealed.document.author, sealed, norm=measured.norm)
        if not promised:
            refused = self.trials.refused_lately() + self.trials.caught(self._intake.works)
            await require_claim(self._node, self._intake, sealed.document, self._chain.timing, refused)
            self._chain.chains.room.require_signed(self._ledger)
        host = None if promised else self._node.swarm.host(sealed.document.author)
        self._chain.chains.room.require_share(sealed, host=host)
        self._node.store.keep(sealed.document.payload, measured.payload)  # to make room it may have been dropped
        self._intake.require_original(sealed, measured, has_receipt=promised is not None)
        with tried(self._chain, sealed, stays=lambda: self._intake.has(sealed.id) or not self.is_leading):
            custody = await self._keep(sealed, measured.payload)
            async with self._lock:
                self._require_leading()
                self._intake.judge(sealed.document.author, sealed)  # the round may have closed meanwhile
                self._admit(sealed, measured.norm)
        return custody

    async def _measure(self, sealed: Sealed[Contribution]) -> Measured:
        async with self._node.admitting:
            return await asyncio.to_thread(self._intake.measure, sealed)

    async def _keep(self, sealed: Sealed[Contribution], payload: bytes) -> tuple[Custody, ...]:
        try:
            return await self._replication.keep(sealed, payload)
        except Refused as refused:
            self._depose(refused)
            raise

    def _admit(self, sealed: Sealed[Contribution], norm: float) -> None:
        if not self._intake.has(sealed.id):  # a call that the network doubled may come after its twin was counted
            self._intake.admit(sealed, norm)
            document = sealed.document
            self._node.uploads.claim(document.payload.digest)
            is_late, now_s = document.base_version < self.head.version, self._node.clock.now_s()
            self._round = self._round.contributed(document.path, document.author, now_s=now_s, is_late=is_late)
            self.trials.begin(sealed)
            self._arrived.set()

    # -- rounds and versions

    async def _look_again(self) -> None:
        """After a freeze our claim to lead may be over: look before anything is done that only a leader may do."""
        last_s, self._seen_s = self._seen_s, self._node.clock.now_s()
        if (slept_s := self._seen_s - last_s) > self._node.run.config.liveness.heartbeat_ttl_s:
            log.warning("%s: nothing was done here for %.0f s", self.module, slept_s)
            await self._node.watch.read_heads(self.module)
            self._is_leading &= self._node.mandates.newest(self.module) == self._mandate

    def _ticked(self, now_s: float) -> Round:
        node, chain, config = self._node, self._chain, self._node.run.config.rounds
        deadline_s, replicas_s = chain.timing.deadline_s(), chain.timing.replicas_s()
        uploads_s, elsewhere = node.uploads.progress_s, node.watch.paths.elsewhere()
        tick = partial(self._round.tick, node.watch.claims, config, elsewhere=elsewhere, uploads_s=uploads_s)
        is_awaited = partial(chain.timing.is_awaited, number=self._round.number)
        ticked = tick(now_s=now_s, deadline_s=deadline_s, replicas_s=replicas_s, is_awaited=is_awaited)
        has_judges_to_hear = ticked.is_closed and not self.trials.is_over(self._intake.admitted)
        return self._round if has_judges_to_hear else ticked

    def _is_frozen(self, now_s: float) -> bool:
        """Whether the coordinator wants no versions; after that, who waited has the time of a round that begins."""
        was_frozen, self._was_frozen = self._was_frozen, self._node.decrees.is_frozen
        if was_frozen and not self._was_frozen:
            self._round = self._round.resumed(now_s=now_s)
            self._chain.timing.opened(self.head.version)
        return self._was_frozen

    async def _tick(self) -> None:
        now_s = self._node.clock.now_s()
        if not self.is_leading or self._is_frozen(now_s) or self._ticked(now_s) is self._round:
            return
        # Closing too early costs a path its round, so look at the claims once more before.
        await self._node.watch.read_claims(self._round.expected)
        async with self._lock:
            ticked = self._ticked(now_s)
            if ticked.is_closed and self.is_leading:
                await self._close(ticked)
            else:
                self._round = ticked

    async def _catch_up(self) -> None:
        """Hand in, now and then, what somebody did not take: it may have come back."""
        now_s = self._node.clock.now_s()
        if now_s >= self._catch_up_s and not self._replication.is_done:
            self._catch_up_s = now_s + CATCH_UP_S
            await self._or_stop(self._replication.hand_in())  # without the lock: a frozen mirror keeps it waiting
            await self._go_back()
            self._chain.settle()

    async def _take_back(self) -> None:
        """What our document of a version counted, and the one that the coordinator has signed does not."""
        if not self._chain.lost:
            return
        async with self._lock:
            lost, self._chain.lost = self._chain.lost, set()
            for id_ in sorted(lost & self._ledger.open.keys()):
                if not self._intake.has(id_):
                    await self._take_over(self._ledger.open[id_])

    async def _go_back(self) -> None:
        """Versions whose contributions are lost with all who had them can never be final: after a while, in which one
        of these may come back, the chain goes on from the last one that is."""
        async with self._lock:
            if self.is_leading and self._replication.is_hopeless():
                self._chain.give_up()
                await self._reopen()
                await self._announce()
                self._replication.begin_anew()

    def _new_round(self) -> Round:
        paths = self._node.run.topology.paths_through(self.module)
        return Round(number=self.head.version, expected=frozenset(paths))

    async def _close(self, closed: Round) -> None:
        """Make the next version of what may count. Where work is refused, its path may come by others' work instead."""
        copies = await asyncio.to_thread(self._intake.copies)
        admitted = self._intake.works
        judged = [sealed for sealed in admitted if sealed.id not in copies]
        self._verdicts = self.trials.verdicts(judged)  # of a copy nobody is to say that it was repeated
        reasons = copies | self.trials.refused(judged, self._verdicts)
        refused = [sealed for sealed in admitted if sealed.id in reasons]
        for sealed in refused:
            log.warning("%s: %s does not count: %s", self.module, sealed.id[:8], reasons[sealed.id])
            self._intake.expel(sealed)
            self.trials.expel(sealed, reasons[sealed.id])
            self._chain.expire(sealed, reasons[sealed.id])
        if refused and not self._intake.admitted:
            self._round = self._new_round()
            return
        without = {Entry(path=sealed.document.path, peer=sealed.document.author) for sealed in refused}
        self._round = self._round.without(without, now_s=self._node.clock.now_s()) or closed
        if self._round is not closed:
            return await self._wake()
        made = await self._make_next()
        self.trials.next_round(is_made=made is not None)
        if made is None:
            self._round = self._new_round()
        else:
            await self._append(made)

    async def _make_next(self) -> Made | None:
        """The next version, made of what is admitted; None when nothing of that is left.

        - A payload that this disk has lost is asked of whoever else keeps it, for a receipt names two holders; only if
          nobody gives it the contribution expires, and the version is made of the others.
        - Contributions whose outer step is not finite make no version, under any leader: the longest expires, until the
          others make one.
        - One version is made at a time, of all modules here: memory does not grow with how many rounds close at once.
        """
        assert self._intake.admitted, "a round without contributions does not close"
        reach("owner: round closed, version not made")
        recovered: set[str] = set()
        while admitted := self._intake.admitted:
            try:
                async with self._node.averaging:
                    return await made_and_kept(self._make, self._node.store)
            except PayloadLost as lost:
                log.warning("%s: a payload cannot be read any more: %s", self.module, lost)
                sealed = admitted[lost.contribution].sealed
                # A disk that loses it again would do so for ever.
                if sealed.id in recovered or not await recover_payload(self._chain, sealed):
                    self._intake.expel(sealed)
                    self._chain.expire(sealed, Reason.PAYLOAD_LOST)
                recovered.add(sealed.id)
            except StepNotFinite as error:
                longest = max(admitted.values(), key=lambda item: (item.norm or 0.0, item.sealed.id)).sealed
                log.warning("%s; the longest of %d contributions expires", error, len(admitted))
                self._intake.expel(longest)
                self._chain.expire(longest, Reason.NOT_FINITE)
        return None

    async def _roll_back(self) -> None:
        """Carry the coordinator's newest decree on this module out, also while the run is frozen."""
        if not await prepare(self._node, self._ledger):  # without the lock: it may take long
            return
        async with self._lock:
            if (made := await undo(self._node, self._ledger, self._mandate[-1])) is not None:
                self._intake.undo()
                self.trials.clear()
                await self._append(made)

    async def _append(self, made: Made) -> None:
        """Have the next version on disk, cosigned and announced, in this order."""
        if not self.is_leading:  # who leads now makes it, of the same contributions
            return
        reach("owner: averaged, version not on disk")
        self._chain.append(seal(self._node.swarm.signer, made.version), made)
        reach("owner: version on disk, not cosigned")
        self._state, self._is_fresh = made.state, False
        self._intake.clear()
        self._round = self._new_round()
        self._node.history.add("version", **told_version(made.version))
        await self._or_stop(self._replication.publish())
        self._chain.settle()
        reach("owner: version cosigned, not announced")
        await self._announce()
        reach("owner: version announced")
        self._chain.timing.opened(self.head.version)

    def _make(self) -> Made:
        assert self._state is not None
        return make_version(
            self._node.run,
            self.head,
            self._state,
            list(self._intake.admitted.values()),
            clip_norm=self._ledger.norms.clip_norm(self.head.version),
            term=self.grant.term,
            grant=self._mandate[-1].id,
            author=self._node.peer,
            is_fresh=self._is_fresh,
            verdicts=self._verdicts,
            **self._expelling.shown(),
        )

    async def _or_stop(self, handing_in: Coroutine[Any, Any, None]) -> None:
        try:
            await handing_in
        except Refused as refused:
            self._depose(refused)

    def _depose(self, refused: Refused) -> None:
        log.warning("%s: a mirror refused: %s", self.module, refused)
        if refused.reason == Reason.NOT_LEADER:
            self._is_leading = False

    async def _announce(self) -> None:
        if self.is_leading:
            self._published = self.head.version
        await self._wake()  # first: who waits has a call open, and is told without the DHT
        if self.is_leading:
            tell = partial(told_paths, self._node, self.module, lambda: self._round)
            await self._node.presence.lead(self.module, head_record(self._ledger, self._mandate), tell=tell)

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _reopen(self, *, is_patient: bool = False) -> None:
        """Begin the round after the head anew, with all that is open here."""
        await learn_shardings(self._node)  # what is taken over may be of any
        holders = [self.head.author, *self._node.watch.heartbeats]
        undoes, state = due(self._node, self._ledger), self._chain.state
        goes_back = undoes is not None and undoes.document.rebuilt is None  # the head's own state may be lost then
        base = self._ledger.at(undoes.document.to) if undoes is not None and goes_back else self.head
        self._state = None if goes_back else await state.read_patiently(base, holders=holders)
        if (is_fresh := self._state is None) and is_patient and not goes_back:
            raise Unreachable(f"the outer state of {self.module} is not to be had")
        self._is_fresh, self._state = is_fresh, self._state or await state.read_params(base, holders=holders)
        self._chain.originals.take_over()
        self._intake = Intake(self._node.run, self._node.store, self._ledger, self._chain.originals)
        self.trials.clear()
        self._intake.recall()
        self._round = self._new_round()
        for sealed in list(self._ledger.open.values()):
            await self._take_over(sealed)
        self._round, self._chain.lost = self._chain.timing.taken_over(self._round), set()

    async def _take_over(self, sealed: Sealed[Contribution]) -> None:
        """Admit an open contribution of a former leader, under the same rules; one that may not count is reported."""
        try:
            self._intake.judge(sealed.document.author, sealed)
            self.trials.require_unrefused(sealed.document)
            try:
                measured = await self._measure(sealed)
            except PayloadLost:
                await recover_payload(self._chain, sealed)
                measured = await self._measure(sealed)
            self._intake.judge(sealed.document.author, sealed, norm=measured.norm)
        except (Refused, PayloadLost) as error:
            log.warning("%s: cannot take over %s: %s", self.module, sealed.id[:8], error)
            self._chain.expire(sealed, str(error.reason if isinstance(error, Refused) else Reason.PAYLOAD_LOST))
        else:
            self._intake.require_original(sealed, measured, has_receipt=True)
            self._admit(sealed, measured.norm)
