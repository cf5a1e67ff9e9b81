"""Who may lead a module: a term's grant, and the mandate that it ends.

A **grant** names the leader and the mirrors of a module in a term. The coordinator may sign one for any term. So may a
member of the last group, for the very next term: then a group whose leader died goes on while the coordinator's seed
node is away. A **mandate** is a grant with those before it, back to one of the coordinator's: it shows to anybody, also
to a newcomer, that a leader is entitled. So a peer that merely says that it leads is not believed by anyone.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import IntegrityError
from ..topology import ModuleId
from .documents import Grant, Sealed
from .signing import PeerId

LINKS_MAX = 1024
"""Of a mandate: changes of a group since the coordinator last had a word."""

Mandate = tuple[Sealed[Grant], ...]
"""Never empty; the oldest grant first, and that one is the coordinator's."""

Seniority = tuple[int, int, str]


def seniority(mandate: Mandate) -> Seniority:
    """Of two leaders of one module the one with the greater seniority leads: the one whose mandate begins with the
    coordinator's later grant, then the later term, then the greater peer id, so that all who see both agree. Whoever
    was in a group once can grant itself any number of terms: what the coordinator granted since ends them all."""
    return mandate[0].document.term, mandate[-1].document.term, mandate[-1].document.leader


def follows(grant: Grant, last: Grant) -> bool:
    """Whether a member of the last group may have signed `grant`."""
    is_next = grant.after == last.term and grant.term == last.term + 1
    return is_next and (grant.run, grant.module) == (last.run, last.module) and grant.author in last.group


def extended(mandate: Mandate, sealed: Sealed[Grant], *, coordinator: PeerId) -> Mandate:
    """The mandate that ends with `sealed`, given one that it may follow; raises IntegrityError if it follows nothing.

    A grant of the coordinator needs nothing before it.
    """
    if sealed.document.author == coordinator:
        return (sealed,)
    if not mandate or not follows(sealed.document, mandate[-1].document):
        raise IntegrityError(f"nobody who may has granted term {sealed.document.term} of {sealed.document.module}")
    if len(mandate) >= LINKS_MAX:
        raise IntegrityError(f"a mandate for {sealed.document.module} of more than {LINKS_MAX} grants")
    return (*mandate, sealed)


def check_mandate(grants: Sequence[Sealed[Grant]], *, run: str, module: ModuleId, coordinator: PeerId) -> Mandate:
    """The mandate that somebody shows for `module`; raises IntegrityError unless it goes back to the coordinator."""
    mandate: Mandate = ()
    for sealed in grants:
        if (sealed.document.run, sealed.document.module) != (run, module):
            raise IntegrityError(f"a grant of {sealed.document.module} in a mandate for {module}, or of another run")
        mandate = extended(mandate, sealed, coordinator=coordinator)
    if not mandate:
        raise IntegrityError(f"an empty mandate for {module}")
    return mandate
