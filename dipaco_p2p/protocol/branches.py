"""Which of two branches of a module's chain goes on, when a partition or a race has made two.

All peers pick the same one: what the coordinator has signed is final, then more versions, then more work in them, then
the smaller digest. Who leads is another matter (grants.py): the leader takes the better branch over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .documents import ModuleVersion, Sealed
from .signing import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """The end of a chain, as far as branches are compared."""

    final: int
    """The newest version that the coordinator has signed."""
    version: int
    weight: int
    """Tokens that the chain has counted."""
    digest: str

    def is_better(self, other: Branch) -> bool:
        """Whether this branch goes on and `other` ends, if both begin at the same genesis."""
        ours, theirs = ((one.final, one.version, one.weight) for one in (self, other))
        return ours > theirs or (ours == theirs and self.digest < other.digest)


def is_final(sealed: Sealed[ModuleVersion], *, coordinator: PeerId) -> bool:
    """Whether the coordinator has signed this version: as its leader, or after making it again from its contributions.
    It signs one version of a number only, and takes no signature back."""
    return sealed.document.author == coordinator or coordinator in sealed.cosignatures


def branch_of(versions: Sequence[Sealed[ModuleVersion]], genesis: ModuleVersion, *, coordinator: PeerId) -> Branch:
    """The branch that a chain is, from the checked documents themselves."""
    finals = (sealed.document.version for sealed in reversed(versions) if is_final(sealed, coordinator=coordinator))
    head = versions[-1].document if versions else genesis
    return Branch(final=next(finals, 0), version=head.version, weight=head.weight, digest=head.digest)
