"""What final versions say of work that a peer keeps: that they count it, or that no version will.

A leader does not report what it refused to the peers that keep work for it, so each of them decides alone, from the
chain. Work counts at most `staleness` versions late. Once the coordinator has signed the last version that could have
counted it, no branch, no later leader and no other verdict can bring it back: it is dropped, document and payload.
Before that it stays whatever the leader or its judges say, for these may be friends, and another branch may win.
"""

from __future__ import annotations

from ..node.ledger import Ledger, RemoteLedger
from ..node.node import Member
from ..protocol.documents import Contribution, ModuleVersion, Sealed
from ..protocol.signing import PeerId
from ..protocol.standing import OF_AUTHORS


def left_behind(ledger: Ledger, version: int, *, staleness: int) -> list[Sealed[Contribution]]:
    """What is open here, and began too early to count in a chain that has this version: for good, if it is final."""
    return [one for one in ledger.open.values() if one.document.base_version < version - staleness]


def found_of(ledger: Ledger, sealed: Sealed[Contribution]) -> str:
    """What the chain itself finds of work that it does not count; empty if nothing, as where nobody measured it."""
    author, work, is_noted = sealed.document.author, sealed.document.work, ledger.standings.is_noted
    return next((kind for kind in OF_AUTHORS if is_noted((kind, author, work))), "")


async def is_counted(node: Member, ledger: Ledger, sealed: Sealed[Contribution], peer: PeerId | None) -> bool | None:
    """Whether final versions count this contribution: those here, or those that `peer` shows if any are missing. None
    while a later one may. Raises DipacoError."""
    base = sealed.document.base_version
    until = min(base + node.run.config.rounds.staleness + 1, node.run.rounds)
    finals = await _finals(node, ledger, after=max(base - 1, 0), until=until, peer=peer)
    if base and finals and finals.pop(0).digest != sealed.document.base_digest:
        return False  # its base is on a branch that lost
    if any(share.contribution == sealed.id for version in finals for share in version.shares):
        return True
    return False if len(finals) == until - base else None


async def _finals(node: Member, ledger: Ledger, *, after: int, until: int, peer: PeerId | None) -> list[ModuleVersion]:
    if ledger.final >= until or peer is None:
        return [sealed.document for sealed in ledger.versions[after : min(until, ledger.final)]]
    return await RemoteLedger(node, peer, ledger.module).finals(after=after, until=until)
