"""The mutants of owner groups: receipts, takeovers, branches, mandates (mutants.py says what a mutant is)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bootstrap.terms import Terms
from dipaco_p2p.node.ledger import Ledger
from dipaco_p2p.node.mandates import Mandates
from dipaco_p2p.owner.chain import ModuleChain
from dipaco_p2p.owner.intake import Intake
from dipaco_p2p.owner.leader import Leader
from dipaco_p2p.owner.leadership import Leadership
from dipaco_p2p.owner.replication import Replication
from dipaco_p2p.protocol import owners
from dipaco_p2p.protocol.versions import Tally

from .mutants import Soil, mutant

LEADERS_DIE = ("gone for good", "disk loss", "crash")
BRANCHES = ("partition", "one-way cut", "seed death", "freeze", "crash")
"""Under which some branches are left."""


async def _done(*parts: Any, **named: Any) -> None:
    """Nothing, and at once."""


@mutant("no replication before the receipt", faults=LEADERS_DIE)
def no_replication(soil: Soil) -> None:
    def make(original: Any) -> Any:
        async def keep(self: Replication, sealed: Any, payload: bytes) -> Any:
            self._chain.add(sealed)
            return self._node.peer, *(replica.peer for replica in self.replicas()[:1])

        return keep

    soil.replace(Replication, "keep", make)


@mutant("takeover forgets open contributions", faults=LEADERS_DIE)
def takeover_forgets(soil: Soil) -> None:
    def make(original: Any) -> Any:
        async def reopen(self: Leader, **changes: Any) -> None:
            self._ledger.open.clear()
            await original(self, **changes)

        return reopen

    soil.replace(Leader, "_reopen", make)
    soil.replace(Leadership, "_resubmit", lambda original: _done)


@mutant("merge drops the losing branch's contributions", faults=BRANCHES, seeds=(29,))
def merge_drops(soil: Soil) -> None:
    def make(original: Any) -> Any:
        def leave(self: ModuleChain, version: int) -> None:
            ledger = self.ledger
            given_up = [share.contribution for sealed in ledger.versions[version:] for share in sealed.document.shares]
            original(self, version)
            for contribution in given_up:
                ledger.drop(contribution)

        return leave

    soil.replace(ModuleChain, "_leave", make)


@mutant("old term's leader obeyed", faults=("freeze", "partition", "one-way cut"))
def old_leader_obeyed(soil: Soil) -> None:
    soil.replace(ModuleChain, "_require_leader", lambda original: lambda self, sender: None)


@mutant("newcomer displaces leader", faults=("join",))
def newcomer_displaces(soil: Soil) -> None:
    original = owners.successors

    def successors(module: Any, heartbeats: Mapping[Any, Any], *, incumbent: Any, group: Any) -> Any:
        return original(module, heartbeats, incumbent=None, group=())

    soil.replace_everywhere("successors", original, successors)
    soil.replace(owners, "successors", lambda before: successors)
    soil.replace(Terms, "_depose", lambda before: _done)


@mutant("what is not final is forgotten", faults=("seed death", "crash"))
def not_final_forgotten(soil: Soil) -> None:
    def make(original: Any) -> Any:
        def settle(self: Ledger) -> list[str]:
            settled = list(self.spent.values())
            for sealed in settled:
                self.drop(sealed.id)
            return [sealed.document.payload.digest for sealed in settled]

        return settle

    soil.replace(Ledger, "settle", make)


@mutant("mandate not on disk", faults=("seed death", "total outage"))
def mandate_not_on_disk(soil: Soil) -> None:
    def make(original: Any) -> Any:
        def init(self: Mandates, run: Any, store: Any = None) -> None:
            original(self, run, None)

        return init

    soil.replace(Mandates, "__init__", make)


@mutant("counted again after it was submitted again", faults=("loss", "slow", "partition"))
def counted_again(soil: Soil) -> None:
    soil.replace(Intake, "has", lambda original: lambda self, contribution: contribution in self.admitted)
    soil.replace(Tally, "check", lambda original: lambda self, version: None)
