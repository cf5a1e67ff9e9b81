"""What an archive drops, and when: the run file's `[archive]`, for whoever has less disk than the run has rounds.

    documents/thinned-L1.M0.json     {"contributions": 95, "snapshots": [50, 81], "versions": 93}

Only final versions are thinned: they were made again here, or by a quorum, before they were signed. Of each module
there stay, always, the signed documents of all versions and contributions and what judges said, for these are small,
and credit, standing and lineage follow from them; version 0, which routes; and the newest versions that work may still
be based on. Besides them, as the run file says:

- of the last `rounds` versions all that makes them again: contributions, updates, and the outer state before the first;
- the parameters of every `snapshots`-th version;
- the parameters of the rounds that shardings are made at, and those that somebody still needs (`needed`): of rounds
  that are not judged yet, that are served, or that a decree goes back to.

What goes is written down before it goes: so nobody takes it for damage, and a crash in between loses nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass

from ..canonical import canonical_bytes
from ..config import RunConfig
from ..errors import IntegrityError
from ..node.ledger import DAMAGED_HINT, Ledger
from ..node.run import Run
from ..node.store import Store
from ..protocol.documents import ModuleVersion
from ..topology import ModuleId


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How much an archive keeps."""

    rounds: int = 0
    """Of how many last versions of a module all is kept; 0: of all of them."""
    snapshots: int = 0
    """Every so many versions the parameters are kept for good; 0: never."""
    keepers: int = 0
    """How many volunteers must have proved that they keep what is dropped (challenges.py); 0: nobody."""
    remade: float = 1.0
    """The share of versions that the archive makes again itself (archive.py)."""
    measured: float = 1.0
    """The share of the paths' losses that the coordinator measures itself; below 1 it has parameters only where it
    needs them."""

    @property
    def is_light(self) -> bool:
        """Whether contributions come to the archive only where it makes a version again."""
        return self.remade < 1

    @property
    def has_all_params(self) -> bool:
        """Whether the parameters of every version come to the archive."""
        return self.measured >= 1

    def keeps_params(self, version: int) -> bool:
        """Whether those of this version stay for good."""
        return bool(self.snapshots) and version % self.snapshots == 0

    @property
    def drops(self) -> bool:
        """Whether anything is dropped at all."""
        return bool(self.rounds) or self.is_light

    def versions(self, config: RunConfig) -> int:
        """The newest versions whose parameters, updates and outer states stay: work may be based on all but the first,
        which the others are made from."""
        return max(self.rounds, config.rounds.staleness + 1) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinned:
    """What an archive has dropped of one module."""

    contributions: int = 0
    """The payloads of the contributions to the versions up to this one."""
    versions: int = 0
    """The parameters of the versions up to this one, and of those that nothing is based on any more the rest."""
    snapshots: tuple[int, ...] = ()
    """Which of these versions' parameters are here nevertheless, rising."""

    def lacks(self, version: int) -> bool:
        """Whether the parameters of `version` are not kept; those of version 0 always are."""
        return 0 < version <= self.versions and version not in self.snapshots

    def kept_before(self, version: int) -> int:
        """The newest version up to `version` whose parameters are here."""
        return version if not self.lacks(version) else max((one for one in self.snapshots if one < version), default=0)


def read_thinned(store: Store, module: ModuleId) -> Thinned:
    """What was dropped there. Raises IntegrityError for a damaged file."""
    data = store.read_document(_name(module))
    if data is None:
        return Thinned()
    try:
        value = json.loads(data)
        return Thinned(**{**value, "snapshots": tuple(map(int, value["snapshots"]))})
    except (ValueError, TypeError, KeyError) as error:
        raise IntegrityError(f"{_name(module)}.json was damaged on disk: {error}", hint=DAMAGED_HINT) from None


