"""What a module's chain says of the peers whose work it counts, and what follows for their next work.

A version names what judges and auditors found of works (gate.py): `Findings`, one peer for each work. Everybody who has
the chain derives the same `Standing` of a peer from them, so it outlives leaders, and nobody has to be believed. Each
finding names its work, and counts once in a chain: else a leader that names old appraisals again prolonged a standing
for as long as it liked. A graver one about the same work may follow, since auditors may end late; a milder one never.

- **Probation**: until auditors have repeated its first works, a peer's work weighs a quarter, unless it was itself
  repeated before it counted.
- A peer whose work was refused since it does not gain weighs half for some versions.
- A peer that withheld what an audit needs, or left before it gave it, is on probation again. After that it is audited
  more often than others, the more often the more audits it has withheld: each may hide all that it has forged since the
  last one.
- A peer that **forged** work waits: for some versions none of its work counts. After that it is a newcomer again.
- An auditor that most others contradict is not **heard** for some versions, neither as an auditor nor as a judge.

Audits that were due earn credit (audits.py): those of an author's first works, and of later ones not many more than the
draw would choose. Who was drawn is the leader's word, but how many is not.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice, repeat

from ..errors import ConfigError, IntegrityError
from .audits import Audit, Audited, Work
from .signing import PeerId, require_digest, short

FORGERS_WAIT = 8
"""Versions in which no work of a peer counts after one that finds it forged work."""
DOUBTED_FOR = 8
"""Versions in which a peer's work weighs less after one that refused some."""
UNHEARD_FOR = 32
"""Versions in which what a peer says of others' work counts for nothing, after one that finds it contradicted."""
PROBATION_WEIGHT = 0.25
DOUBTED_WEIGHT = 0.5
AUDITED_MIN = 0.02
"""The least chance of an audit."""
WORKS_PER_AUDIT = 8
"""Of the works of an author beyond its first ones audits of one in so many earn credit: the draw chooses one in fifty,
and more of them at first."""
FINDINGS_MAX = 256
"""Of one version, so that it fits its document."""

OWNERS_OF = 32
"""Versions whose leaders are a module's owners."""

EXPELLED, WAITS, DOUBTED, UNHEARD, PROBATION = "expelled", "waits", "doubted", "not heard", "on probation"
"""What a standing is called that is less than full, the gravest first."""

Peers = tuple[PeerId, ...]
Finding = tuple[str, PeerId, str]
"""Its kind, the peer, and the id of the work that it is about."""
KINDS = "forged", "withheld", "failed", "contradicted", "repeated"
"""Of findings, the gravest first."""
OF_AUTHORS = "forged", "withheld", "failed", "repeated"
"""Those about the work's author: of one work none follows one that is as grave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Whose works were found what, a peer once for each work, each kind in order."""

    forged: Peers = ()
    """Auditors came to something else."""
    withheld: Peers = ()
    """What auditors needed was not to be had from its author."""
    failed: Peers = ()
    """Judges found that the work harms its path, or gains too little."""
    contradicted: Peers = ()
    """Auditors who came to something else than most others; the only ones who are not the work's author."""
    repeated: Peers = ()
    """Auditors came to the same."""
    works: tuple[str, ...] = ()
    """Of each of these, one kind after the other, the work that it is about."""

    def __post_init__(self) -> None:
        named = [getattr(self, kind) for kind in KINDS]
        if sum(map(len, named)) > FINDINGS_MAX or any(list(peers) != sorted(peers) for peers in named):
            raise ConfigError(f"findings are at most {FINDINGS_MAX} peers, each kind in order")
        if self.works and len(self.works) != sum(map(len, named)):
            raise ConfigError("findings name a work for each peer")
        require_digest(*self.works)

    @classmethod
    def of(cls, **found: Iterable[tuple[PeerId, str]]) -> Findings | None:
        """From peers with the ids of works. None for nothing; of too many the last ones are left out, the gravest
        never."""
        by_kind = ((kind, peer, work) for kind in KINDS for peer, work in sorted(found.get(kind, ())))
        named = list(islice(by_kind, FINDINGS_MAX))
        peers = {kind: tuple(peer for each, peer, _ in named if each == kind) for kind in KINDS}
        return cls(**peers, works=tuple(work for _, _, work in named)) if named else None

    def named(self) -> Iterator[Finding]:
        """Each kind, peer and work; the work is empty if they name none."""
        works = chain(self.works, repeat(""))
        return ((kind, peer, next(works)) for kind in KINDS for peer in getattr(self, kind))


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Of one peer on one chain, as of its head."""

    is_known: bool = False
    """Whether the chain counts work of it since it last forged one."""
    works: int = 0
    """Of it that the chain counts since it last forged or withheld: the more, the fewer are audited."""
    withheld: int = 0
    """How often it withheld what an audit needed, since it last forged: as many times more works are audited."""
    repeated: int = 0
    """Of its works that auditors could repeat, since it last forged or withheld."""
    waits: int = 0
    """Versions in which none of its work counts."""
    is_expelled: bool = False
    """By the module's owners (expulsion.py): none of its work counts until the coordinator admits it."""
    is_doubted: bool = False
    is_heard: bool = True
    """Whether its word on others' work counts."""

    @property
    def is_out(self) -> bool:
        """Whether none of its work counts now."""
        return self.waits > 0 or self.is_expelled

    def is_on_probation(self, audited: int) -> bool:
        """Until auditors have repeated so many of its works."""
        return self.repeated < audited

    def audit_chance(self, audited: int) -> float:
        """How likely its next work is audited."""
        chance = (1 + self.withheld) * max(AUDITED_MIN, 1 / (self.works + 1))
        return 1.0 if self.is_on_probation(audited) else min(1.0, chance)

    def weight(self, audited: int, *, is_repeated: bool = False) -> float:
        """What its next work weighs over one in full standing; `is_repeated`: auditors could repeat this very work."""
        is_trusted = is_repeated or not self.is_on_probation(audited)
        return (1.0 if is_trusted else PROBATION_WEIGHT) * (DOUBTED_WEIGHT if self.is_doubted else 1.0)

    def limits(self, audited: int) -> dict[str, str]:
        """Why it is less than full and how far, the gravest first; nothing for full standing."""
        if self.is_expelled:  # what else there is changes nothing meanwhile
            return {EXPELLED: "nothing counts until the coordinator admits it"}
        if self.waits:
            return {WAITS: f"nothing counts for {self.waits} version{'s' if self.waits > 1 else ''}"}
        found = {DOUBTED: "weighs half"} if self.is_doubted else {}
        if not self.is_heard:
            found[UNHEARD] = "its word on others' work does not count"
        if self.is_on_probation(audited):
            found[PROBATION] = f"{self.repeated} of {audited} repeated"
        return found

    def describe(self, audited: int) -> str:
        """The same in words."""
        return "; ".join(f"{kind}: {how}" for kind, how in self.limits(audited).items()) or "full"

    def rank(self, audited: int) -> tuple[bool, int, bool, bool, float, int]:
        """Sorts standings, the gravest one first."""
        return (
            not self.is_expelled,
            -self.waits,
            not self.is_doubted,
            self.is_heard,
            self.weight(audited),
            self.repeated,
        )


