"""The leader of one module: takes contributions in, closes rounds, makes and publishes versions.

Order that a crash must not break: a contribution is on this disk and in the archive before its receipt is signed; a
version is on this disk before it is announced. While the archive does not answer, receipts name this peer alone as
holder, and versions are handed in later, with the contributions that they count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from ..core.codec import decode_module
from ..core.compress import Compressed
from ..core.outer import OuterState, decode_state
from ..errors import DipacoError, IntegrityError, Refused, SwarmError
from ..protocol.admission import Reason
from ..protocol.documents import BlobRef, Contribution, ModuleVersion, Receipt, Sealed, seal
from ..protocol.liveness import Head
from ..protocol.rounds import Entry, OpenRound, Round
from ..protocol.signing import PeerId
from ..topology import ModuleId
from .archive import Archive
from .custody import Custody
from .intake import Intake
from .ledger import Ledger
from .node import Node
from .recompute import Made, make_version
from .shardings import learn_shardings
from .transfer import fetch

log = logging.getLogger(__name__)

TICK_S = 0.5
TAKE_OVER_TRIES = 5
CATCH_UP_S = 5.0


class ModuleOwner:
    """Leads one module in one term, from `start` to `stop`."""

    def __init__(self, node: Node, archive: Archive, module: ModuleId, *, term: int, grant: str) -> None:
        self.module = module
        self.term = term
        self._grant = grant
        self._node = node
        self._ledger = Ledger(node.run, node.store, module)
        self._custody = Custody(node, archive, self._ledger, term=term)
        self._intake = Intake(node.run, self._ledger)
        self._state: OuterState | None = None
        self._round = self._new_round()
        self._lock = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._payloads: dict[int, list[str]] = {}
        self._catch_up_s = 0.0
        self._is_leading = False
        self._published = 0
        """What trainers may see: a version is handed in to the archive first, if that answers."""

    @property
    def head(self) -> ModuleVersion:
        return self._ledger.head

    @property
    def is_leading(self) -> bool:
        """False from the moment on that we stopped, or that the archive named another leader."""
        return self._is_leading

    @property
    def is_archived(self) -> bool:
        """Whether all versions are safe without us."""
        return self._custody.archived == self.head.version

    @property
    def is_complete(self) -> bool:
        """Whether the last version is made, and safe without us."""
        return self._ledger.is_complete and self.is_archived

    async def start(self) -> None:
        """Come together with the archive, take over its open contributions, and announce the head."""
        await self._custody.reconcile()
        await learn_shardings(self._node)  # what is taken over may be of any
        self._intake.recall()
        self._state = await self._load_state()
        self._round = self._new_round()
        for sealed in list(self._ledger.open.values()):
            await self._take_over(sealed)
        self._is_leading = True
        await self._announce()

    async def run(self) -> None:
        """Close rounds as they become ready, until cancelled or stopped."""
        while self._is_leading and not self.is_complete:
            await self._tick()
            await self._catch_up()
            await self._node.clock.sleep(TICK_S)

    async def stop(self) -> None:
        """Admit nothing more; what was admitted is in the archive for the next leader."""
        self._is_leading = False
        async with self._lock:
            if not self.is_archived:
                await self._hand_in()
        async with self._changed:
            self._changed.notify_all()

    # -- what trainers ask

    async def contribute(self, sender: PeerId, sealed: Sealed[Contribution]) -> Sealed[Receipt]:
        """Admit a contribution whose payload is uploaded; raises Refused with the reason. Idempotent."""
        self._judge(sender, sealed)
        holders: tuple[PeerId, ...] = (self._node.peer,)
        if not self._intake.has(sealed.id):
            with self._intake.arriving(sealed):
                holders = await self._receive(sender, sealed)
        receipt = self._intake.receipts.setdefault(sealed.id, self._receipt(sealed, holders))
        self._node.history.add("receipt_signed", module=str(self.module), id=sealed.id, round=receipt.document.round)
        return receipt

    async def versions_after(self, version: int, *, wait_s: float) -> list[Sealed[ModuleVersion]]:
        """What follows `version`, as far as it is published; waits up to `wait_s` seconds for there to be something.

        Raises Refused for a version that this chain does not have: its owner followed a branch that was given up.
        """
        if version > self.head.version:
            raise Refused(f"the head of {self.module} is {self.head.version}", reason=Reason.UNKNOWN_BASE)
        deadline_s = self._node.clock.now_s() + wait_s
        while self._published <= version and self._is_leading and self._node.clock.now_s() < deadline_s:
            await self._wait_change(deadline_s - self._node.clock.now_s())
        self._require_leading()
        return self._ledger.versions[version : self._published]

    def open_round(self) -> OpenRound:
        """What is in, of the version that trainers may see."""
        self._require_leading()
        if self._published == self.head.version:
            return OpenRound(version=self._published, entries=tuple(self._round.entries))
        # The round is closed, but its version is still on its way to the archive.
        counted = [share for share in self.head.shares if share.base_version == self._published]
        entries = tuple(Entry(path=share.path, peer=share.peer) for share in counted)
        return OpenRound(version=self._published, entries=entries)

    def _judge(self, sender: PeerId, sealed: Sealed[Contribution]) -> None:
        self._require_leading()
        self._intake.judge(sender, sealed)

    def _require_leading(self) -> None:
        if not self._is_leading:
            raise Refused(f"{self.module} is not led here any more", reason=Reason.NOT_LEADER)

    async def _receive(self, sender: PeerId, sealed: Sealed[Contribution]) -> tuple[PeerId, ...]:
        """Decode it, keep it, admit it; who holds it."""
        payload = self._payload(sealed)
        if payload is None:
            raise Refused("upload the payload first", reason="payload-missing")
        gradient = await self._decode(payload)
        holders = await self._keep(sealed, payload)
        async with self._lock:
            self._judge(sender, sealed)  # the round may have closed meanwhile
            self._admit(sealed, gradient)
        return holders

    def _payload(self, sealed: Sealed[Contribution]) -> bytes | None:
        try:
            return self._node.store.get(sealed.document.payload.digest)
        except IntegrityError:  # damaged on disk, and removed
            return None

    async def _decode(self, payload: bytes) -> Compressed:
        assert self._state is not None
        return await asyncio.to_thread(self._intake.decode, payload, self._state.params)

    async def _keep(self, sealed: Sealed[Contribution], payload: bytes) -> tuple[PeerId, ...]:
        try:
            return await self._custody.keep(sealed, payload)
        except Refused as refused:
            self._depose(refused)
            raise

    def _admit(self, sealed: Sealed[Contribution], gradient: Compressed) -> None:
        if not self._intake.has(sealed.id):  # a call that the network doubled may come after its twin was counted
            self._intake.admit(sealed, gradient)
            document = sealed.document
            self._node.keep_upload(document.payload.digest)
            is_late = document.base_version < self.head.version
            self._round = self._round.contributed(
                document.path, document.author, now_s=self._node.clock.now_s(), is_late=is_late
            )

    def _receipt(self, sealed: Sealed[Contribution], holders: tuple[PeerId, ...]) -> Sealed[Receipt]:
        counted = self._ledger.counted.get(sealed.id)
        receipt = Receipt(
            run=self._node.run.id,
            contribution=sealed.id,
            module=self.module,
            round=self.head.version if counted is None else counted - 1,
            term=self.term,
            holders=tuple(dict.fromkeys(holders)),
            author=self._node.peer,
        )
        return seal(self._node.swarm.signer, receipt)

    # -- rounds and versions

    async def _tick(self) -> None:
        now_s, rounds, watch = self._node.clock.now_s(), self._node.run.config.rounds, self._node.watch
        if self._round.tick(watch.claims, rounds, now_s=now_s) is self._round:
            return
        # Closing too early costs a path its round, so look at the claims once more before.
        await watch.read_claims(self._round.expected)
        async with self._lock:
            self._round = self._round.tick(watch.claims, rounds, now_s=now_s)
            if self._round.is_closed:
                await self._close()

    async def _catch_up(self) -> None:
        """Hand in what the archive did not take when it was made, now and then: it may have come back."""
        now_s = self._node.clock.now_s()
        if not self.is_archived and now_s >= self._catch_up_s:
            self._catch_up_s = now_s + CATCH_UP_S
            async with self._lock:
                await self._hand_in()

    def _new_round(self) -> Round:
        expected = frozenset(self._node.run.topology.paths_through(self.module))
        return Round(number=self.head.version, expected=expected)

    async def _close(self) -> None:
        assert self._state is not None
        made = await asyncio.to_thread(
            make_version,
            self._node.run,
            self.head,
            self._state,
            list(self._intake.admitted.values()),
            clip_norm=self._intake.clip_norm(),
            term=self.term,
            grant=self._grant,
            author=self._node.peer,
        )
        for blob in (made.snapshot, made.update, made.state_blob):
            self._node.store.put(blob)
        self._ledger.append(seal(self._node.swarm.signer, made.version))
        self._next_round(made)
        await self._hand_in()
        self._custody.prune(self._payloads)
        await self._announce()

    def _next_round(self, made: Made) -> None:
        number = made.version.version
        self._state = made.state
        self._payloads[number] = [item.sealed.document.payload.digest for item in self._intake.admitted.values()]
        self._intake.clear()
        self._round = self._new_round()
        self._node.history.add(
            "version",
            module=str(self.module),
            version=number,
            digest=made.version.digest,
            weights=[round(share.weight, 4) for share in made.version.shares],
            term=self.term,
        )

    async def _hand_in(self) -> None:
        try:
            await self._custody.hand_in()
        except Refused as refused:
            self._depose(refused)

    def _depose(self, refused: Refused) -> None:
        log.warning("%s: the archive refused: %s", self.module, refused)
        if refused.reason == Reason.NOT_LEADER:
            self._is_leading = False

    async def _announce(self) -> None:
        if self._is_leading:
            head = Head(version=self.head.version, digest=self.head.digest, term=self.term, grant=self._grant)
            self._published = self.head.version
            await self._node.presence.lead(self.module, head)
        async with self._changed:
            self._changed.notify_all()

    # -- state

    async def _load_state(self) -> OuterState:
        params = decode_module(await self._fetch(self.head.snapshot), self._node.run.layout(self.module))
        if self.head.state is None:
            return OuterState.fresh(params)
        momentum, residual = decode_state(await self._fetch(self.head.state), params.size)
        return OuterState(params=params, momentum=momentum, residual=residual)

    async def _take_over(self, sealed: Sealed[Contribution]) -> None:
        """Admit an open contribution of the last leader, under the same rules."""
        try:
            self._intake.judge(sealed.document.author, sealed)
            gradient = await self._decode(await self._fetch_patiently(sealed.document.payload))
        except DipacoError as error:
            log.warning("%s: cannot take over %s: %s", self.module, sealed.id[:8], error)
            return
        self._admit(sealed, gradient)

    async def _fetch_patiently(self, ref: BlobRef) -> bytes:
        """What has a receipt must not be lost with a message."""
        for _ in range(TAKE_OVER_TRIES - 1):
            with contextlib.suppress(SwarmError):
                return await self._fetch(ref)
            await self._node.clock.sleep(TICK_S)
        return await self._fetch(ref)

    async def _fetch(self, ref: BlobRef) -> bytes:
        return await fetch(self._node, ref, holders=self._node.watch.seeds())

    async def _wait_change(self, timeout_s: float) -> None:
        async def changed() -> None:
            async with self._changed:
                await self._changed.wait()

        tasks = {asyncio.ensure_future(changed()), asyncio.ensure_future(self._node.clock.sleep(timeout_s))}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with contextlib.suppress(asyncio.CancelledError):
                    await task
