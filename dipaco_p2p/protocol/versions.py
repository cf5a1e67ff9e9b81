"""The chain of a module's versions: which follow each other, which is the head, what counts once.

- A chain starts at the genesis that the manifest names; version n + 1 names the digest of version n as its parent.
- A contribution counts at most once on a chain, and an author at most once per path and base.
- A rollback is a version like others, after the ones that it undoes: it shows the coordinator's decree, has the
  parameters of an earlier version of its chain, or those that the decree has rebuilt from there on, and no contribution
  counts after it that began before it.
- Who was entitled to make a version is not said by the chain, but by its maker's mandate (grants.py) and by those who
  made it again and co-signed; how it follows from its contributions, anybody can check.
- A partition or a race may make two branches of a chain. All peers pick the same one: what the coordinator has signed
  is final, then more versions, then more work in them, then the smaller digest. Who leads is another matter
  (grants.py): the leader takes the better branch over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from ..errors import IntegrityError
from ..topology import ModuleId, PathId
from .audits import Work
from .decrees import ROLLBACK, Decree
from .documents import Manifest, ModuleVersion, Sealed, Share, decreed_by, document_id, is_signed
from .signing import PeerId
from .standing import Standings


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A version that somebody has, as it is named to the leader: of two branches each may have one of its number."""

    version: int
    digest: str = ""
    """Empty: only the number is told."""
    weight: int = 0

    def is_of(self, version: ModuleVersion) -> bool:
        """Whether it is this one; two leaders may have made the same parameters of different work."""
        return not self.digest or (self.digest, self.weight) == (version.digest, version.weight)


def genesis_version(manifest: Manifest, module: ModuleId) -> ModuleVersion:
    """Version 0, as the manifest's author would sign it."""
    ref = next(ref for ref in manifest.genesis if ref.module == module)
    outer = manifest.stage_config.outer
    return ModuleVersion(
        run=document_id(manifest),
        module=module,
        version=0,
        parent="",
        snapshot=ref.blob,
        update=None,
        state=ref.state,
        shares=(),
        clip_norm=None,
        lr=outer.lr,
        momentum=outer.momentum,
        norm_rule=outer.norm_rule,
        weight=0,
        term=0,
        grant="",
        author=manifest.author,
    )


def check_successor(parent: ModuleVersion, child: ModuleVersion, manifest: Manifest) -> None:
    """Raise IntegrityError unless `child` may follow `parent`; the bytes are checked by whoever holds them."""
    name = f"version {child.version} of {child.module}"
    outer = manifest.stage_config.outer
    if (child.run, child.module) != (parent.run, parent.module):
        raise IntegrityError(f"{name} belongs to another run or module than its parent")
    if child.version != parent.version + 1 or child.parent != parent.digest:
        raise IntegrityError(f"{name} does not follow version {parent.version}, {parent.digest[:8]}")
    if child.version > manifest.stage_config.rounds.rounds:
        raise IntegrityError(f"{name}, but the run ends with version {manifest.stage_config.rounds.rounds}")
    if (child.lr, child.momentum, child.norm_rule) != (outer.lr, outer.momentum, outer.norm_rule):
        raise IntegrityError(f"{name} was made with other outer settings than the run's")
    if child.term < parent.term:
        raise IntegrityError(f"{name} has term {child.term}, after term {parent.term}")
    if child.weight != parent.weight + sum(share.tokens for share in child.shares):
        raise IntegrityError(f"{name} says that its chain weighs {child.weight}, after {parent.weight}")
    if child.rollback is not None:
        _check_rollback(child, name, manifest)
        return
    if child.update is None or child.state is None:
        raise IntegrityError(f"{name} names no update or no state")
    _check_shares(child, name, staleness=manifest.config.rounds.staleness)


def _check_rollback(version: ModuleVersion, name: str, manifest: Manifest) -> None:
    """That the coordinator wants it; whether the parameters are those, `Tally` says, which knows the chain."""
    assert version.rollback is not None
    decree = version.rollback.decree
    if version.update is not None or version.state is None or version.shares or version.is_fresh:
        raise IntegrityError(f"{name} is a rollback, and names an update, contributions, or no state")
    if version.expels is not None or version.readmits is not None:
        raise IntegrityError(f"{name} is a rollback, and expels or readmits somebody")
    if version.clip_norm is not None or version.audits or version.findings is not None:
        raise IntegrityError(f"{name} is a rollback, and names a norm to clip at, audits, or findings")
    said = (decree.act, decree.stage, decree.module, decree.run)
    run = manifest.origin or version.run
    if said != (ROLLBACK, version.run, version.module, run) or not decree.after < version.version:
        raise IntegrityError(f"{name} shows decree {decree.number}, which is about something else")
    if decree.author != manifest.author or not is_signed(decreed_by(version.rollback)):
        raise IntegrityError(f"{name} shows a decree that is not the coordinator's")
    rebuilt = decree.rebuilt
    if rebuilt is not None and (version.snapshot, version.state) != (rebuilt.snapshot, rebuilt.state):
        raise IntegrityError(f"{name} is not what decree {decree.number} has rebuilt")


