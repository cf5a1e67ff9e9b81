"""What the seed node tells whoever keeps account of the run: its judgements, and contributions that were counted.

documents/judgement-<version>.json     the coordinator's signed word on a round
"""

from __future__ import annotations

import json
import logging
import math

from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.core.evaluate import Evaluation
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.node.calls import GetContributions, GetJudgements
from dipaco_p2p.node.items import Page, items_reply
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.protocol.documents import Contribution, Sealed, seal, unseal
from dipaco_p2p.protocol.judgement import Judgement, ModuleLoss, PathLoss
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm.api import Swarm

from .evaluator import Evaluator, RoundEvaluation

log = logging.getLogger(__name__)


class PublicRecords:
    """Signed records that no peer needs for training."""

    def __init__(self, store: Store, archive: SeedArchive) -> None:
        self._store = store
        self._archive = archive

    def serve(self, swarm: Swarm) -> None:
        """Answer from now on."""
        GetJudgements.serve(swarm, self._on_judgements)
        GetContributions.serve(swarm, self._on_contributions)

    def judge(self, signer: Signer, evaluator: Evaluator, evaluation: RoundEvaluation, *, at_s: float) -> None:
        """Sign and keep what was measured, if it is a figure: a model that diverged has none."""
        losses = [evaluation.routed.loss, *(found.loss for found in evaluation.modules.values())]
        is_known = self._store.read_document(_name(evaluation.version)) is not None  # signed before a disk was lost
        if all(map(math.isfinite, losses)) and not is_known:
            sealed = seal(signer, judgement_of(evaluator, evaluation, at_s=at_s, signer=signer))
            self._store.write_document(_name(evaluation.version), canonical_bytes(sealed.to_dict()))

    def judgement(self, version: int) -> Judgement | None:
        """What was signed of a round; None if it is not judged, or its record was damaged."""
        try:
            name = _name(version)
            return self._read(name).document if self._store.read_document(name) is not None else None
        except IntegrityError as error:
            log.warning("%s", error)
            return None

    def _read(self, name: str) -> Sealed[Judgement]:
        try:
            return unseal(Judgement, json.loads(self._store.read_document(name) or b""))
        except ValueError as error:
            raise IntegrityError(f"{name}.json was damaged on disk: {error}") from None

    async def _on_judgements(self, sender: PeerId, request: GetJudgements) -> Page[Judgement]:
        begin = _name(request.from_)
        return items_reply(self._read(name) for name in self._store.documents("judgement-") if name >= begin)

    async def _on_contributions(self, sender: PeerId, request: GetContributions) -> Page[Contribution]:
        """Those of the asked ids that are here, in the same order; as many as fit."""
        return items_reply(found for id_ in request.ids if (found := self._archive.find(id_)) is not None)


def judgement_of(evaluator: Evaluator, evaluation: RoundEvaluation, *, at_s: float, signer: Signer) -> Judgement:
    """What is signed of an evaluation."""
    modules = [
        ModuleLoss(
            module=module,
            digest=evaluator.version(module, evaluation.version).digest,
            loss=found.loss,
            tokens=found.tokens,
        )
        for module, found in evaluation.modules.items()
    ]
    paths = [
        PathLoss(path=path, loss=_known(found.validation), holdout_loss=_known(found.holdout))
        for path, found in evaluation.paths.items()
    ]
    return Judgement(
        run=evaluator.run.id,
        version=evaluation.version,
        sharding=evaluation.sharding,
        loss=evaluation.routed.loss,
        tokens=evaluation.routed.tokens,
        modules=tuple(modules),
        paths=tuple(paths),
        at_s=at_s,
        author=signer.peer,
    )


def _known(found: Evaluation | None) -> float | None:
    return found.loss if found is not None and math.isfinite(found.loss) else None


def _name(version: int) -> str:
    return f"judgement-{version:08d}"
