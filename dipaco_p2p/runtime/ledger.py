"""One module's chain of versions and its open contributions, on this peer's disk.

The leader and the archive keep the same files, so that either can go on where the other stopped:

    documents/version-L1.M0-00000003.json     a sealed version
    documents/open-L1.M0-<id>.json            a sealed contribution that is still needed here

A contribution is here before its receipt is signed. It leaves when a version that counts it is on disk *and* settled:
safe in the archive, which needs the contribution itself to show how the version was made.
"""

from __future__ import annotations

import json
from typing import TypeVar

from ..canonical import canonical_bytes
from ..errors import IntegrityError
from ..protocol.documents import Contribution, ModuleVersion, Sealed, unseal
from ..protocol.versions import Tally, check_chain, check_successor, genesis_version
from ..topology import ModuleId
from .run import Run
from .store import Store

DAMAGED_HINT = "remove this peer's folder of the run, or bring back a copy of it"

D = TypeVar("D", Contribution, ModuleVersion)


class Ledger:
    """The chain from version 1 on, and what the next version will be made of."""

    def __init__(self, run: Run, store: Store, module: ModuleId) -> None:
        self._run = run
        self._store = store
        self.module = module
        self.versions: list[Sealed[ModuleVersion]] = []
        self.open: dict[str, Sealed[Contribution]] = {}
        """What no version counts yet."""
        self.spent: dict[str, Sealed[Contribution]] = {}
        """What a version counts that is not settled yet."""
        self._tally = Tally()
        self._load()

    @property
    def head(self) -> ModuleVersion:
        return self.versions[-1].document if self.versions else genesis_version(self._run.manifest, self.module)

    @property
    def counted(self) -> dict[str, int]:
        """Contribution id to the version that counts it."""
        return self._tally.counted

    @property
    def is_complete(self) -> bool:
        return self.head.version >= self._run.config.rounds.rounds

    def after(self, version: int, *, limit: int) -> list[Sealed[ModuleVersion]]:
        """The next `limit` versions that follow `version`."""
        return self.versions[version : version + limit]

    def append(self, sealed: Sealed[ModuleVersion]) -> None:
        """The next version; raises IntegrityError if it does not follow or counts something twice."""
        version = sealed.document
        check_successor(self.head, version, self._run.manifest)
        self._tally.check(version)
        self._store.write_document(self._version_name(version.version), canonical_bytes(sealed.to_dict()))
        self._count(sealed)
        for share in version.shares:
            if share.contribution in self.open:
                self.spent[share.contribution] = self.open.pop(share.contribution)

    def settle(self, version: int) -> None:
        """All versions up to `version` are in the archive: what they count is not needed here any more."""
        for contribution in [id_ for id_ in self.spent if self.counted[id_] <= version]:
            del self.spent[contribution]
            self._store.drop_document(self._open_name(contribution))

    def truncate(self, version: int) -> None:
        """Forget the versions after `version`, which the archive never got; what they counted is open again."""
        for sealed in reversed(self.versions[version:]):  # from the last, so that a crash leaves a chain
            self._store.drop_document(self._version_name(sealed.document.version))
        del self.versions[version:]
        self._tally.drop_after(version)
        for contribution in [id_ for id_ in self.spent if id_ not in self.counted]:
            self.open[contribution] = self.spent.pop(contribution)

    def add(self, sealed: Sealed[Contribution]) -> None:
        """An admitted contribution, kept until a version counts it; adding it twice changes nothing."""
        if sealed.id not in self.open and sealed.id not in self.counted:
            self._store.write_document(self._open_name(sealed.id), canonical_bytes(sealed.to_dict()))
            self.open[sealed.id] = sealed

    def _count(self, sealed: Sealed[ModuleVersion]) -> None:
        self.versions.append(sealed)
        self._tally.add(sealed.document)

    def _load(self) -> None:
        versions = [self._read(name, ModuleVersion) for name in self._store.documents(f"version-{self.module}-")]
        check_chain(versions, self._run.manifest, self.module)
        for version in versions:
            self._count(version)
        for name in self._store.documents(f"open-{self.module}-"):
            contribution = self._read(name, Contribution)
            (self.spent if contribution.id in self.counted else self.open)[contribution.id] = contribution

    def _read(self, name: str, kind: type[D]) -> Sealed[D]:
        data = self._store.read_document(name)
        assert data is not None
        try:
            return unseal(kind, json.loads(data))
        except (ValueError, IntegrityError) as error:
            raise IntegrityError(f"{name}.json was damaged on disk: {error}", hint=DAMAGED_HINT) from None

    def _version_name(self, version: int) -> str:
        return f"version-{self.module}-{version:08d}"

    def _open_name(self, contribution: str) -> str:
        return f"open-{self.module}-{contribution}"
