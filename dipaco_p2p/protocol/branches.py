"""Which of two branches of a module's chain goes on, when a partition or a race has made two.

All peers pick the same one: what the coordinator has signed is final, then more versions, then more work in them, then
the smaller digest. Who leads is another matter (grants.py): the leader takes the better branch over.
"""

from __future__ import annotations

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
        return self.rank < other.rank

    @property
    def rank(self) -> tuple[int, int, int, str]:
        """Sorts branches, the best one first."""
        return -self.final, -self.version, -self.weight, self.digest


def is_final(sealed: Sealed[ModuleVersion], *, coordinator: PeerId) -> bool:
    """Whether the coordinator has signed this version: as its leader, or after making it again from its contributions.
    It signs one version of a number only, and takes no signature back."""
    return sealed.document.author == coordinator or coordinator in sealed.cosignatures
