"""What the seed node tells whoever keeps account of the run: its judgements, and contributions that were counted.

documents/judgement-<version>.json     the coordinator's signed word on a round
documents/check-<number>.json          a volunteer's signed check of one; numbers count as they came

Volunteers may measure a judgement again. Whether their check agrees is not looked at here, so that no disagreement is
left out: only whether it is about what was judged, who signed it, and how many there are. The bounds are in
protocol/judgement.py.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterable
from typing import TypeVar

from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.core.routing.evaluate import Evaluation, counted_tokens
from dipaco_p2p.errors import IntegrityError, Refused
from dipaco_p2p.node.calls import GetChecks, GetJudgements, GiveCheck
from dipaco_p2p.node.items import CheckPage, Page, stored_reply
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.protocol.documents import Sealed, seal, unseal
from dipaco_p2p.protocol.judgement import (
    IN_ALL_MAX,
    OF_AUTHOR_MAX,
    OF_PATH_MAX,
    OF_STRANGERS_MAX,
    Check,
    Judgement,
    ModuleLoss,
    PathLoss,
    is_about,
)
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.calls import Done
from dipaco_p2p.topology import PathId

from .evaluator import Evaluator, RoundEvaluation

log = logging.getLogger(__name__)

D = TypeVar("D", Check, Judgement)


class PublicRecords:
    """Signed records that no peer needs for training."""

    def __init__(self, store: Store, archive: SeedArchive) -> None:
        self._store = store
        self._archive = archive

    def serve(self, swarm: Swarm) -> None:
        """Answer from now on."""
        GetJudgements.serve(swarm, self._on_judgements)

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
        return _read(self._store, Judgement, name)

    async def _on_judgements(self, sender: PeerId, request: GetJudgements) -> Page[Judgement]:
        rounds = range(request.from_, self._archive.complete_version + 1)
        return stored_reply(self._store.read_document(_name(number)) for number in rounds)


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


PAGE_MAX = 256
"""Checks in one answer: far below what fits into it."""


class Checks:
    """The checks of one stage."""

    def __init__(
        self,
        run: Run,
        store: Store,
        archive: SeedArchive,
        *,
        judged: Callable[[int], Judgement | None],
        is_alive: Callable[[PeerId], bool],
        was_asked: Callable[[PeerId, Sealed[Check]], bool] = lambda sender, sealed: False,
    ) -> None:
        """`judged` gives the judgement of a round; `is_alive` says whether a peer's heartbeat is heard; `was_asked`
        takes what the coordinator wants to judge a round by."""
        self._run = run
        self._store = store
        self._archive = archive
        self._judged = judged
        self._is_alive = is_alive
        self._was_asked = was_asked
        self._numbers: list[int] = []
        self._next = 0
        self._kept: dict[tuple[int, PathId], dict[PeerId, str]] = {}
        """Ids by author, by round and path."""
        self._of_author: dict[tuple[int, PeerId], int] = {}
        for name in store.documents("check-"):
            self._next = int(name.removeprefix("check-")) + 1
            try:
                self._note(self._read(self._next - 1), self._next - 1)
            except IntegrityError as error:
                log.warning("%s", error)

    def serve(self, swarm: Swarm, *, is_open: bool = True) -> None:
        """Answer from now on; a stage that is over takes none any more."""
        GetChecks.serve(swarm, self._on_checks)
        if is_open:
            GiveCheck.serve(swarm, self._on_check)

    async def _on_check(self, sender: PeerId, request: GiveCheck) -> Done:
        if not self._was_asked(sender, request.check):
            self.take(sender, request.check)
        return Done()

    def take(self, sender: PeerId, sealed: Sealed[Check]) -> None:
        """Keep a check, if it is news; raises Refused for what is not kept."""
        if self._judge(sender, sealed):
            self._store.write_document(_check_name(self._next), canonical_bytes(sealed.to_dict()))
            self._note(sealed, self._next)
            self._next += 1

    def take_asked(self, checks: Iterable[Sealed[Check]]) -> None:
        """Keep what the coordinator asked for, as long as most of the room is left to others."""
        for sealed in checks:
            if len(self._numbers) < IN_ALL_MAX // 4:
                with contextlib.suppress(Refused):
                    self.take(sealed.document.author, sealed)

    async def _on_checks(self, sender: PeerId, request: GetChecks) -> CheckPage:
        place = bisect.bisect_left(self._numbers, request.from_)
        page = self._numbers[place : place + PAGE_MAX]
        following = page[-1] + 1 if page else self._next
        texts = (self._store.read_document(_check_name(number)) for number in page)
        return CheckPage(next=following, body=stored_reply(texts).body)

    def _judge(self, sender: PeerId, sealed: Sealed[Check]) -> bool:
        """Whether it is news; raises Refused for what is not kept."""
        check = sealed.document
        if check.author != sender:
            raise Refused("a check must be sent by its author", reason=Reason.NOT_AUTHOR)
        if check.run != self._run.id:
            raise Refused("a check of another run", reason=Reason.WRONG_RUN)
        if check.path not in self._run.topology:
            raise Refused(f"this run has no {check.path}", reason=Reason.WRONG_PATH)
        judgement = self._judged(check.version)
        if judgement is None:
            raise Refused(f"round {check.version} is not judged", reason=Reason.UNKNOWN_BASE)
        if not is_about(check, judgement, validation=self._run.manifest.validation.digest) or (
            check.tokens % counted_tokens(self._run.config.model.context)
        ):
            raise Refused(
                f"it is about something other than what round {check.version} was judged on", reason=Reason.OTHER
            )
        return self._has_room(check, sealed.id)

    def _has_room(self, check: Check, id_: str) -> bool:
        kept = self._kept.get((check.version, check.path), {})
        if check.author in kept:
            if kept[check.author] != id_:
                raise Refused(f"{check.path} was checked at round {check.version}", reason=Reason.ALREADY_CONTRIBUTED)
            return False
        workers = set[PeerId]().union(*self._archive.trainers().values())
        is_worker = check.author in workers
        if not is_worker and not self._is_alive(check.author):
            raise Refused("this peer has sent no heartbeat and no work", reason=Reason.UNKNOWN_PEER)
        strangers = sum(author not in workers for author in kept)
        if (
            len(kept) >= OF_PATH_MAX
            or len(self._numbers) >= (IN_ALL_MAX if is_worker else IN_ALL_MAX // 2)
            or (not is_worker and strangers >= OF_STRANGERS_MAX)
            or self._of_author.get((check.version, check.author), 0) >= OF_AUTHOR_MAX
        ):
            raise Refused(f"there are enough checks of {check.path} at round {check.version}", reason=Reason.ENOUGH)
        return True

    def _note(self, sealed: Sealed[Check], number: int) -> None:
        check = sealed.document
        self._numbers.append(number)
        self._kept.setdefault((check.version, check.path), {})[check.author] = sealed.id
        key = (check.version, check.author)
        self._of_author[key] = self._of_author.get(key, 0) + 1

    def _read(self, number: int) -> Sealed[Check]:
        return _read(self._store, Check, _check_name(number))


def _check_name(number: int) -> str:
    return f"check-{number:08d}"


def _read(store: Store, kind: type[D], name: str) -> Sealed[D]:
    try:
        return unseal(kind, json.loads(store.read_document(name) or b""))
    except ValueError as error:
        raise IntegrityError(f"{name}.json was damaged on disk: {error}") from None