class Standings:
    """Of everybody on one chain, as its versions are added."""

    def __init__(self) -> None:
        self._head = 0
        self._worked: dict[PeerId, list[int]] = defaultdict(list)
        """The versions that count its works."""
        self._found: dict[tuple[str, PeerId], list[int]] = defaultdict(list)
        """The versions with a finding of this kind."""
        self._noted: dict[Finding, int] = {}
        """The version that says so first."""
        self._led: dict[PeerId, list[int]] = defaultdict(list)
        """The versions that it has made."""
        self._expelled: dict[PeerId, list[tuple[int, int | None]]] = defaultdict(list)
        """The versions that expel it, with the decrees that their owners knew, and None for those that admit it."""
        self.audited = Audited()

    @property
    def peers(self) -> frozenset[PeerId]:
        """Whose work any version counts, or has a finding about."""
        found = {peer for (_, peer), versions in self._found.items() if versions}
        return frozenset(found.union(peer for peer, versions in self._worked.items() if versions))

    @property
    def waiting(self) -> list[PeerId]:
        """Who forged work, and waits or is expelled."""
        forgers = (peer for kind, peer in self._found if kind == "forged")
        return sorted(peer for peer in forgers if self.of(peer).is_out)

    def has_found(self, kind: str, peer: PeerId, version: int) -> bool:
        """Whether this version has a finding of this kind about `peer`."""
        return version in self._found.get((kind, peer), ())

    def is_noted(self, finding: Finding) -> bool:
        """Whether the chain says so already, or something as grave about the same work."""
        kind, peer, work = finding
        graver = OF_AUTHORS[: OF_AUTHORS.index(kind) + 1] if kind in OF_AUTHORS else (kind,)
        return any((each, peer, work) in self._noted for each in graver)

    def check(self, findings: Findings | None) -> None:
        """Raise IntegrityError if the next version says something again of a work, or does not say of which."""
        named = list(findings.named()) if findings is not None else []
        for kind, peer, work in named:
            if not work:
                raise IntegrityError(f"a finding about ...{short(peer)} that names no work")
            if self.is_noted((kind, peer, work)):
                raise IntegrityError(f"a finding about work {work[:8]} that an earlier version has")
        if len(set(named)) < len(named):
            raise IntegrityError("a finding that is named twice")

    def last_found(self, kind: str, peer: PeerId) -> int:
        """The newest version with a finding of this kind about `peer`; 0 for none."""
        versions = self._found.get((kind, peer))
        return versions[-1] if versions else 0

    def owners(self, audited: int, *, coordinator: PeerId) -> frozenset[PeerId]:
        """Who led the last versions, is in full standing, and not the coordinator."""
        lately = (peer for peer, versions in self._led.items() if versions and versions[-1] > self._head - OWNERS_OF)
        return frozenset(peer for peer in lately if peer != coordinator and not self.of(peer).limits(audited))

    def expelled(self, peer: PeerId) -> int | None:
        """How many decrees the owners knew that expelled `peer`; None if it is not expelled."""
        found = self._expelled.get(peer)
        return found[-1][1] if found else None

    def has_worked(self, peer: PeerId) -> bool:
        """Whether any version counts work of `peer`."""
        return bool(self._worked.get(peer))

    def of(self, peer: PeerId) -> Standing:
        worked, withheld = self._worked.get(peer, []), self._found.get(("withheld", peer), [])
        forged = self.last_found("forged", peer)
        begin = max(forged, self.last_found("withheld", peer))
        failed, contradicted = self.last_found("failed", peer), self.last_found("contradicted", peer)
        return Standing(
            is_known=_after(worked, forged) > 0,
            works=_after(worked, begin),
            withheld=_after(withheld, forged),
            repeated=_after(self._found.get(("repeated", peer), []), begin),
            waits=max(0, forged + FORGERS_WAIT - self._head) if forged else 0,
            is_expelled=self.expelled(peer) is not None,
            is_doubted=failed > 0 and self._head < failed + DOUBTED_FOR,
            is_heard=not contradicted or self._head >= contradicted + UNHEARD_FOR,
        )

    def earned(self, audited: int) -> list[tuple[int, Audit]]:
        """The audits that earn credit, with the versions that name them, in the order of the chain. Of whoever most
        others contradict none does of the versions in which it will not be heard, nor of as many before: nobody can
        find out any more what it said without a look. So an audit may lose what it has earned."""
        found, paid, works = [], Counter[PeerId](), set[str]()
        for version, audit in self.audited.named:
            author = self.audited.author(audit.work)
            if author is not None and audit.work not in works:
                if paid[author] >= self._audits_due(author, version, audited):
                    continue
                paid[author] += 1
                works.add(audit.work)
            if not self._is_contradicted(audit.by, version):
                found.append((version, audit))
        return found

    @property
    def next_version(self) -> int:
        return self._head + 1

    def add(
        self,
        version: int,
        *,
        authors: Iterable[PeerId],
        findings: Findings | None,
        works: Mapping[str, Work] | None = None,
        audits: Iterable[Audit] = (),
        leader: PeerId | None = None,
        expels: tuple[PeerId, int] | None = None,
        readmits: PeerId | None = None,
    ) -> None:
        """The next version, with the authors of what it counts, and their `works` by id where these are audited.
        `expels` names a peer and the decrees that its owners knew."""
        self._head = version
        if leader is not None:
            self._led[leader].append(version)
        if expels is not None:
            self._expelled[expels[0]].append((version, expels[1]))
        if readmits is not None:
            self._expelled[readmits].append((version, None))
        self.audited.add(version, audits, works=works or {})
        for peer in authors:
            self._worked[peer].append(version)
        for finding in findings.named() if findings is not None else ():
            self._found[finding[:2]].append(version)
            if finding[2]:
                self._noted.setdefault(finding, version)

    def drop_after(self, version: int) -> None:
        """The versions after this one are on the chain no more."""
        self._head = min(self._head, version)
        for versions in (*self._worked.values(), *self._found.values(), *self._led.values()):
            del versions[bisect_right(versions, version) :]
        self._noted = {finding: noted for finding, noted in self._noted.items() if noted <= version}
        for peer, said in self._expelled.items():
            self._expelled[peer] = [one for one in said if one[0] <= version]
        self.audited.drop_after(version)

    def copy(self) -> Standings:
        """The same, to try something with."""
        other = Standings()
        other._head = self._head
        other._worked.update((peer, list(versions)) for peer, versions in self._worked.items())
        other._found.update((key, list(versions)) for key, versions in self._found.items())
        other._led.update((peer, list(versions)) for peer, versions in self._led.items())
        other._expelled.update((peer, list(said)) for peer, said in self._expelled.items())
        other._noted = dict(self._noted)
        other.audited = self.audited.copy()
        return other

    def _audits_due(self, author: PeerId, version: int, audited: int) -> int:
        """Works of this author whose auditors may have earned by then: its first ones, again after each version that
        found it a forger, and a part of all."""
        forged = {one for one in self._found.get(("forged", author), ()) if one < version}
        worked = bisect_left(self._worked.get(author, []), version)
        return audited * (1 + len(forged)) + worked // WORKS_PER_AUDIT

    def _is_contradicted(self, peer: PeerId, version: int) -> bool:
        found = self._found.get(("contradicted", peer), [])
        place = bisect_left(found, version)
        return place < len(found) and found[place] < version + UNHEARD_FOR


def _after(versions: list[int], version: int) -> int:
    """How many of these are later."""
    return len(versions) - bisect_right(versions, version)
