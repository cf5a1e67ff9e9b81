"""The archive of a run: every version, and what it was made of, kept for ever or as the run file says (retention.py).

    documents/contribution-<id>.json     a sealed contribution, also long after it was counted

`SeedArchive` reads it, for whoever verifies or evaluates a run. `ArchiveChains` fill it: mirrors of all modules that
make every version again before they sign, and drop nothing before that. The coordinator's signature makes a version
final: it signs one version of a number only, and every chain that goes on contains it. Such a version is taken over
ready made where it is missing, after a restore or by a seed node of another host; what it was made of is fetched later.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable

from ..canonical import canonical_bytes, is_digest
from ..errors import IntegrityError, Refused
from ..node.ledger import Ledger, RemoteLedger
from ..node.node import Member
from ..node.run import Run
from ..node.store import Store
from ..protocol.documents import Contribution, ModuleVersion, Sealed, cosign, unseal
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId
from ..protocol.versions import is_final
from ..topology import ModuleId
from .chain import Chains, ModuleChain
from .retention import Thinning
from .version import Made


class SeedArchive:
    """All chains of a run, as they are on disk; raises IntegrityError when one was damaged."""

    def __init__(self, run: Run, store: Store, *, must_be_whole: bool = True) -> None:
        """Without `must_be_whole` a chain ends where it was damaged."""
        self._store = store
        self.thinning = Thinning(store, run.config, self._payload)
        """What is dropped here; at first nothing is."""
        self.ledgers = {
            module: Ledger(run, store, module, must_be_whole=must_be_whole) for module in run.topology.modules()
        }

    def contribution(self, contribution_id: str) -> Sealed[Contribution]:
        """A contribution by id, also long after it was counted; raises IntegrityError if it is not here."""
        found = self.find(contribution_id)
        if found is None:
            raise IntegrityError(f"contribution {contribution_id[:8]} is not in the archive")
        return found

    def blob(self, digest: str) -> bytes:
        """A blob; raises IntegrityError if it is missing or damaged."""
        data = self._store.get(digest)
        if data is None:
            raise IntegrityError(f"blob {digest[:8]} is missing from the archive")
        return data

    def keep(self, sealed: Sealed[Contribution]) -> None:
        """From now on it can be found."""
        self._store.write_document(_name(sealed.id), canonical_bytes(sealed.to_dict()))

    def drop(self, contribution_id: str) -> None:
        """From now on it cannot be found."""
        self._store.drop_document(_name(contribution_id))

    def find(self, contribution_id: str) -> Sealed[Contribution] | None:
        """The same, or None; anybody may ask for anything."""
        data = self._store.read_document(_name(contribution_id)) if is_digest(contribution_id) else None
        return unseal(Contribution, json.loads(data)) if data is not None else None

    def _payload(self, contribution_id: str) -> str | None:
        found = self.find(contribution_id)
        return None if found is None else found.document.payload.digest


class ArchiveChains(Chains):
    """The chains of an archive; whoever listens hears of every version that is kept."""

    def __init__(self, node: Member, archive: SeedArchive, *, is_closed: Callable[[], bool] = lambda: False) -> None:
        """While `is_closed` nothing is signed: what was signed before a backup was restored must be known first."""
        super().__init__(node)
        self.archive = archive
        self.is_closed = is_closed
        self._listeners: list[Callable[[ModuleVersion], None]] = []

    def __getitem__(self, module: ModuleId) -> ArchiveChain:
        if module not in self._chains:
            self._chains[module] = ArchiveChain(self, module)
        chain = self._chains[module]
        assert isinstance(chain, ArchiveChain)
        return chain

    def listen(self, listener: Callable[[ModuleVersion], None]) -> None:
        """Hear of every version that is kept."""
        self._listeners.append(listener)

    def tell(self, version: ModuleVersion) -> None:
        for listener in self._listeners:
            listener(version)


class ArchiveChain(ModuleChain):
    """A chain that is kept for ever, or as long as the archive's retention says."""

    keeps_everything = True

    def __init__(self, chains: ArchiveChains, module: ModuleId) -> None:
        super().__init__(chains, module, chains.archive.ledgers[module])
        self._archive_chains = chains

    def add(self, sealed: Sealed[Contribution]) -> None:
        self._archive_chains.archive.keep(sealed)
        super().add(sealed)

    def append(self, sealed: Sealed[ModuleVersion], made: Made) -> None:
        """Signed at once: who has the next signature takes it for granted that we gave this one, and never asks."""
        signer = self.node.swarm.signer
        if sealed.document.author != signer.peer:
            sealed = sealed.cosigned({signer.peer: cosign(signer, sealed)})
        super().append(sealed, made)
        self._archive_chains.tell(sealed.document)

    def append_vouched(self, sealed: Sealed[ModuleVersion]) -> None:
        super().append_vouched(sealed)
        self._archive_chains.tell(sealed.document)

    @property
    def is_owner(self) -> bool:
        return True

    async def keep_version(self, sender: PeerId, sealed: Sealed[ModuleVersion]) -> str:
        if self._archive_chains.is_closed():
            raise Refused("this archive came out of a backup, and catches up first", reason=Reason.BUSY)
        return await super().keep_version(sender, sealed)

    async def catch_up(self, peer: PeerId, *, until: int) -> None:
        """Take over the versions of `peer` up to `until`, if it has them as the coordinator signed them; nothing is
        signed here. Raises DipacoError."""
        remote = RemoteLedger(self.node, peer, self.module)
        async with self._lock:
            if self.ledger.final < min(until, self.ledger.head.version):  # made again here, and signed since
                await self._adopt_final(remote)
            if until > self.ledger.head.version:
                await self._follow(remote, until=until)

    async def _make_sure(self, sealed: Sealed[ModuleVersion], *, source: PeerId) -> None:
        """Everything that is here was made here, or is final."""

    def _vouched(self, versions: list[Sealed[ModuleVersion]]) -> list[Sealed[ModuleVersion]]:
        """What the coordinator had made again before: its disk was lost, or this archive is a later one."""
        coordinator = self.node.run.manifest.author
        return list(itertools.takewhile(lambda sealed: is_final(sealed, coordinator=coordinator), versions))

    def _leave(self, version: int) -> None:
        """Another seed node's archive leaves what is not final; the coordinator's leaves nothing: it has the last
        word."""
        is_last_word = self.node.peer == self.node.run.manifest.author
        super()._leave(-1 if is_last_word else version)

    def forget(self, sealed: Sealed[Contribution]) -> None:
        super().forget(sealed)
        if sealed.id not in self.ledger.counted:
            self._prune(keep=0)  # first: the newest version may name the same payload
            self.chains.drop_payloads(self._archive_chains.archive.thinning.free([sealed.document.payload.digest]))

    def _drop_payloads(self, names: Iterable[str]) -> None:
        """None of them: retention decides."""

    def _prune(self, *, keep: int) -> None:
        """What the archive's own retention says."""
        self.chains.drop_payloads(self._archive_chains.archive.thinning.thin(self.ledger))


def _name(contribution_id: str) -> str:
    return f"contribution-{contribution_id}"
