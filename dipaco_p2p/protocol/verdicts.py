"""What judges said of the work of one round of a module: a blob that its version names, so that anybody can come to the
same verdict again."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from ..canonical import canonical_bytes, digest
from ..errors import IntegrityError
from . import gate
from .audits import AUDITORS_MAX, AUDITS_MAX, Audit, Work
from .documents import Contribution, Sealed, unseal
from .gate import DRAW, GIVEN_SLOWLY, Appraisal, Judged
from .reasons import Reason
from .signing import VALUES_MAX, PeerId, public_key_of, verify
from .standing import Findings, Standings

APPRAISALS_MAX = 4096
"""Of one version."""


def encode_appraisals(appraisals: Iterable[Sealed[Appraisal]]) -> bytes:
    """In an order that does not depend on when they came; nothing for none."""
    found = _sorted(appraisals)
    return canonical_bytes([sealed.to_dict() for sealed in found]) if found else b""


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
    public_key_of(appraisal.of)  # it may come into the version's findings, and be shown
    if appraisal.author == appraisal.of:
        raise IntegrityError("an appraisal of one's own work")
    if not verify(appraisal.author, DRAW, appraisal.work.encode(), appraisal.draw):
        raise IntegrityError("an appraisal whose draw its author has not signed")


class Verdicts:
    """What follows from the appraisals that a version names: what it may count, what that weighs, and what it notes."""

    def __init__(
        self,
        appraisals: Iterable[Sealed[Appraisal]],
        standings: Standings,
        *,
        audited: int,
        coordinator: PeerId,
        earlier: Collection[PeerId] = (),
        tokens_max: int = VALUES_MAX,
    ) -> None:
        """`standings` are those of the chain up to the version's parent; `audited` is RunConfig's, `earlier` are the
        manifest's workers, and no work has more than `tokens_max`."""
        self._appraisals = _sorted(appraisals)
        self._standings = standings
        self._audited = audited
        # In the first version everybody is new: it is chance whose work could be audited already.
        self._is_first = not standings.peers
        self._earlier = earlier
        self._tokens_max = tokens_max
        self._coordinator = coordinator
        of_work: dict[str, list[Appraisal]] = defaultdict(list)
        for said in filter(None, map(self._heard, (sealed.document for sealed in self._appraisals))):
            of_work[said.work].append(said)
        works = self._works = {
            work: Judged(
                is_known=self.is_known(found[0].of),
                appraisals=found,
                is_counted=standings.audited.author(work) is not None,
            )
            for work, found in of_work.items()
        }
        self._refused = gate.refused(works, coordinator=coordinator)
        self._repeated = {work for work, judged in works.items() if gate.is_repeated(judged.appraisals)}
        forged = [(works[id_].author, id_) for id_, why in self._refused.items() if why == Reason.NOT_REPEATED]
        self.forgers = {peer for peer, id_ in forged if not standings.is_noted(("forged", peer, id_))}

    def is_known(self, peer: PeerId) -> bool:
        """Whether the chain counts work of `peer`, or the stage before does and the chain finds none of it forged."""
        standings = self._standings
        return standings.of(peer).is_known or (peer in self._earlier and not standings.last_found("forged", peer))

    def believes(self, said: Appraisal) -> bool:
        """Whether a judge's word on repeated steps counts. Nobody but the leader may know a judge that the chain does
        not: it may have made the key a moment ago. So such a judge makes nobody a forger. That a state came slowly says
        nothing of authors on probation: whoever is in full standing has given as many in time as were audited."""
        if said.repeated == GIVEN_SLOWLY and self._standings.of(said.of).is_on_probation(self._audited):
            return False
        accuses = said.repeated is not None and not said.repeated.is_same
        return not accuses or said.author == self._coordinator or self.is_known(said.author)

    def _heard(self, said: Appraisal) -> Appraisal | None:
        """What counts of a judge's word."""
        if said.author != self._coordinator and not self._standings.of(said.author).is_heard:
            return None
        return said if self.believes(said) else replace(said, repeated=None)

    def findings(self, counted: Mapping[str, Work]) -> Findings | None:
        """What a version notes that counts these works, by id."""
        repeatable = {
            id_
            for id_, work in self._recent(counted).items()
            if id_ in self._works and self._works[id_].author == work.author
        }
        is_noted = self._standings.is_noted
        return gate.findings(self._works, self._refused, repeatable=repeatable, is_noted=is_noted)

    def audits(self, counted: Mapping[str, Work]) -> tuple[Audit, ...]:
        """Which audits such a version names: of works that the chain counts, and of one refused work of each forger
        that it knows. Nobody's are named again, and of too many those of the last works are left out."""
        recent, forgers, found = self._recent(counted), set[PeerId](), list[Audit]()
        for id_, judged in sorted(self._works.items()):
            named, work = self._standings.audited.auditors(id_), recent.get(id_)
            if work is None:
                said = min(one.tokens for one in judged.appraisals)
                work = Work(author=judged.author, tokens=min(said, self._tokens_max))
                is_forged = self._refused.get(id_) == Reason.NOT_REPEATED and judged.is_known and not named
                if not is_forged or work.author in forgers:
                    continue
                forgers.add(work.author)
            agreed = in_order(gate.agreed(judged.appraisals), id_)
            new = [peer for peer in agreed if peer not in named and peer != work.author]
            found += (Audit(work=id_, by=peer, tokens=work.tokens) for peer in new[: AUDITORS_MAX - len(named)])
        return tuple(sorted(found)[:AUDITS_MAX])

    def _recent(self, counted: Mapping[str, Work]) -> dict[str, Work]:
        standings = self._standings
        return standings.audited.recent(standings.next_version) | dict(counted)

    @property
    def blob(self) -> bytes:
        """All that was said, as the version names it."""
        return encode_appraisals(self._appraisals)

    def reason(self, contribution: Contribution) -> Reason | None:
        """Why it does not count; None if it does."""
        return self.reason_of(contribution.author, contribution.work)

    def reason_of(self, author: PeerId, work: str) -> Reason | None:
        """The same of a work by its id; without it only what is said of its author."""
        if author in self.forgers or self._standings.of(author).is_out:
            return Reason.NOT_REPEATED
        return self._refused.get(work)

    def weight(self, contribution: Contribution) -> float:
        """How much it counts, over one of an author in full standing."""
        is_repeated = contribution.work in self._repeated or self._is_first
        return self._standings.of(contribution.author).weight(self._audited, is_repeated=is_repeated)


def auditors_against(peer: PeerId, appraisals: Iterable[Sealed[Appraisal]]) -> list[PeerId]:
    """Who came to something else when they repeated work of `peer`."""
    said = (sealed.document for sealed in appraisals)
    return sorted({one.author for one in said if one.of == peer and one.repeated and not one.repeated.is_same})


def _sorted(appraisals: Iterable[Sealed[Appraisal]]) -> list[Sealed[Appraisal]]:
    """By work and judge, the last one of each."""
    found = {(sealed.document.work, sealed.document.author): sealed for sealed in appraisals}
    return [found[key] for key in sorted(found)]


def in_order(peers: Iterable[PeerId], draw: str) -> list[PeerId]:
    """Which of these peers judge first, by the draw of a work (owner/trials.py), which its author could not foresee."""
    return sorted(peers, key=lambda peer: digest(f"{draw} {peer}".encode()))
