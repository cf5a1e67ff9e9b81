"""Invitations: whose work a run takes that is not open to all, and how one volunteer lets in another.

- An invitation is signed by who invites. A chain of them leads from the coordinator to a volunteer: the coordinator
  signs the first, whoever is invited by one signs the next, and the last invites the volunteer itself. It is shown with
  contributions, so a leader asks nobody.
- Who is invited is a tree. A ban cuts off the banned peer and all below it, and nothing has to be signed for that.
- A volunteer's invitation counts while it is in good standing: not banned, and its work counted.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..config import INVITE, LIST, OPEN, AdmissionConfig
from ..errors import ConfigError
from ..strict import bounded
from .signing import PeerId, require_digest, require_peers, short

LINKS_MAX = 6
"""Of one chain: its code (node/invitations.py) is then still a word that can be copied."""
INVITED_S_MAX = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """Its author's word that a peer may take part in a run."""

    KIND: ClassVar[str] = "invitation"
    run: str
    """The id of the run's first stage: an invitation holds in all of them."""
    peer: PeerId
    """Who is invited."""
    at_s: int = bounded(low=0, high=INVITED_S_MAX)
    """Unix time on the author's clock; for display only."""
    author: PeerId
    """The coordinator, or a volunteer that is invited itself."""

    def __post_init__(self) -> None:
        require_digest(self.run)
        require_peers(self.peer)
        if self.peer == self.author:
            raise ConfigError("a peer cannot invite itself")


def objection(
    author: PeerId,
    chain: Sequence[Invitation],
    *,
    admission: AdmissionConfig,
    run: str,
    coordinator: PeerId,
    banned: Container[PeerId],
    has_worked: Callable[[PeerId], bool],
) -> str:
    """What speaks against taking work of `author`, who shows `chain`, the coordinator's invitation first; empty if
    nothing does. The signatures are checked already; `run` is the id of the first stage."""
    if author == coordinator or admission.policy == OPEN:
        return ""
    if admission.policy == LIST:
        return "" if author in admission.peers else f"...{short(author)} is not on this run's list"
    assert admission.policy == INVITE, "there is no other"
    if not chain:
        return f"this run takes work of those who are invited, and ...{short(author)} showed no invitation"
    return broken(author, chain, run=run, coordinator=coordinator) or _standing(author, chain, banned, has_worked)


def broken(author: PeerId, chain: Sequence[Invitation], *, run: str, coordinator: PeerId) -> str:
    """Why these do not lead from the coordinator to `author`; empty if they do. It never changes."""
    if len(chain) > LINKS_MAX:
        return f"a chain of {len(chain)} invitations, limit {LINKS_MAX}"
    inviter = coordinator
    for number, invitation in enumerate(chain, start=1):
        if invitation.run != run:
            return f"invitation {number} is to run:{invitation.run[:8]}, and this is run:{run[:8]}"
        if invitation.author != inviter:
            return f"invitation {number} is by ...{short(invitation.author)}, and should be by ...{short(inviter)}"
        inviter = invitation.peer
    return "" if inviter == author else f"the last invitation is for ...{short(inviter)}, not ...{short(author)}"


def _standing(
    author: PeerId, chain: Sequence[Invitation], banned: Container[PeerId], has_worked: Callable[[PeerId], bool]
) -> str:
    """What is wrong with those who invite after the coordinator, or with `author`; empty if nothing is."""
    inviters = [invitation.author for invitation in chain[1:]]
    for peer in [*inviters, author]:
        if peer in banned:
            return f"the invitation of ...{short(author)} is revoked: ...{short(peer)} is banned"
    idle = next((peer for peer in inviters if not has_worked(peer)), None)
    return "" if idle is None else f"...{short(idle)} may not invite yet: no work of it is counted here"


def is_listed(peer: PeerId, *, admission: AdmissionConfig, coordinator: PeerId, seeds: Container[PeerId]) -> bool:
    """Whether a run with a list knows `peer`; `seeds` are those that the coordinator appointed. Others have none."""
    return admission.policy != LIST or peer in admission.peers or peer == coordinator or peer in seeds
