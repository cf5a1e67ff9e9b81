"""What a leader takes in: contributions of one module, judged, measured, and remembered until they are counted.

- One contribution per author, path and base. One that is still on its way to the disk counts already, so that of two
  that come at once only one gets a receipt.
- A contribution gets one receipt, however often it is pushed.
- What is remembered of an outer gradient is its norm and a part by which copies are found (originals.py): the payload
  lies in the store, and is read once more when the round closes.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..core.outer.codec import Compressed
from ..errors import IntegrityError, Refused
from ..node.ledger import Ledger
from ..node.node import Member
from ..node.run import Run
from ..node.store import Store
from ..protocol.admission import AdmissionRules, Hold, judge, judge_claim
from ..protocol.claims import ranking
from ..protocol.decrees import Decreed
from ..protocol.documents import Contribution, Custody, Receipt, Sealed, seal
from ..protocol.reasons import Reason
from ..protocol.rounds import Arrivals, Entry
from ..protocol.signing import PeerId, Signer
from ..topology import PathId
from .originals import Originals
from .timing import Timing
from .version import Admitted, read_payload, stored

NOTHING = Decreed()

Key = tuple[PeerId, PathId, int]
"""Author, path and base version."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The payload of a contribution, and what is remembered of its outer gradient."""

    payload: bytes
    norm: float
    sketch: Compressed


class Intake:
    """The open round's contributions, and what is needed to judge the next one."""

    def __init__(self, run: Run, store: Store, ledger: Ledger, originals: Originals) -> None:
        self._run = run
        self._store = store
        self._ledger = ledger
        self._originals = originals
        self._contributed: dict[Key, str] = {}
        """Contribution ids, for the bases that may still be used."""
        self.admitted: dict[str, Admitted] = {}
        self.receipts: dict[str, Sealed[Receipt]] = {}

    def recall(self) -> None:
        """Learn from the chain who has contributed from bases that may still be used: a new leader was not there."""
        for sealed in self._ledger.versions[self._oldest_base() :]:
            for share in sealed.document.shares:
                self._contributed[share.peer, share.path, share.base_version] = share.contribution

    @property
    def works(self) -> list[Sealed[Contribution]]:
        """What will be in the next version."""
        return [item.sealed for item in self.admitted.values()]

    def judge(
        self,
        sender: PeerId,
        sealed: Sealed[Contribution],
        *,
        decreed: Decreed = NOTHING,
        norm: float | None = None,
    ) -> None:
        """Raise Refused with the reason if it may not count; without the `norm` of its outer gradient, for what can be
        said without the payload. `decreed` is not asked of what is admitted or counted: its receipt is a promise."""
        if sealed.id in self._ledger.counted:
            return
        rules = self._rules(sealed.id)
        if not self.has(sealed.id):
            rules = replace(rules, decreed=decreed)
        verdict = judge(sealed.document, sender=sender, contribution_id=sealed.id, rules=rules, norm=norm)
        if verdict.reason is not None:
            raise Refused(verdict.detail, reason=verdict.reason)
        if self._has_twin(sealed):
            raise Refused("the same work is in, from another version", reason=Reason.ALREADY_CONTRIBUTED)

    def _has_twin(self, sealed: Sealed[Contribution]) -> bool:
        """Whether its work is in under another id: two versions with the same parameters are two bases for one work,
        and judges and auditors know works alone."""
        document = sealed.document
        ids = [id_ for key, id_ in self._contributed.items() if key[:2] == (document.author, document.path)]
        others = [self.admitted[id_].sealed.document for id_ in ids if id_ in self.admitted and id_ != sealed.id]
        return any(other.work == document.work for other in others)

    def measure(self, sealed: Sealed[Contribution]) -> Measured:
        """Read the payload. Raises PayloadLost, and Refused for what is malformed."""
        payload = read_payload(self._store, sealed)
        if len(payload) != sealed.document.payload.size:  # no mirror would take it
            stated = f"a payload of {sealed.document.payload.size} bytes"
            raise Refused(f"{stated} that has {len(payload)}", reason=Reason.MALFORMED)
        try:
            gradient = self._run.read_contribution(payload, self._ledger.module)
        except IntegrityError as error:
            raise Refused(str(error), reason=Reason.MALFORMED) from None
        return Measured(payload, gradient.norm(), self._originals.sketch(gradient))

    @contextlib.contextmanager
    def arriving(self, sealed: Sealed[Contribution]) -> Iterator[None]:
        """Hold the place of a contribution that was judged, until it is admitted or found to be bad."""
        key = key_of(sealed.document)
        self._contributed.setdefault(key, sealed.id)
        try:
            yield
        finally:
            if not self.has(sealed.id) and self._contributed.get(key) == sealed.id:
                del self._contributed[key]

    def has(self, contribution: str) -> bool:
        """Whether it is in a version, or will be in the next."""
        return contribution in self.admitted or contribution in self._ledger.counted

    def require_original(self, sealed: Sealed[Contribution], measured: Measured, *, has_receipt: bool) -> None:
        """Remember it; raises Refused for what repeats another's work, unless it `has_receipt` of a former leader."""
        self._originals.add(sealed, measured.sketch, has_receipt=has_receipt)
        if not has_receipt and self._originals.copies([sealed.id]):
            self._originals.drop(sealed.id)
            raise Refused("another author did this work before", reason=Reason.COPIED)

    def copies(self) -> dict[str, Reason]:
        """What is admitted and repeats work that was committed to before and came later, by id, with the reason."""
        return dict.fromkeys(self._originals.copies(self.admitted), Reason.COPIED)

    def admit(self, sealed: Sealed[Contribution], norm: float) -> None:
        """It will be in the next version; `norm` is that of its outer gradient."""
        self._contributed[key_of(sealed.document)] = sealed.id
        self.admitted[sealed.id] = stored(self._run, self._store, self._ledger.module, sealed, norm=norm)

    def expel(self, sealed: Sealed[Contribution]) -> None:
        """It was admitted, and cannot be in a version: should it come once more, it is as if for the first time."""
        self.admitted.pop(sealed.id, None)
        self.receipts.pop(sealed.id, None)
        self._originals.drop(sealed.id)
        self._contributed.pop(key_of(sealed.document), None)

    def undo(self) -> None:
        """What is admitted began from what is rolled back: it will be in no version."""
        for item in list(self.admitted.values()):
            self.expel(item.sealed)

    def clear(self) -> None:
        """The ledger has the version that counts what was admitted: the next round is open."""
        self.admitted = {}
        oldest, head = self._oldest_base(), self._ledger.head.version
        self._contributed = {key: id_ for key, id_ in self._contributed.items() if key[2] >= oldest}
        self.receipts = {
            id_: sealed for id_, sealed in self.receipts.items() if sealed.document.round >= head - 1 - self._staleness
        }

    def hold(
        self,
        contribution: Contribution,
        *,
        since_s: float | None,
        before: Sequence[PeerId],
        arrivals: Arrivals,
        refused: Collection[Entry] = (),
    ) -> Hold:
        """What is known of the claim behind a contribution, which its author has `since_s`, after those `before`; what
        is `refused`, or will be, covers no path."""
        author, path, base = contribution.author, contribution.path, contribution.base_version
        # Not what only arrives: anybody may send that.
        work = [(key[0], key[1]) for key, id_ in self._contributed.items() if key[2] == base and self.has(id_)]
        others = {peer for peer, known in work if known == path and peer != author}
        is_in = any(Entry(path=path, peer=peer) not in refused for peer in others)
        # In the first round whoever worked in the stage before; a stranger's claim would keep others from the path.
        known = self._ledger.workers_on(path) if base else self._run.manifest.workers
        return Hold(
            since_s=since_s,
            opened_s=arrivals.opened_s.get(base),
            is_covered=is_in or not set(before).isdisjoint(known),
            others=sum(peer == author and known != path for peer, known in work),
            next_s=arrivals.next_s(author, self._run.config.rounds, base=base),
        )

    @property
    def _staleness(self) -> int:
        return self._run.config.rounds.staleness

    def _oldest_base(self) -> int:
        return max(0, self._ledger.head.version - self._staleness)

    def _rules(self, contribution: str) -> AdmissionRules:
        # One that is only arriving is judged anew: the round that it came for may have closed meanwhile.
        is_new = not self.has(contribution)
        contributed = {key: id_ for key, id_ in self._contributed.items() if not (is_new and id_ == contribution)}
        taken: dict[PathId, list[PeerId]] = defaultdict(list)
        for (author, path, _), id_ in contributed.items():
            if id_ not in self._ledger.counted:
                taken[path].append(author)
        rules = admission_rules(self._run, self._ledger, contributed=contributed)
        return replace(rules, taken=taken, workers=self._ledger.workers)