def _check_shares(version: ModuleVersion, name: str, *, staleness: int) -> None:
    ids = [share.contribution for share in version.shares]
    if not ids:
        raise IntegrityError(f"{name} was made without any contribution")
    if not all(0 < version.version - share.base_version <= 1 + staleness for share in version.shares):
        raise IntegrityError(f"{name} counts a contribution with a base that is too old, or no base of it")
    order = [(share.path, share.contribution) for share in version.shares]
    if len(ids) != len(set(ids)) or order != sorted(order):
        raise IntegrityError(f"{name} counts a contribution twice, or not in order")
    total = math.fsum(share.weight for share in version.shares)
    if abs(total - 1.0) > 1e-9:
        raise IntegrityError(f"the weights of {name} sum to {total}")


class Tally:
    """What a chain has counted: no contribution twice, and no second one of an author for the same path and base; and
    what was rolled back on it."""

    def __init__(self) -> None:
        self.counted: dict[str, int] = {}
        """Contribution id to the version that counts it."""
        self.standings = Standings()
        """Of those whose contributions these are."""
        self._bases: dict[tuple[PeerId, PathId, int], str] = {}
        self._digests: dict[int, str] = {}
        self._rollbacks: dict[int, int] = {}
        """Version to the number of the decree that it was made by."""

    @property
    def base_min(self) -> int:
        """The newest rollback on the chain: nothing counts that began from a version before it; 0 without one."""
        return max(self._rollbacks, default=0)

    @property
    def rolled_back_by(self) -> int:
        """The number of the newest decree that was carried out on the chain; 0 for none."""
        return max(self._rollbacks.values(), default=0)

    def digest(self, version: int) -> str:
        """Of a version on the chain, 0 too; empty if it has none of that number."""
        return self._digests.get(version, "")

    def check(self, version: ModuleVersion) -> None:
        """Raise IntegrityError if `version` counts something that may not count (any more), or goes back to another
        version than its decree says, or to none that is newer than the last decree's."""
        fresh: set[tuple[PeerId, PathId, int]] = set()
        for share in version.shares:
            base = (share.peer, share.path, share.base_version)
            if share.contribution in self.counted or base in self._bases or base in fresh:
                raise IntegrityError(f"{share.contribution[:8]} counts twice in the chain of {version.module}")
            if share.base_version < self.base_min:
                raise IntegrityError(f"{share.contribution[:8]} began from what was rolled back of {version.module}")
            fresh.add(base)
        self._check_audits(version)
        self.standings.check(version.findings)
        if version.rollback is not None:
            decree = version.rollback.decree
            is_other = decree.rebuilt is None and self.digest(decree.to) != version.digest
            if is_other or decree.number <= self.rolled_back_by:
                raise IntegrityError(f"version {version.version} of {version.module} is not what its decree says")

    def add(self, version: ModuleVersion) -> None:
        """`version` is on the chain now."""
        for share in version.shares:
            self.counted[share.contribution] = version.version
            self._bases[share.peer, share.path, share.base_version] = share.contribution
        authors = (share.peer for share in version.shares)
        self.standings.add(
            version.version,
            authors=authors,
            findings=version.findings,
            works=works_of(version.shares),
            audits=version.audits,
            leader=version.author,
            expels=None if version.expels is None else (version.expels.peer, version.expels.decrees),
            readmits=None if version.readmits is None else version.readmits.decree.peer,
        )
        self._digests |= {version.version - 1: version.parent, version.version: version.digest}
        if version.rollback is not None:
            self._rollbacks[version.version] = version.rollback.decree.number

    def _check_audits(self, version: ModuleVersion) -> None:
        forgers = len(set(version.findings.forged)) if version.findings is not None else 0
        works = works_of(version.shares)
        self.standings.audited.check(version.version, version.audits, works=works, forgers=forgers)

    def copy(self) -> Tally:
        """The same, to try something with."""
        other = Tally()
        other.counted, other._bases, other.standings = dict(self.counted), dict(self._bases), self.standings.copy()
        other._digests, other._rollbacks = dict(self._digests), dict(self._rollbacks)
        return other

    def drop_after(self, version: int) -> None:
        """The versions after this one are on the chain no more."""
        self.counted = {id_: number for id_, number in self.counted.items() if number <= version}
        self._bases = {base: id_ for base, id_ in self._bases.items() if id_ in self.counted}
        self.standings.drop_after(version)
        self._digests = {number: digest for number, digest in self._digests.items() if number <= version}
        self._rollbacks = {number: decree for number, decree in self._rollbacks.items() if number <= version}


