"""What judges and auditors said against work, as long as no version tells of it.

A leader that refuses all work of a round makes no version that could say why, and an audit may fail after its work
counted. So what was said goes to the disks of the leader, its mirrors and the archive: whoever leads next, after a
takeover or a restart, comes to the same verdict again. It rests on the signatures of those who looked, whom a leader
could have asked, and on nothing that a former leader says besides.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence

from ..errors import IntegrityError
from ..node.ledger import Ledger
from ..node.node import Member
from ..protocol import gate
from ..protocol.documents import Sealed
from ..protocol.gate import Appraisal
from ..protocol.verdicts import encode_appraisals, read_appraisals, require_drawn

log = logging.getLogger(__name__)

EVIDENCE_MAX = 256
"""Appraisals of one module that are kept: a module whose work is all refused makes no version."""
EVIDENCE_VERSIONS = 8
"""After so many versions it is dropped, told of or not."""


class Evidence:
    """Of one module, at this peer."""

    def __init__(self, node: Member, ledger: Ledger) -> None:
        self._history = node.history
        store = self._store = node.store
        self._ledger = ledger
        self._prefix = f"said-{ledger.module}-"
        self._kept: dict[str, dict[str, Sealed[Appraisal]]] = {}
        """By the name of its document, one for each work, then by id."""
        for name in store.documents(self._prefix):
            try:
                self._kept[name] = {one.id: one for one in read_appraisals(store.read_document(name) or b"")}
            except IntegrityError as error:  # others have it
                log.warning("%s was damaged on disk: %s", name, error)
                store.drop_document(name)

    def keep(self, said: Iterable[Sealed[Appraisal]]) -> None:
        """Have this on disk; of too much, what came first is dropped. What is here already changes nothing. Raises
        IntegrityError for what nobody was drawn to say."""
        of_work: dict[str, dict[str, Sealed[Appraisal]]] = defaultdict(dict)
        for sealed in said:
            if sealed.document.run == self._ledger.head.run:
                require_drawn(sealed.document)
                of_work[sealed.document.work][sealed.id] = sealed
        for work, found in of_work.items():
            name = next((name for name in self._kept if name.endswith(work)), None)
            name = name or f"{self._prefix}{self._ledger.head.version:08d}-{work}"
            known = self._kept.get(name, {})
            if not found.keys() <= known.keys():
                self._kept[name] = known | found
                self._store.write_document(name, encode_appraisals(self._kept[name].values()))
                self._note(list(self._kept[name].values()))
        while sum(map(len, self._kept.values())) > EVIDENCE_MAX:
            self._drop(next(iter(self._kept)))

    def said(self) -> list[Sealed[Appraisal]]:
        """All of which no version tells yet, by work."""
        return [one for found in self._kept.values() for one in found.values() if not self._is_told(one.document)]

    def settle(self) -> None:
        """Drop what final versions tell of, and what is old."""
        ledger = self._ledger
        for name, found in list(self._kept.items()):
            is_told = ledger.final == ledger.head.version and all(self._is_told(one.document) for one in found.values())
            if is_told or int(name.split("-")[-2]) + EVIDENCE_VERSIONS < ledger.head.version:
                self._drop(name)

    def _note(self, found: Sequence[Sealed[Appraisal]]) -> None:
        appraisals = [sealed.document for sealed in found]
        facts = {"work": appraisals[0].work, "of": appraisals[0].of, "is_forged": gate.is_forged(appraisals)}
        facts["is_withheld"] = gate.is_withheld(appraisals)
        self._history.add("evidence", module=str(self._ledger.module), **facts)

    def _is_told(self, appraisal: Appraisal) -> bool:
        """Whether the chain has a finding against the author of the work."""
        return self._ledger.standings.is_noted(("failed", appraisal.of, appraisal.work))

    def _drop(self, name: str) -> None:
        del self._kept[name]
        self._store.drop_document(name)
