"""What a round of inner steps becomes: one contribution for every module of the path that lacks it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from dipaco_p2p.core.inner import InnerResult
from dipaco_p2p.errors import Refused
from dipaco_p2p.protocol.documents import BlobRef, Contribution, ModuleVersion
from dipaco_p2p.protocol.signing import short
from dipaco_p2p.runtime.node import Node

from .push import push
from .states import PathStates
from .status import Status
from .tenure import Tenure
from .trainer import Flat, OuterGradient

log = logging.getLogger(__name__)


class Contributor:
    """Pushes a path's outer gradients, and notes what became of each."""

    def __init__(self, node: Node, states: PathStates, status: Status) -> None:
        self._node = node
        self._states = states
        self._status = status

    async def contribute(
        self, tenure: Tenure, before: Sequence[Flat], bases: Sequence[ModuleVersion], result: InnerResult
    ) -> set[str]:
        """Push, all modules at once, until each has a receipt or a reason; the reasons.

        The path's inner state after these steps is on this disk before any contribution names it.
        """
        trainer, pushes = tenure.trainer, []
        gradients = await asyncio.to_thread(trainer.outer_gradients, before, result.flats)
        data = await asyncio.to_thread(trainer.state_bytes, gradients)
        state = await asyncio.to_thread(self._states.keep, tenure.path, data)
        for gradient, base in zip(gradients, bases, strict=True):
            if gradient.module in tenure.inherited:
                trainer.keep(gradient)
            elif gradient.module in tenure.missing:
                pushes.append(self._push(tenure, gradient, self._document(tenure, gradient, base, result, state)))
        return {reason for reason in await asyncio.gather(*pushes) if reason is not None}

    def _document(
        self, tenure: Tenure, gradient: OuterGradient, base: ModuleVersion, result: InnerResult, state: BlobRef
    ) -> Contribution:
        return Contribution(
            run=self._node.run.id,
            module=gradient.module,
            path=tenure.path,
            base_version=base.version,
            base_digest=base.digest,
            sharding=tenure.trainer.sharding,
            payload=BlobRef.of(gradient.payload),
            state=state,
            steps=result.steps_done,
            tokens=result.tokens,
            loss=result.loss,
            author=self._node.peer,
        )

    async def _push(self, tenure: Tenure, gradient: OuterGradient, contribution: Contribution) -> str | None:
        """One module's, to its leader; a refusal is noted, and the round goes on. Why it was refused."""
        history, base = self._node.history, contribution.base_version
        facts = {"module": str(gradient.module), "path": str(tenure.path), "base": base}
        try:
            receipt = (await push(self._node, contribution, gradient.payload)).document
        except Refused as refused:
            log.warning("%s refused our contribution: %s", gradient.module, refused)
            history.add("refused", reason=refused.reason, detail=str(refused), **facts)
            return refused.reason
        tenure.trainer.keep(gradient)
        self._status.receipts += 1
        self._status.last_receipt = f"{gradient.module} round {receipt.round} from ...{short(receipt.author)}"
        history.add("receipt", id=receipt.contribution, holders=list(receipt.holders), **facts)
        return None