def works_of(shares: Iterable[Share]) -> dict[str, Work]:
    """What a version with these shares counts, by the id of the work, where they name it."""
    return {share.work: Work(author=share.peer, tokens=share.tokens) for share in shares if share.work}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A version whose contributions are in the parameters of a later one."""

    version: ModuleVersion
    base: int
    """The newest version before it that has exactly what this step was added to."""
    without: frozenset[PeerId] = frozenset()
    """Whose contributions were left out when it was rebuilt."""

    @property
    def shares(self) -> list[Share]:
        """Those that are in."""
        return [share for share in self.version.shares if share.peer not in self.without]


def built_on(versions: Sequence[ModuleVersion], *, after: int = 0) -> list[Step]:
    """What leads from version `after` to the newest of these `versions`, those of one chain from 1 on: not what a
    rollback has undone. Raises IntegrityError if the newest does not go back to `after`."""
    number, steps = len(versions), list[Step]()
    while number > after:
        version = versions[number - 1]
        if version.rollback is None:
            number -= 1
            steps.append(Step(version=version, base=number))
            continue
        decree = version.rollback.decree
        steps += reversed(rebuilt_from(versions, decree))
        number = decree.to
    if number < after:
        raise IntegrityError(f"version {len(versions)} does not go back to version {after}")
    return steps[::-1]


def rebuilt_from(versions: Sequence[ModuleVersion], decree: Decree) -> list[Step]:
    """The steps that a rollback has rebuilt; empty if it rebuilt nothing."""
    if decree.rebuilt is None:
        return []
    return steps_without(versions[: decree.after], decree.rebuilt.without, after=decree.to)


def steps_without(versions: Sequence[ModuleVersion], peers: Collection[PeerId], *, after: int) -> list[Step]:
    """What `built_on` gives, rebuilt without the contributions of these peers."""
    steps = built_on(versions, after=after)
    return [Step(version=one.version, base=after, without=one.without.union(peers)) for one in steps]


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """What a module has of a peer's work, and what it would take to undo it."""

    peers: frozenset[PeerId]
    """Whose work is to go: the peer's, and that of all whom a decree leaves out already which is not carried out."""
    module: ModuleId
    to: int
    """The last version before the first that counts the peer's work."""
    after: int
    """The last version that is to be rebuilt from there on."""
    others: int
    """Contributions of others that count since, and would be undone as well."""
    sound: tuple[int, ...]
    """The versions up to `to` that the module is built on, rising: it could go back to each of them."""


def damage_by(peer: PeerId, versions: Sequence[ModuleVersion], *, due: Decree | None = None) -> Damage | None:
    """None if nothing that the newest of these `versions`, those of one chain from 1 on, is built on counts the peer's
    work: what a rollback has undone does no more harm. `due` is a rollback that the chain has not carried out yet. The
    decree that undoes this damage takes its place, so the damage is what would be left after it."""
    to, after, others_out = len(versions), len(versions), frozenset[PeerId]()
    if due is not None:
        to = after = due.to
        if due.rebuilt is not None:
            after, others_out = due.after, frozenset(due.rebuilt.without)
    steps = built_on(versions[:to]) + (rebuilt_from(versions, due) if due is not None else [])
    first = next((place for place, step in enumerate(steps) if any(share.peer == peer for share in step.shares)), None)
    if first is None:
        return None
    to, peers = steps[first].base, others_out | {peer}
    since = steps_without(versions[:after], peers, after=to)
    return Damage(
        peers=peers,
        module=versions[0].module,
        to=to,
        after=after,
        others=sum(len(step.shares) for step in since),
        sound=tuple(sorted({step.base for step in steps[: first + 1]})),
    )


def check_chain(versions: Sequence[Sealed[ModuleVersion]], manifest: Manifest, module: ModuleId) -> None:
    """Raise IntegrityError unless these follow the genesis of `module` one by one and count nothing twice."""
    parent = genesis_version(manifest, module)
    tally = Tally()
    for sealed in versions:
        check_successor(parent, sealed.document, manifest)
        tally.check(sealed.document)
        tally.add(sealed.document)
        parent = sealed.document


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


def up_to_last(
    versions: Sequence[Sealed[ModuleVersion]], holds: Callable[[Sealed[ModuleVersion]], bool]
) -> list[Sealed[ModuleVersion]]:
    """The versions of a chain up to the last one of which `holds` is true: it speaks for those before it, too."""
    for count in range(len(versions), 0, -1):
        if holds(versions[count - 1]):
            return list(versions[:count])
    return []


def is_final(sealed: Sealed[ModuleVersion], *, coordinator: PeerId) -> bool:
    """Whether the coordinator has signed this version: as its leader, or after making it again from its contributions.
    It signs one version of a number only, and takes no signature back."""
    return sealed.document.author == coordinator or coordinator in sealed.cosignatures


def blobs_of(version: ModuleVersion) -> list[str]:
    """The digests of the blobs that others fetch of a version."""
    return [ref.digest for ref in (version.snapshot, version.update, version.state) if ref is not None]


def bases_after(versions: Sequence[Sealed[ModuleVersion]], final: int) -> set[str]:
    """The parameters and outer states that an archive may ask for which has none: it makes what follows the newest
    final version again, or what follows the next one, if its last answer was lost."""
    kept = [sealed.document for sealed in versions[max(final - 1, 0) : final + 1]]
    return {ref.digest for one in kept for ref in (one.snapshot, one.state) if ref is not None}
