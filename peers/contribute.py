"""What a round of inner steps becomes: one contribution for every module of the path that lacks it.

Order that a crash must not break: the path's state and all contributions are on this disk before the first push begins,
and leave it when there is a receipt, or a reason why there will be none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from dipaco_p2p.errors import Refused, Unreachable
from dipaco_p2p.node.node import Member
from dipaco_p2p.protocol.documents import BlobRef, Contribution
from dipaco_p2p.protocol.signing import short
from dipaco_p2p.topology import ModuleId

from .kept import Outbox, Receipts
from .push import push
from .states import PathStates
from .status import Status
from .tenure import Tenure
from .trainer import OuterGradient
from .work import Base, Work

log = logging.getLogger(__name__)

UNANSWERED = "unanswered"
"""In place of a leader's reason: no leader took the contribution in the time that a round may take."""


class Contributor:
    """Pushes a path's outer gradients, and notes what became of each."""

    def __init__(
        self, node: Member, states: PathStates, status: Status, *, on_progress: Callable[[], None] = lambda: None
    ) -> None:
        """`on_progress` is told whenever a push gets on."""
        self._node = node
        self._states = states
        self._status = status
        self._on_progress = on_progress
        self._outbox = Outbox(node)
        self._receipts = Receipts(node)

    async def resume(self, *, within_s: float) -> None:
        """Push again what an earlier process of ours had not brought to its end: the same contributions. Not for ever,
        since there may be no leaders."""
        waiting = self._outbox.waiting()
        for contribution, _ in waiting:
            log.info("goes on with the contribution to %s of an earlier process", contribution.module)
        pushes = asyncio.gather(*(self._push(contribution, payload) for contribution, payload in waiting))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(pushes, within_s)

    async def contribute(self, tenure: Tenure, work: Work, *, on_kept: Callable[[], None] = lambda: None) -> set[str]:
        """Push, all modules at once, until each has a receipt or a reason; the reasons.

        The path's inner state after these steps is on this disk before any contribution names it. `on_kept` is told
        when all is on the disk: from then on the trainer may take further steps.
        """
        trainer, pushes = tenure.trainer, []
        self._on_progress()
        gradients = await asyncio.to_thread(trainer.outer_gradients, work.before, work.result.flats)
        data = await asyncio.to_thread(trainer.state_bytes, gradients)
        state = await asyncio.to_thread(self._states.keep, tenure.path, data)
        for gradient, base in zip(gradients, work.bases, strict=True):
            if gradient.module in tenure.inherited:
                trainer.keep(gradient)
            elif gradient.module in tenure.missing:
                payload = await asyncio.to_thread(BlobRef.of, gradient.payload)
                contribution = self._document(tenure, gradient.module, base, work, payload, state)
                await asyncio.to_thread(self._outbox.add, contribution, gradient.payload)
                pushes.append((contribution, gradient))
        self._on_progress()
        on_kept()
        reasons = await asyncio.gather(*(self._push_of(tenure, *pushed) for pushed in pushes))
        return {reason for reason in reasons if reason is not None}

    def _document(
        self, tenure: Tenure, module: ModuleId, base: Base, work: Work, payload: BlobRef, state: BlobRef
    ) -> Contribution:
        return Contribution(
            run=self._node.run.id,
            module=module,
            path=tenure.path,
            base_version=base.version,
            base_digest=base.digest,
            sharding=work.sharding,
            payload=payload,
            state=state,
            steps=work.result.steps_done,
            tokens=work.result.tokens,
            loss=work.result.loss,
            author=self._node.peer,
        )

    async def _push_of(self, tenure: Tenure, contribution: Contribution, gradient: OuterGradient) -> str | None:
        reason = await self._push(contribution, gradient.payload)
        if reason is None:
            tenure.trainer.keep(gradient)
        return reason

    async def _push(self, contribution: Contribution, payload: bytes) -> str | None:
        """One module's, to its leader; a refusal is noted, and the round goes on. Why it was refused."""
        history, module = self._node.history, contribution.module
        facts = {"module": str(module), "path": str(contribution.path), "base": contribution.base_version}
        try:
            sealed = await push(self._node, contribution, payload, on_progress=self._on_progress)
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
        history.add("receipt", id=receipt.contribution, holders=list(receipt.holders), **facts)
        return None
