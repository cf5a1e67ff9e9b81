"""What a round of inner steps becomes: one contribution for every module of the path that lacks it.

Order that a crash must not break: the path's state and all contributions are on this disk before the first push begins,
and leave it when there is a receipt, or a reason why there will be none.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable

from dipaco_p2p.errors import IntegrityError, Refused, SwarmError, Unreachable
from dipaco_p2p.node.calls import Commit, Contribute
from dipaco_p2p.node.node import CALL_TIMEOUT_S, Member, send
from dipaco_p2p.protocol.documents import BlobRef, Contribution, Part, Receipt, Sealed, seal
from dipaco_p2p.protocol.reasons import PASSING, Reason
from dipaco_p2p.protocol.rounds import PATIENCE
from dipaco_p2p.protocol.signing import PeerId, short
from dipaco_p2p.topology import ModuleId

from ..status import Status
from .assignment import Assignment, Base, Work
from .kept import InnerStates, Outbox, Receipts
from .trainer import OuterGradient

log = logging.getLogger(__name__)

RETRY_S = 0.5
TRIES_MIN = 6
"""Calls to a leader that may be lost, one after the other, before a push is given up, however short the deadline."""
COMMIT_S = 3.0
"""For those who may lead a module to answer that they have heard what will come: one that is gone holds nobody up."""
GIVEN_UP = 3
"""Times of that in which no byte more arrives, whatever the leader answers."""
BEHIND_TTLS = 3.0
"""Lives of a heartbeat in which a leader may come to see what we see: the branch that we trained from, when it has only
just taken over, or that those who claim our path do no work."""


async def commit(node: Member, contribution: Contribution) -> None:
    """Tell those who lead the module, or may soon, what will come, before anybody can read it. One that does not hear
    is no reason to wait: there the time counts at which the contribution arrives."""
    grant = node.mandates.grant(contribution.module)
    leader = node.watch.leader(contribution.module)
    group = {*(grant.group if grant else ()), *node.watch.seeds(), *([leader] if leader else [])}
    request = Commit(contribution=seal(node.swarm.signer, contribution))

    async def tell(peer: PeerId) -> None:
        with contextlib.suppress(SwarmError, Refused, IntegrityError):
            await request.call(node.swarm, peer, timeout_s=COMMIT_S, addresses=node.watch.addresses(peer))

    await asyncio.gather(*(tell(peer) for peer in sorted(group & {*node.watch.heartbeats, node.peer})))


async def keep_the_claim() -> None:
    """For who claims the path for as long as it pushes."""


async def push(
    node: Member,
    contribution: Contribution,
    payload: bytes,
    *,
    on_progress: Callable[[], None] = lambda: None,
    on_unclaimed: Callable[[], Awaitable[None]] = keep_the_claim,
) -> Sealed[Receipt]:
    """Push until there is a receipt; raises Refused with the reason if there will be none, or once the work could not
    count any more, whatever the leader says, and Unreachable when the leader took nothing for `PATIENCE` deadlines of
    the run (and the time of `TRIES_MIN` lost calls), or no byte more arrived for `GIVEN_UP` times as long: a leader may
    take the same bytes for ever, and give no receipt.

    `on_progress` is told of every part that arrived. A new try alone is no progress. `on_unclaimed` is told when the
    leader does not know that we claim the path: it takes nothing before it does.
    """
    sealed = seal(node.swarm.signer, contribution)
    behind_until_s = node.clock.now_s() + BEHIND_TTLS * node.run.config.liveness.heartbeat_ttl_s
    patience_s = max(PATIENCE * node.run.config.rounds.deadline_s, TRIES_MIN * CALL_TIMEOUT_S)
    took_s = more_s = node.clock.now_s()
    leader: PeerId | None = None
    arrived_bytes: dict[PeerId | None, int] = {}

    def arrived(done: int, size: int) -> None:
        nonlocal took_s, more_s
        took_s = node.clock.now_s()
        if done > arrived_bytes.get(leader, -1):  # a new leader begins at zero
            arrived_bytes[leader], more_s = done, took_s
            on_progress()

    while True:
        leader, now_s = node.watch.leader(contribution.module), node.clock.now_s()
        if node.decrees.is_frozen:  # nothing may get on now, and that is nobody's fault
            took_s = more_s = now_s
            on_progress()
        elif now_s - took_s >= patience_s or now_s - more_s >= GIVEN_UP * patience_s:
            raise Unreachable(f"{contribution.module} gave no receipt for a contribution in {now_s - more_s:.0f} s")
        elif leader is not None:
            try:
                return await _push_once(node, leader, sealed, payload, arrived)
            except Refused as refused:
                is_patient = node.clock.now_s() < behind_until_s and _is_behind(node, contribution, refused)
                if refused.reason not in PASSING and not is_patient:
                    raise
                if _is_late(node, contribution, leader):
                    raise Refused(f"{refused}, until it came too late", reason=Reason.STALE_BASE) from None
                log.info("%s: %s said %s", contribution.module, short(leader), refused)
                if refused.reason == Reason.UNCLAIMED:
                    await on_unclaimed()
            except (SwarmError, IntegrityError) as error:
                log.info("%s: %s did not take it: %s", contribution.module, short(leader), error)
        await node.clock.sleep(RETRY_S)
        if not node.decrees.is_frozen:  # the swarm's usual looks suffice until then
            await node.watch.read_heads(contribution.module)


def _is_late(node: Member, contribution: Contribution, leader: PeerId) -> bool:
    """Whether this leader has so new a version, by its own head, that it could not count our work any more: it may be
    busy to us alone, and for ever."""
    head, staleness = node.watch.heads[contribution.module].get(leader), node.run.config.rounds.staleness
    return head is not None and head.version > contribution.base_version + staleness


def _is_behind(node: Member, contribution: Contribution, refused: Refused) -> bool:
    """Whether the leader has not even the version that we trained from, or still counts claims that we have found
    idle: it may find them idle at its next look."""
    if refused.reason == Reason.COVERED:
        return not node.watch.claims[contribution.path].keys() - {node.peer}
    return refused.reason == Reason.UNKNOWN_BASE and node.watch.reached(contribution.module) < contribution.base_version


async def _push_once(
    node: Member, leader: PeerId, sealed: Sealed[Contribution], payload: bytes, on_progress: Callable[[int, int], None]
) -> Sealed[Receipt]:
    digest = sealed.document.payload.digest
    await send(node, leader, payload, digest=digest, on_progress=on_progress)
    sharding, invitations = node.run.sharding(sealed.document.sharding), node.invitations.own or None
    request = Contribute(contribution=sealed, sharding=sharding, invitations=invitations)
    addresses = node.watch.addresses(leader)
    receipt = (await request.call(node.swarm, leader, timeout_s=CALL_TIMEOUT_S, addresses=addresses)).receipt
    if receipt.document.contribution != sealed.id or receipt.document.author != leader:
        raise IntegrityError("the receipt is for another contribution, or from another peer")
    return receipt


UNANSWERED = "unanswered"
"""In place of a leader's reason: no leader took the contribution in the time that a round may take."""