class Thinning:
    """Of one archive."""

    def __init__(self, store: Store, config: RunConfig, payload: Callable[[str], str | None]) -> None:
        """`payload` gives the digest of a contribution's payload, by its id, if the contribution is known here."""
        self.retention = Retention()
        self.needed: Callable[[ModuleId], Collection[int]] = lambda module: ()
        """Further versions whose parameters must stay."""
        self.kept_elsewhere: Callable[[ModuleId], int] | None = None
        """Up to which version others keep all (challenges.py): what lies behind stays. None: nobody is waited for."""
        self._store = store
        self._config = config
        self._payload = payload
        self._thinned: dict[ModuleId, Thinned] = {}
        self._kept: dict[ModuleId, dict[int, frozenset[str]]] = {}
        """Payloads of the versions that are not thinned: anybody may send another's once more."""
        self._done: dict[ModuleId, int] = {}
        """Up to which version updates and outer states were dropped since this program began."""

    def wants(self, version: int, run: Run) -> bool:
        """Whether the parameters of this version are to come here, once they exist."""
        marked = version in (run.rounds, *self._config.routing.reshard_rounds)
        return marked or self.retention.has_all_params or self.retention.keeps_params(version)

    def of(self, module: ModuleId) -> Thinned:
        """What was dropped of a module."""
        if module not in self._thinned:
            self._thinned[module] = read_thinned(self._store, module)
        return self._thinned[module]

    def thin(self, ledger: Ledger) -> list[str]:
        """Drop what need not be kept any more; the payloads that the caller is to drop, unless it keeps them for a
        contribution that no version counts."""
        rounds, is_light = self.retention.rounds, self.retention.is_light
        if not self.retention.drops:
            return []
        module, before = ledger.module, self.of(ledger.module)
        head, final = ledger.head.version, ledger.final
        elsewhere = final if self.kept_elsewhere is None or is_light else self.kept_elsewhere(module)
        contributions = max(before.contributions, min(final, elsewhere, head if is_light else head - rounds))
        # The versions that are kept whole are made again from the one before them, with its outer state.
        recent, has_all = head - self.retention.versions(self._config), self.retention.has_all_params
        oldest = max(min(contributions - 1, recent), 0) if rounds else 0
        versions = max(before.versions, oldest if has_all else final)
        passed = sorted({*before.snapshots, *range(min(before.versions, max(recent, 0)) + 1, versions + 1)})
        needed = set(self.needed(module)).union(self._config.routing.reshard_rounds)
        stay = [one for one in passed if one in needed or self.retention.keeps_params(one) or one > recent]
        known = set(range(before.versions + 1, versions + 1)).union(before.snapshots) if has_all else set()
        # Others may have never come, or have come again when they were needed.
        stay = [one for one in stay if one in known or self._store.size(ledger.at(one).digest) is not None]
        after = Thinned(contributions=contributions, versions=versions, snapshots=tuple(stay))
        kept = self._kept.setdefault(module, {})
        for version in range(contributions + 1, head + 1):
            if version not in kept:
                kept[version] = self._payloads(ledger.at(version))
        if after == before:
            return []
        self._store.write_document(_name(module), canonical_bytes(asdict(after) | {"snapshots": stay}))
        self._thinned[module] = after
        self._drop_blobs(ledger, after, until=versions if has_all else oldest, lost=set(passed).difference(stay))
        gone = range(before.contributions + 1, contributions + 1)
        counted = [kept.pop(version) if version in kept else self._payloads(ledger.at(version)) for version in gone]
        return self.free(frozenset().union(*counted))

    def forget(self, ledger: Ledger, version: int) -> None:
        """Drop parameters that came again after they were passed; those of the newest versions `thin` looks at."""
        thinned, recent = self.of(ledger.module), ledger.head.version - self.retention.versions(self._config)
        if version <= recent and version <= ledger.head.version and thinned.lacks(version):
            self._store.drop(ledger.at(version).digest)

    def free(self, payloads: Iterable[str]) -> list[str]:
        """Those of `payloads` that no version names which is still kept whole."""
        if not self.retention.drops:
            return []
        held = frozenset().union(*(each for kept in self._kept.values() for each in kept.values()))
        return sorted(set(payloads) - held)

    def _payloads(self, version: ModuleVersion) -> frozenset[str]:
        return frozenset(name for share in version.shares if (name := self._payload(share.contribution)) is not None)

    def _drop_blobs(self, ledger: Ledger, after: Thinned, *, until: int, lost: Collection[int]) -> None:
        """Updates and outer states of the versions `until` this one, and the parameters of those `lost`. A rollback has
        an earlier version's parameters: what another version names that is kept, stays."""
        done, self._done[ledger.module] = self._done.get(ledger.module, 0), until
        states = [ledger.at(version) for version in range(done + 1, until + 1)]
        named = [ref.digest for one in states for ref in (one.update, one.state) if ref is not None]
        named += [ledger.at(version).snapshot.digest for version in lost]
        whole = [ledger.at(version) for version in range(until + 1, ledger.head.version + 1)]
        stay = {ref.digest for one in whole for ref in (one.snapshot, one.update, one.state) if ref is not None}
        stay |= {ledger.at(version).snapshot.digest for version in (0, *after.snapshots)}
        for name in set(named) - stay:
            self._store.drop(name)


def _name(module: ModuleId) -> str:
    return f"thinned-{module}"
