"""Which blobs of a peer's chains nobody needs any more: all that it keeps is bounded, whatever it leads or mirrors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ..protocol.documents import ModuleVersion, Sealed
from ..topology import ModuleId
from .ledger import Ledger
from .store import Store


class Pruning:
    """What may be dropped of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pruned: dict[ModuleId, int] = defaultdict(int)
        """How many versions, from the first on, have no blob here any more."""
        self._orphans: dict[ModuleId, set[str]] = defaultdict(set)
        """Blobs of versions that were given up."""

    def given_up(self, module: ModuleId, versions: Iterable[Sealed[ModuleVersion]]) -> None:
        """These versions are on the chain no more; another branch may name the same blobs."""
        for sealed in versions:
            self._orphans[module].update(_blobs(sealed))
            self._pruned[module] = min(self._pruned[module], sealed.document.version - 1)

    def versions(self, ledger: Ledger, *, keep: int) -> None:
        """Drop the blobs of versions that nobody's base is any more: of all but the newest `keep`."""
        module, oldest = ledger.module, max(0, ledger.head.version - keep)
        names = {name for sealed in ledger.versions[self._pruned[module] : oldest] for name in _blobs(sealed)}
        names |= self._orphans.pop(module, set())
        for name in names - {name for sealed in ledger.versions[oldest:] for name in _blobs(sealed)}:
            self._store.drop(name)
        self._pruned[module] = max(self._pruned[module], oldest)

    def payloads(self, names: Iterable[str], ledgers: Iterable[Ledger]) -> None:
        """Drop these, unless a contribution that is kept has the same: anybody can send another's once more."""
        named = {sealed.document.payload.digest for ledger in ledgers for sealed in ledger.kept.values()}
        for name in names:
            if name not in named:
                self._store.drop(name)


def _blobs(sealed: Sealed[ModuleVersion]) -> list[str]:
    version = sealed.document
    return [ref.digest for ref in (version.snapshot, version.update, version.state) if ref is not None]