async def require_claim(
    node: Member,
    intake: Intake,
    contribution: Contribution,
    timing: Timing,
    refused: Collection[Entry],
) -> None:
    """Raise Refused unless its author trains the path, as far as we have seen. Asked last, since it may take a look at
    the DHT. `timing` is what this leader has seen; nobody has to yield to those whose work was `refused`."""
    author, path = contribution.author, contribution.path
    if author == node.peer:
        return
    since_s = await node.watch.claimed_s(author, path)
    order = ranking(path, node.watch.claims[path])
    order = [peer for peer in order if Entry(path=path, peer=peer) not in refused]
    before = order[: order.index(author)] if author in order else order
    arrivals = timing.arrivals
    hold = intake.hold(contribution, since_s=since_s, before=before, arrivals=arrivals, refused=refused)
    verdict = judge_claim(contribution, hold, now_s=node.clock.now_s(), deadline_s=timing.deadline_s())
    if verdict.reason is not None:
        raise Refused(verdict.detail, reason=verdict.reason)


def admission_rules(run: Run, ledger: Ledger, *, contributed: Mapping[Key, str]) -> AdmissionRules:
    """What may be in the version after the ledger's head; `contributed` says who has contributed from which base."""
    head = ledger.head
    bases = {head.version: head.digest}
    for version in range(max(0, head.version - run.config.rounds.staleness), head.version):
        bases[version] = ledger.versions[version].document.parent
    return AdmissionRules(
        run=run.id,
        head=head,
        bases=bases,
        paths=frozenset(run.topology.paths_through(ledger.module)),
        shardings={0: 0} | {known.document.number: known.document.from_round for known in run.shardings},
        rounds=run.rounds,
        payload_bytes_max=run.payload_bytes_max(ledger.module),
        tokens_max=run.tokens_full,
        contributed=contributed,
        base_min=ledger.base_min,
        norms=ledger.norms,
        places=run.config.places(ledger.module),
    )


def receipt_for(
    sealed: Sealed[Contribution], signer: Signer, ledger: Ledger, *, term: int, custody: tuple[Custody, ...]
) -> Sealed[Receipt]:
    """The leader's promise about a contribution that is admitted or counted."""
    counted = ledger.counted.get(sealed.id)
    receipt = Receipt(
        run=sealed.document.run,
        contribution=sealed.id,
        module=ledger.module,
        round=ledger.head.version if counted is None else counted - 1,
        term=term,
        custody=custody,
        author=signer.peer,
    )
    return seal(signer, receipt)


def key_of(document: Contribution) -> Key:
    """Of contributions that share it one counts."""
    return document.author, document.path, document.base_version
