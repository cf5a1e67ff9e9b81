"""What a leader takes in: contributions of one module, judged, measured, and remembered until they are counted.

- One contribution per author, path and base. One that is still on its way to the disk counts already, so that of two
  that come at once only one gets a receipt.
- A contribution gets one receipt, however often it is pushed.
- What is remembered of an outer gradient is its norm: the payload lies in the store, and is read once more when the
  round closes (closing.py).
- Until there are norms to compare with, the norm of the parameters themselves is the measure: an outer gradient ten
  times as long is none, and could make the module useless in one round.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..core.arrays import Floats, tree_norm
from ..errors import IntegrityError, Refused
from ..node.ledger import Ledger
from ..node.run import Run
from ..node.store import Store
from ..protocol.admission import NORM_HISTORY, NORM_SAMPLES_MIN, AdmissionRules, judge
from ..protocol.decrees import Decreed
from ..protocol.documents import Contribution, Receipt, Sealed, seal
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId, Signer
from ..topology import PathId
from .version import Admitted, order, read_payload, stored

CLIP_MULTIPLE = 3.0
"""Contributions count with at most this many times the running median norm of their module."""

NOTHING = Decreed()

Key = tuple[PeerId, PathId, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a payload says about itself."""

    norm: float
    """Of the outer gradient."""
    params_norm: float | None
    """Of the parameters that it would change; None where the norms of others are the measure."""


class Intake:
    """The open round's contributions, and what is needed to judge the next one."""

    def __init__(self, run: Run, store: Store, ledger: Ledger) -> None:
        self._run = run
        self._store = store
        self._ledger = ledger
        self._contributed: dict[Key, str] = {}
        """Contribution id by author, path and base, for the bases that may still be used."""
        self._norms: deque[float] = deque(maxlen=NORM_HISTORY)
        self.admitted: dict[str, Admitted] = {}
        self.receipts: dict[str, Sealed[Receipt]] = {}

    def recall(self) -> None:
        """Learn from the chain who has contributed from bases that may still be used: a new leader was not there."""
        for sealed in self._ledger.versions[self._oldest_base() :]:
            for share in sealed.document.shares:
                self._contributed[share.peer, share.path, share.base_version] = share.contribution

    def judge(
        self,
        sender: PeerId,
        sealed: Sealed[Contribution],
        *,
        decreed: Decreed = NOTHING,
        measured: Measured | None = None,
    ) -> None:
        """Raise Refused with the reason if it may not count; without `measured`, for what can be said without the
        payload. `decreed` is not asked of what is admitted or counted: its receipt is a promise."""
        if sealed.id in self._ledger.counted:
            return
        rules = self._rules(sealed.id)
        if not self.has(sealed.id):
            rules = replace(rules, decreed=decreed)
        if measured is not None:
            rules = replace(rules, norms=tuple(self._norms), params_norm=measured.params_norm)
        norm = None if measured is None else measured.norm
        verdict = judge(sealed.document, sender=sender, contribution_id=sealed.id, rules=rules, norm=norm)
        if verdict.reason is not None:
            raise Refused(verdict.detail, reason=verdict.reason)

    def measure(self, sealed: Sealed[Contribution], params: Floats) -> tuple[bytes, Measured]:
        """The payload, and what only it can say. Raises PayloadLost, and Refused for what is malformed."""
        payload = read_payload(self._store, sealed)
        try:
            length = self._run.read_contribution(payload, self._ledger.module).norm()
        except IntegrityError as error:
            raise Refused(str(error), reason=Reason.MALFORMED) from None
        has_norms = len(self._norms) >= NORM_SAMPLES_MIN
        return payload, Measured(norm=length, params_norm=None if has_norms else tree_norm(params))

    @contextlib.contextmanager
    def arriving(self, sealed: Sealed[Contribution]) -> Iterator[None]:
        """Hold the place of a contribution that was judged, until it is admitted or found to be bad."""
        key = _key(sealed)
        self._contributed.setdefault(key, sealed.id)
        try:
            yield
        finally:
            if not self.has(sealed.id) and self._contributed.get(key) == sealed.id:
                del self._contributed[key]

    def has(self, contribution: str) -> bool:
        """Whether it is in a version, or will be in the next."""
        return contribution in self.admitted or contribution in self._ledger.counted

    def admit(self, sealed: Sealed[Contribution], norm: float) -> None:
        """It will be in the next version; `norm` is that of its outer gradient."""
        self._contributed[_key(sealed)] = sealed.id
        self.admitted[sealed.id] = stored(self._run, self._store, self._ledger.module, sealed, norm=norm)

    def expel(self, sealed: Sealed[Contribution]) -> None:
        """It was admitted, and cannot be in a version: should it come once more, it is as if for the first time."""
        self.admitted.pop(sealed.id, None)
        self.receipts.pop(sealed.id, None)
        self._contributed.pop(_key(sealed), None)

    def undo(self) -> None:
        """What is admitted began from what is rolled back: it will be in no version."""
        for item in list(self.admitted.values()):
            self.expel(item.sealed)

    def clear(self) -> None:
        """The ledger has the version that counts what was admitted: the next round is open."""
        # In the order of the average, not of arrival: which norms are still remembered must not depend on the network.
        ordered = sorted(self.admitted.values(), key=order)
        self._norms.extend(item.norm for item in ordered if item.norm is not None)
        self.admitted = {}
        oldest, head = self._oldest_base(), self._ledger.head.version
        self._contributed = {key: id_ for key, id_ in self._contributed.items() if key[2] >= oldest}
        self.receipts = {
            id_: sealed for id_, sealed in self.receipts.items() if sealed.document.round >= head - 1 - self._staleness
        }

    def clip_norm(self) -> float | None:
        """The norm that longer contributions are scaled down to; None while too few are known."""
        return CLIP_MULTIPLE * statistics.median(self._norms) if len(self._norms) >= NORM_SAMPLES_MIN else None

    @property
    def _staleness(self) -> int:
        return self._run.config.rounds.staleness

    def _oldest_base(self) -> int:
        return max(0, self._ledger.head.version - self._staleness)

    def _rules(self, contribution: str) -> AdmissionRules:
        # One that is only arriving is judged anew: the round that it came for may have closed meanwhile.
        is_new = not self.has(contribution)
        contributed = {key: id_ for key, id_ in self._contributed.items() if not (is_new and id_ == contribution)}
        return admission_rules(self._run, self._ledger, contributed=contributed)


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
        rounds=run.config.rounds.rounds,
        payload_bytes_max=run.payload_bytes_max(ledger.module),
        tokens_max=run.tokens_full,
        contributed=contributed,
        base_min=ledger.base_min,
    )


def receipt_for(
    sealed: Sealed[Contribution], signer: Signer, ledger: Ledger, *, term: int, holders: tuple[PeerId, ...]
) -> Sealed[Receipt]:
    """The leader's promise about a contribution that is admitted or counted."""
    counted = ledger.counted.get(sealed.id)
    receipt = Receipt(
        run=sealed.document.run,
        contribution=sealed.id,
        module=ledger.module,
        round=ledger.head.version if counted is None else counted - 1,
        term=term,
        holders=tuple(dict.fromkeys(holders)),
        author=signer.peer,
    )
    return seal(signer, receipt)


def _key(sealed: Sealed[Contribution]) -> Key:
    document = sealed.document
    return document.author, document.path, document.base_version
