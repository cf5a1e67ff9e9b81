"""Notes of a leader on contributions that it did not take, or that expired: for whoever keeps account of a run.

A note is the leader's word, signed, and contains the contribution with its author's own signature. It changes nothing:
what counts is in the versions. Notes are kept in memory for as long as receipts are, a few of each author and round, so
that who sends a lot that is refused does not push out what others ought to see.
"""

from __future__ import annotations

from ..protocol.documents import Contribution, Rejection, Sealed, seal
from ..protocol.reasons import NOTED
from ..topology import ModuleId
from .chain import Chains

OF_ROUND_MAX = 64
"""Notes of one module and round."""
OF_AUTHOR_MAX = 4
"""Of those, about one author."""


class Rejections:
    """Of the modules that this peer leads."""

    def __init__(self, chains: Chains) -> None:
        self._node = chains.node
        self._chains = chains
        self._notes: dict[ModuleId, dict[str, Sealed[Rejection]]] = {}
        chains.on_expired = self.note

    def note(self, sealed: Sealed[Contribution], reason: str) -> None:
        """Sign a note, if we lead the module, the reason is one to note, and there is room. Of a contribution that is
        refused again the first reason stays."""
        document, run = sealed.document, self._node.run
        module = document.module
        if reason not in NOTED or document.run != run.id or module not in run.topology:
            return
        grant = self._node.mandates.grant(module)
        if grant is None or grant.leader != self._node.peer or document.path not in run.topology:
            return
        round_ = self._chains[module].ledger.head.version
        notes = self._kept(module, round_)
        if sealed.id not in notes and self._has_room(notes, sealed, round_):
            rejection = Rejection(
                contribution=document,
                signature=sealed.signature,
                reason=reason,
                round=round_,
                term=grant.term,
                author=self._node.peer,
            )
            notes[sealed.id] = seal(self._node.swarm.signer, rejection)

    def of(self, module: ModuleId) -> dict[str, Sealed[Rejection]]:
        """By contribution: of the open round and the ones before."""
        return self._kept(module, self._chains[module].ledger.head.version)

    def _kept(self, module: ModuleId, round_: int) -> dict[str, Sealed[Rejection]]:
        oldest = round_ - 1 - self._node.run.config.rounds.staleness
        notes = self._notes.get(module, {})
        self._notes[module] = {id_: sealed for id_, sealed in notes.items() if sealed.document.round >= oldest}
        return self._notes[module]

    @staticmethod
    def _has_room(notes: dict[str, Sealed[Rejection]], sealed: Sealed[Contribution], round_: int) -> bool:
        authors = [one.document.contribution.author for one in notes.values() if one.document.round == round_]
        return len(authors) < OF_ROUND_MAX and authors.count(sealed.document.author) < OF_AUTHOR_MAX
