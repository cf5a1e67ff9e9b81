"""What judges said of the work of one round of a module: a blob that its version names, so that anybody can come to the
same verdict again."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Container, Iterable

from ..canonical import canonical_bytes, digest
from ..errors import IntegrityError
from .documents import Sealed, unseal
from .gate import DRAW, Appraisal, Judged, refused
from .reasons import Reason
from .signing import PeerId, verify

APPRAISALS_MAX = 4096
"""Of one version."""


def encode_appraisals(appraisals: Iterable[Sealed[Appraisal]]) -> bytes:
    """In an order that does not depend on when they came; nothing for none."""
    found = {(sealed.document.work, sealed.document.author): sealed for sealed in appraisals}
    return canonical_bytes([found[key].to_dict() for key in sorted(found)]) if found else b""


def read_appraisals(data: bytes) -> list[Sealed[Appraisal]]:
    """The inverse, with all signatures checked; raises IntegrityError."""
    try:
        values = json.loads(data) if data else []
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"appraisals that are no JSON: {error}") from None
    if not isinstance(values, list) or len(values) > APPRAISALS_MAX:
        raise IntegrityError(f"appraisals must be a list of at most {APPRAISALS_MAX}")
    found = [unseal(Appraisal, value) for value in values]
    for sealed in found:
        require_drawn(sealed.document)
    if encode_appraisals(found) != data:
        raise IntegrityError("appraisals that are out of order, or given twice")
    return found


def require_drawn(appraisal: Appraisal) -> None:
    """Raise IntegrityError unless the judge's own signature chose the sequences, and the work is another's."""
    if appraisal.author == appraisal.of:
        raise IntegrityError("an appraisal of one's own work")
    if not verify(appraisal.author, DRAW, appraisal.work.encode(), appraisal.draw):
        raise IntegrityError("an appraisal whose draw its author has not signed")


def verdicts(
    appraisals: Iterable[Sealed[Appraisal]], *, known: Container[PeerId], coordinator: PeerId
) -> dict[str, Reason]:
    """The works that do not count, and why. `known` are those whose work the chain counts already."""
    of_work: dict[str, list[Appraisal]] = defaultdict(list)
    for sealed in appraisals:
        of_work[sealed.document.work].append(sealed.document)
    judged = {work: Judged(is_known=found[0].of in known, appraisals=found) for work, found in of_work.items()}
    return refused(judged, coordinator=coordinator)


def forgers(
    appraisals: Iterable[Sealed[Appraisal]], *, known: Container[PeerId], coordinator: PeerId
) -> dict[PeerId, list[PeerId]]:
    """Whose work was refused since auditors came to something else, and who these are."""
    said = list(appraisals)
    found: dict[PeerId, list[PeerId]] = defaultdict(list)
    for work, reason in verdicts(said, known=known, coordinator=coordinator).items():
        for each in (sealed.document for sealed in said if reason == Reason.NOT_REPEATED):
            if each.work == work and each.repeated is not None and not each.repeated.is_same:
                found[each.of].append(each.author)
    return dict(found)


def in_order(peers: Iterable[PeerId], draw: str) -> list[PeerId]:
    """Which of these peers judge first, by a leader's signature under the work that its author could not foresee."""
    return sorted(peers, key=lambda peer: digest(f"{draw} {peer}".encode()))