class Contributor:
    """Pushes a path's outer gradients, and notes what became of each."""

    def __init__(
        self,
        node: Member,
        states: InnerStates,
        status: Status,
        *,
        on_progress: Callable[[], None] = lambda: None,
        on_unclaimed: Callable[[], Awaitable[None]] = keep_the_claim,
    ) -> None:
        """`on_progress` is told whenever a push gets on, `on_unclaimed` when one cannot for want of a claim."""
        self._node = node
        self._states = states
        self._status = status
        self._on_progress = on_progress
        self._on_unclaimed = on_unclaimed
        self._outbox = Outbox(node)
        self._receipts = Receipts(node)

    async def resume(self, *, within_s: float) -> None:
        """Push again what an earlier process of ours had not brought to its end: the same contributions. Not for ever,
        since there may be no leaders."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._push_waiting(), within_s)

    async def _push_waiting(self) -> None:
        """By path, whose claim of then may be known to nobody any more: leaders take no work without."""
        presence, waiting = self._node.presence, sorted(self._outbox.waiting(), key=lambda sent: sent[0].path)
        try:
            for path, sent in itertools.groupby(waiting, key=lambda sent: sent[0].path):
                pushes = list(sent)
                round_number = max(contribution.base_version for contribution, _ in pushes)
                await presence.claim(path, since_s=self._node.clock.now_s(), round_number=round_number)
                for contribution, _ in pushes:
                    log.info("goes on with the contribution to %s of an earlier process", contribution.module)
                await asyncio.gather(*(self._push(contribution, payload) for contribution, payload in pushes))
        finally:
            await presence.release()

    async def contribute(
        self, assignment: Assignment, work: Work, *, on_kept: Callable[[], None] = lambda: None
    ) -> set[str]:
        """Push, all modules at once, until each has a receipt or a reason; the reasons.

        The path's inner state after these steps is on this disk before any contribution names it. `on_kept` is told
        when all is on the disk: from then on the trainer may take further steps.
        """
        trainer, pushes = assignment.trainer, []
        self._on_progress()
        gradients = await asyncio.to_thread(trainer.outer_gradients, work.before, work.result.flats)
        parts_of_state = await asyncio.to_thread(trainer.state_parts, gradients)
        state = await asyncio.to_thread(self._states.keep, assignment.path, *parts_of_state)
        trainer.goes_on_from(state, since=work.round_number)
        if work.recipe is not None:  # what auditors find in the state is what we go on with, whoever takes our work
            for gradient in gradients:
                trainer.keep(gradient)
        payloads = [gradient.payload for gradient in gradients]
        refs = await asyncio.to_thread(self._outbox.keep, payloads)
        parts = [Part(base_digest=base.digest, payload=ref) for base, ref in zip(work.bases, refs, strict=True)]
        for place, (gradient, base) in enumerate(zip(gradients, work.bases, strict=True)):
            if gradient.module in assignment.inherited:
                trainer.keep(gradient)
            elif gradient.module in assignment.missing:
                others = (*parts[:place], *parts[place + 1 :])
                contribution = self._document(assignment, gradient.module, base, work, refs[place], state, others)
                await asyncio.to_thread(self._outbox.add, contribution, gradient.payload)
                pushes.append((contribution, gradient))
        self._on_progress()
        on_kept()
        await asyncio.gather(*(commit(self._node, contribution) for contribution, _ in pushes))
        self._on_progress()
        reasons = await asyncio.gather(*(self._push_of(assignment, *pushed) for pushed in pushes))
        return {reason for reason in reasons if reason is not None}

    def _document(
        self,
        assignment: Assignment,
        module: ModuleId,
        base: Base,
        work: Work,
        payload: BlobRef,
        state: BlobRef,
        others: tuple[Part, ...],
    ) -> Contribution:
        return Contribution(
            run=self._node.run.id,
            module=module,
            path=assignment.path,
            base_version=base.version,
            base_digest=base.digest,
            sharding=work.sharding,
            payload=payload,
            state=state,
            steps=work.result.steps_done,
            tokens=work.result.tokens,
            loss=work.result.loss,
            others=others if self._node.run.config.judging.judges else (),
            recipe=work.recipe,
            author=self._node.peer,
        )

    async def _push_of(self, assignment: Assignment, contribution: Contribution, gradient: OuterGradient) -> str | None:
        reason = await self._push(contribution, gradient.payload)
        if reason is None:
            assignment.trainer.keep(gradient)
        elif reason == Reason.COVERED:
            assignment.covered(contribution.module, contribution.base_version)
        return reason

    async def _push(self, contribution: Contribution, payload: bytes) -> str | None:
        """One module's, to its leader; a refusal is noted, and the round goes on. Why it was refused."""
        history, module = self._node.history, contribution.module
        facts = {"module": str(module), "path": str(contribution.path), "base": contribution.base_version}
        try:
            sealed = await push(
                self._node, contribution, payload, on_progress=self._on_progress, on_unclaimed=self._on_unclaimed
            )
        except Refused as refused:
            log.warning("%s refused our contribution: %s", module, refused)
            history.add("refused", reason=refused.reason, detail=str(refused), **facts)
            self._outbox.remove(contribution)
            return refused.reason
        except Unreachable as error:
            log.warning("%s; the path is trained again later", error)
            history.add("unanswered", detail=str(error), **facts)
            self._outbox.remove(contribution)
            return UNANSWERED
        self._receipts.add(sealed)
        self._outbox.remove(contribution)
        receipt = sealed.document
        self._status.receipts += 1
        self._status.last_receipt = f"{module} round {receipt.round} from ...{short(receipt.author)}"
        history.add("receipt", id=receipt.contribution, work=contribution.work, holders=list(receipt.holders), **facts)
        return None
