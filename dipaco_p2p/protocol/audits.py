"""Audits that a module's chain names: who repeated which work. They earn credit (credit.py), each once.

A version names an `Audit` only of work that its chain counts, in this version or one of the last ones, or of work that
it refuses as forged by an author whom the chain knows: keys cost nothing, so that else friends could audit works
that do not exist without an end. The version's share says which work it is of (`Share.work`), so all that is needed to
check this, and to reckon what it earns, is in the chain itself.

Each module of a path has its own chain, and each of them names an audit once; it earns there what the work does, its
tokens divided by the levels. So nobody has to look into other chains to see that nothing is paid twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import IntegrityError
from ..strict import bounded
from .signing import VALUES_MAX, PeerId, public_key_of, require_digest

AUDITS_MAX = 64
"""That one version names, so that it fits its document."""
AUDITORS_MAX = 2
"""Of one work that a chain names: so many must agree where any two do not, and more are not asked."""
LATE_VERSIONS = 3
"""A version names audits of work that the chain counts since so many versions, and of no older one."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Audit:
    """One peer has repeated a work, and most who did came to the same as it."""

    work: str
    """`Contribution.work`."""
    by: PeerId
    """The auditor."""
    tokens: int = bounded(low=1, high=VALUES_MAX)
    """Of the work, as the chain counts them; of forged work, as its author said."""

    def __post_init__(self) -> None:
        require_digest(self.work)
        public_key_of(self.by)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a chain counts of somebody's work."""

    author: PeerId
    tokens: int


class Audited:
    """What one chain counts, and which audits it has named, as its versions are added."""

    def __init__(self) -> None:
        self._counted: dict[str, tuple[int, Work]] = {}
        """By the work's id, with the version that counts it."""
        self._named: dict[str, dict[PeerId, tuple[int, Audit]]] = defaultdict(dict)
        """By work, then by auditor, with the version that names it."""

    def auditors(self, work: str) -> frozenset[PeerId]:
        """Whose audits of this work were named."""
        return frozenset(self._named.get(work, ()))

    def recent(self, version: int) -> dict[str, Work]:
        """The works of which `version`, the next one, may name audits besides those that it counts."""
        return {id_: work for id_, (counted, work) in self._counted.items() if counted >= version - LATE_VERSIONS}

    def author(self, work: str) -> PeerId | None:
        """None of work that the chain does not count."""
        known = self._counted.get(work)
        return known[1].author if known is not None else None

    @property
    def named(self) -> list[tuple[int, Audit]]:
        """All audits with the versions that name them, in the order of the chain."""
        found = ((number, audit) for by_peer in self._named.values() for number, audit in by_peer.values())
        return sorted(found)

    def check(self, version: int, audits: Iterable[Audit], *, works: Mapping[str, Work], forgers: int) -> None:
        """Raise IntegrityError if the next version, which counts these `works` and finds so many `forgers`, names an
        audit twice, for its author, of work that is not the chain's, or with other tokens than it counts."""
        audits, known = list(audits), self.recent(version) | dict(works)
        if audits != sorted(audits) or len({(one.work, one.by) for one in audits}) < len(audits):
            raise IntegrityError("audits that are named twice, or not in order")
        for audit in audits:
            work, named = known.get(audit.work), self.auditors(audit.work)
            if audit.by in named:
                raise IntegrityError(f"an audit of work {audit.work[:8]} that an earlier version names")
            if len(named) + sum(one.work == audit.work for one in audits) > AUDITORS_MAX:
                raise IntegrityError(f"more than {AUDITORS_MAX} audits of work {audit.work[:8]}")
            if work is not None and (work.tokens != audit.tokens or work.author == audit.by):
                raise IntegrityError(f"an audit of work {audit.work[:8]} by its author, or with other tokens")
        if len({one.work for one in audits} - known.keys()) > forgers:
            raise IntegrityError("audits of work that the chain does not count")

    def add(self, version: int, audits: Iterable[Audit], *, works: Mapping[str, Work]) -> None:
        """The next version."""
        for id_, work in works.items():
            self._counted.setdefault(id_, (version, work))
        for audit in audits:
            self._named[audit.work][audit.by] = version, audit

    def drop_after(self, version: int) -> None:
        """The versions after this one are on the chain no more."""
        self._counted = {id_: known for id_, known in self._counted.items() if known[0] <= version}
        for work in list(self._named):
            self._named[work] = {peer: one for peer, one in self._named[work].items() if one[0] <= version}

    def copy(self) -> Audited:
        """The same, to try something with."""
        other = Audited()
        other._counted = dict(self._counted)
        other._named.update((work, dict(by_peer)) for work, by_peer in self._named.items())
        return other
