"""The mutants of decrees (mutants.py says what a mutant is)."""

from __future__ import annotations

from dipaco_p2p.node.ledger import Ledger
from dipaco_p2p.protocol.versions import Tally

from .mutants import Soil, mutant


@mutant("what began before a rollback counts", faults=("rollback", "slow", "loss"))
def what_began_before_counts(soil: Soil) -> None:
    for kind in (Tally, Ledger):
        soil.replace(kind, "base_min", lambda original: property(lambda self: 0))


@mutant("what a rollback undoes is not reported", faults=("rollback",))
def not_reported(soil: Soil) -> None:
    soil.replace(Ledger, "undone", lambda original: property(lambda self: []))
