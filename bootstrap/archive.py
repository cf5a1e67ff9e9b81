"""The archive of a run, on the coordinator's disk: every version, and what it was made of.

    documents/contribution-<id>.json     a sealed contribution, also long after it was counted

`SeedArchive` reads it, for whoever verifies or evaluates a run. `ArchiveMirror` fills it: a mirror of all modules that
makes every version again before it signs, and drops nothing. The coordinator's signature makes a version final: it
signs one version of a number only, and every chain that goes on contains it. Such a version is taken over ready made
where it is missing, after a restore or by a seed node of another host, and `recovery/filling.py` fetches what it was
made of.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from dipaco_p2p.canonical import canonical_bytes, is_digest
from dipaco_p2p.errors import IntegrityError, Refused
from dipaco_p2p.protocol.documents import Contribution, ModuleVersion, Sealed, cosign, unseal
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.runtime.ledger import Ledger
from dipaco_p2p.runtime.mirror import Mirror
from dipaco_p2p.runtime.node import Node
from dipaco_p2p.runtime.recompute import Made
from dipaco_p2p.runtime.remote import RemoteLedger
from dipaco_p2p.runtime.run import Run
from dipaco_p2p.runtime.store import Store
from dipaco_p2p.topology import ModuleId


class SeedArchive:
    """All chains of a run, as they are on disk; raises IntegrityError when one was damaged."""

    def __init__(self, run: Run, store: Store) -> None:
        self._store = store
        self.ledgers = {module: Ledger(run, store, module, must_be_whole=True) for module in run.topology.modules()}

    def contribution(self, contribution_id: str) -> Sealed[Contribution]:
        """A contribution by id, also long after it was counted; raises IntegrityError if it is not here."""
        found = self.find(contribution_id)
        if found is None:
            raise IntegrityError(f"contribution {contribution_id[:8]} is not in the archive")
        return found

    def keep(self, sealed: Sealed[Contribution]) -> None:
        """From now on it can be found."""
        self._store.write_document(_name(sealed.id), canonical_bytes(sealed.to_dict()))

    def find(self, contribution_id: str) -> Sealed[Contribution] | None:
        """The same, or None; anybody may ask for anything."""
        data = self._store.read_document(_name(contribution_id)) if is_digest(contribution_id) else None
        return unseal(Contribution, json.loads(data)) if data is not None else None


class ArchiveMirror(Mirror):
    """The keeper of an archive: what it takes it keeps for ever, and tells whoever listens."""

    keeps_everything = True

    def __init__(self, node: Node, archive: SeedArchive) -> None:
        super().__init__(node)
        self._archive = archive
        self.is_closed: Callable[[], bool] = lambda: False
        """Whether nothing is signed yet: what was signed before a backup was restored must be known first."""
        self._listeners: list[Callable[[ModuleVersion], None]] = []

    def listen(self, listener: Callable[[ModuleVersion], None]) -> None:
        """Hear of every version that is kept."""
        self._listeners.append(listener)

    def ledger(self, module: ModuleId) -> Ledger:
        return self._archive.ledgers[module]

    def add(self, sealed: Sealed[Contribution]) -> None:
        self._archive.keep(sealed)
        super().add(sealed)

    async def catch_up(self, peer: PeerId, module: ModuleId, *, until: int) -> None:
        """Take over the versions of `peer` up to `until`, if it has them as the coordinator signed them; nothing is
        signed here. Raises DipacoError."""
        remote = RemoteLedger(self._node, peer, module)
        async with self._locks[module]:
            ledger = self.ledger(module)
            if ledger.final < min(until, ledger.head.version):  # made again here, and signed by the coordinator since
                await self._adopt_final(ledger, remote)
            if until > ledger.head.version:
                await self._follow(remote, until=until)

    def append(self, sealed: Sealed[ModuleVersion], made: Made) -> None:
        """Signed at once: who has the next signature takes it for granted that we gave this one, and never asks."""
        signer = self._node.swarm.signer
        if sealed.document.author != signer.peer:
            sealed = sealed.cosigned({signer.peer: cosign(signer, sealed)})
        super().append(sealed, made)
        self._tell(sealed)

    def append_vouched(self, ledger: Ledger, sealed: Sealed[ModuleVersion]) -> None:
        super().append_vouched(ledger, sealed)
        self._tell(sealed)

    async def keep_version(self, sender: PeerId, sealed: Sealed[ModuleVersion]) -> str:
        if self.is_closed():
            raise Refused("this archive came out of a backup, and catches up first", reason="busy")
        return await super().keep_version(sender, sealed)

    def _tell(self, sealed: Sealed[ModuleVersion]) -> None:
        for listener in self._listeners:
            listener(sealed.document)


def _name(contribution_id: str) -> str:
    return f"contribution-{contribution_id}"
