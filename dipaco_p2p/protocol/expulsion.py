"""A ban from one module by its owners, while the coordinator is away.

Owners are the peers that led the module in the last versions of its chain. Two thirds of those in full standing, of
five at least, can **expel** a peer that their chain has found a forger of work (gate.py says what two auditors need
for that). Each signs a `Vote`; the leader gathers them, and its next version shows them as an `Expulsion`. So whoever
has the chain can check it: who led, how each stands, that the finding is there, and all signatures.

None of an expelled peer's work counts in this chain any more, until a later version shows a decree of the coordinator
that admits it, and that is newer than the ones the owners knew: the coordinator has the last word.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..canonical import canonical_bytes
from ..errors import ConfigError, IntegrityError
from ..strict import bounded
from ..topology import ModuleId
from .decrees import ADMIT, DECREES_MAX, ShownDecree
from .signing import VALUES_MAX, PeerId, Signer, public_key_of, verify
from .standing import Standings

VOTE = "vote"
"""The kind under which owners sign."""
OWNERS_MIN = 5
"""In full standing: fewer could be friends."""
VOTES_MAX = 22
"""Two thirds of as many owners as there can be (standing.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What owners vote on."""

    run: str
    """The stage's id."""
    module: ModuleId
    peer: PeerId
    found: int = bounded(low=1, high=VALUES_MAX)
    """The version of the module that finds it a forger."""
    decrees: int = bounded(0, low=0, high=DECREES_MAX)
    """How many of the coordinator's decrees the owners know: a later one may undo it."""

    def signed(self) -> bytes:
        """What a vote is a signature of."""
        return canonical_bytes([self.run, str(self.module), self.peer, self.found, self.decrees])


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """One owner's, for it."""

    owner: PeerId
    signature: str

    @classmethod
    def sign(cls, signer: Signer, charge: Charge) -> Vote:
        return cls(owner=signer.peer, signature=signer.sign(VOTE, charge.signed()))

    def is_for(self, charge: Charge) -> bool:
        """Whether its owner has signed this."""
        return verify(self.owner, VOTE, charge.signed(), self.signature)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expulsion:
    """What a version shows of a peer whose work counts no more."""

    peer: PeerId
    found: int = bounded(low=1, high=VALUES_MAX)
    decrees: int = bounded(0, low=0, high=DECREES_MAX)
    votes: tuple[Vote, ...]
    """By owner."""

    def __post_init__(self) -> None:
        public_key_of(self.peer)
        owners = [vote.owner for vote in self.votes]
        if len(owners) > VOTES_MAX or owners != sorted(set(owners)):
            raise ConfigError(f"votes are at most {VOTES_MAX}, one of each owner, in order")

    def charge(self, *, run: str, module: ModuleId) -> Charge:
        """What these are votes for."""
        return Charge(run=run, module=module, peer=self.peer, found=self.found, decrees=self.decrees)


def check_charge(charge: Charge, standings: Standings) -> None:
    """Raise IntegrityError unless the chain of which these are the standings finds this peer a forger, which waits."""
    standing = standings.of(charge.peer)
    if standing.is_expelled or not standing.waits:
        raise IntegrityError("a vote on a peer that does not wait, or is expelled already")
    if not standings.has_found("forged", charge.peer, charge.found):
        raise IntegrityError(f"version {charge.found} finds no forger whom the owners name")


def needed(owners: int) -> int:
    """How many votes expel a peer; 0 for so few owners that none do."""
    return -(-2 * owners // 3) if owners >= OWNERS_MIN else 0


def check_expulsion(
    expulsion: Expulsion, charge: Charge, standings: Standings, *, audited: int, coordinator: PeerId
) -> None:
    """Raise IntegrityError unless the next version may show it, on this charge; `standings` are those of the chain up
    to its parent."""
    owners = standings.owners(audited, coordinator=coordinator)
    check_charge(charge, standings)
    for vote in expulsion.votes:
        if vote.owner not in owners:
            raise IntegrityError("a vote of a peer that is no owner in full standing")
        if not vote.is_for(charge):
            raise IntegrityError("a vote that its owner has not signed")
    if not needed(len(owners)) or len(expulsion.votes) < needed(len(owners)):
        raise IntegrityError(f"{len(expulsion.votes)} votes of {len(owners)} owners expel nobody")


def check_readmission(
    shown: ShownDecree, standings: Standings, *, run: str, coordinator: PeerId, is_signed: bool
) -> None:
    """Raise IntegrityError unless it is the coordinator's decree (`is_signed`) of this `run`, which admits a peer that
    is expelled, and comes after those that its owners knew."""
    decree = shown.decree
    if (decree.run, decree.act, decree.author) != (run, ADMIT, coordinator) or not is_signed or decree.peer is None:
        raise IntegrityError("a readmission by what is no decree of the coordinator that admits a peer")
    known = standings.expelled(decree.peer)
    if known is None or decree.number <= known:
        raise IntegrityError("a readmission of a peer that is not expelled, or by a decree that is older")
