"""The archive of a run: every version, and what it was made of, kept for ever or as the run file says (retention.py).

    documents/contribution-<id>.json     a sealed contribution, also long after it was counted; `open-` before that

`SeedArchive` reads it, for whoever verifies or evaluates a run. `ArchiveChains` fill it: mirrors of all modules that
make every version again before they sign, and drop nothing before that. The coordinator's signature makes a version
final: it signs one version of a number only, and every chain that goes on contains it. Such a version is taken over
ready made where it is missing, after a restore or by a seed node of another host; what it was made of is fetched later.

A **light** archive spares the coordinator's line the contributions. Once a quorum of its owners has made a version
again, among them the mirror that the coordinator chose, the archive checks what the version says of itself and applies
its update, as a trainer does. It asks the leader for the contributions to a share of the versions, `remade`, and makes
these again itself. The archive's own signature over module and number decides which: nobody else can foresee it, and a
version with other contents gets the same lot. It also makes every version again that has no quorum.

An archive may have **parameters where it needs them** alone (`measured` below 1): of every so many versions as the run
file says, of those that text is sharded at, of the last one, and of all while fewer than `DISKS_MIN` volunteers live.
Of the others it keeps the signed documents, and fetches the parameters again if it has to make the next version.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..canonical import canonical_bytes, is_digest
from ..core.model.layout import decode_module
from ..core.outer.outer_step import OuterState
from ..errors import BlobMissing, IntegrityError, Refused, SwarmError
from ..node.ledger import Ledger, RemoteLedger
from ..node.node import Member, fetch_kept
from ..node.reading import holders_of
from ..node.run import Run
from ..node.store import Store
from ..protocol.documents import Contribution, ModuleVersion, Sealed, cosign, unseal
from ..protocol.manifest import WORKERS_MAX
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId, short
from ..protocol.verdicts import read_appraisals
from ..protocol.versions import is_final
from ..topology import ModuleId, PathId
from .chain import Chains, ModuleChain
from .kept_appraisals import read_kept
from .retention import Thinning
from .version import Made, check_told, updated

log = logging.getLogger(__name__)

DISKS_MIN = 3
"""Volunteers whose disks, together, are trusted to have the parameters."""
READ_MAX = 256
"""Contributions that are remembered as they were read."""


class SeedArchive:
    """All chains of a run, as they are on disk; raises IntegrityError when one was damaged."""

    def __init__(self, run: Run, store: Store, *, must_be_whole: bool = True) -> None:
        """Without `must_be_whole` a chain ends where it was damaged."""
        self._run = run
        self._store = store
        self.thinning = Thinning(store, run.config, self._payload)
        """What is dropped here; at first nothing is."""
        self.ledgers = {
            module: Ledger(run, store, module, must_be_whole=must_be_whole, archived_name=_name)
            for module in run.topology.modules()
        }
        self._trainers: dict[PathId, set[PeerId]] = {}
        self._looked: dict[ModuleId, int] = {}

    def trainers(self) -> Mapping[PathId, set[PeerId]]:
        """Whose work of each path a version counts, or has counted; only versions that are new are read."""
        for module, ledger in self.ledgers.items():
            for sealed in ledger.versions[self._looked.get(module, 0) :]:
                for share in sealed.document.shares:
                    self._trainers.setdefault(share.path, set()).add(share.peer)
            self._looked[module] = len(ledger.versions)
        return self._trainers

    def workers(self) -> Counter[PeerId]:
        """Whose work the last versions count, but those who forged some, and how often."""
        found = Counter[PeerId]()
        for ledger in self.ledgers.values():
            found += ledger.workers
        for ledger in self.ledgers.values():
            for forger in ledger.standings.waiting:
                del found[forger]
        return found

    def workers_named(self) -> tuple[PeerId, ...]:
        """Whom of these the next stage's manifest names: those with most works, but nobody whose word on others' work
        does not count now."""
        ledgers, works = self.ledgers.values(), self.workers()
        heard = [peer for peer in works if all(ledger.standings.of(peer).is_heard for ledger in ledgers)]
        most = sorted(heard, key=lambda peer: (-works[peer], peer))[:WORKERS_MAX]
        return tuple(sorted(most))

    def contribution(self, contribution_id: str) -> Sealed[Contribution]:
        """A contribution by id, also long after it was counted; raises IntegrityError if it is not here."""
        found = self.find(contribution_id)
        if found is None:
            raise IntegrityError(f"contribution {contribution_id[:8]} is not in the archive")
        return found

    @property
    def complete_version(self) -> int:
        """The newest version that all modules have reached."""
        return min(ledger.head.version for ledger in self.ledgers.values())

    def blob(self, digest: str) -> bytes:
        """A blob; raises IntegrityError if it is missing or damaged."""
        data = self._store.get(digest)
        if data is None:
            raise IntegrityError(f"blob {digest[:8]} is missing from the archive")
        return data

    def state(self, module: ModuleId, version: int) -> OuterState:
        """Parameters, momentum and residual after a version; raises IntegrityError if they are not here."""
        after = self.ledgers[module].at(version)
        params = decode_module(self.blob(after.digest), self._run.layout(module))
        return OuterState.restored(params, None if after.state is None else self.blob(after.state.digest))

    def keep(self, sealed: Sealed[Contribution]) -> None:
        """From now on it can be found, whoever needs it."""
        self._store.write_document(_name(sealed.id), canonical_bytes(sealed.to_dict()))

    def drop(self, contribution_id: str) -> None:
        """From now on it cannot be found."""
        self._store.drop_document(_name(contribution_id))

    def find(self, contribution_id: str) -> Sealed[Contribution] | None:
        """The same, or None; anybody may ask for anything."""
        data = self.find_stored(contribution_id)
        return None if data is None else _read(data)

    def find_stored(self, contribution_id: str) -> bytes | None:
        """Its canonical bytes, as they lie on disk."""
        if not is_digest(contribution_id):
            return None
        if (data := self._store.read_document(_name(contribution_id))) is not None:
            return data
        for ledger in self.ledgers.values():  # in memory: a file for each module would cost whoever is asked much
            if found := ledger.open.get(contribution_id) or ledger.spent.get(contribution_id):
                return found.to_bytes()
        return None

    def _payload(self, contribution_id: str) -> str | None:
        found = self.find(contribution_id)
        return None if found is None else found.document.payload.digest


class ArchiveChains(Chains):
    """The chains of an archive; whoever listens hears of every version that is kept."""

    def __init__(self, node: Member, archive: SeedArchive, *, is_closed: Callable[[], bool] = lambda: False) -> None:
        """While `is_closed` nothing is signed: what was signed before a backup was restored must be known first. The
        archive's retention says which share of versions is made again here."""
        super().__init__(node)
        self.archive = archive
        self.is_closed = is_closed
        self._listeners: list[Callable[[ModuleVersion], None]] = []

    def find_stored(self, contribution: str) -> bytes | None:
        return self.archive.find_stored(contribution)

    def __getitem__(self, module: ModuleId) -> ArchiveChain:
        if module not in self._chains:
            self._chains[module] = ArchiveChain(self, module)
        chain = self._chains[module]
        assert isinstance(chain, ArchiveChain)
        return chain

    def listen(self, listener: Callable[[ModuleVersion], None]) -> None:
        """Hear of every version that is kept."""
        self._listeners.append(listener)

    def doubt(self, module: ModuleId) -> None:
        """Another mirror was chosen on a leader's word, and may be its friend: also after a restart, whoever leads."""
        self.node.store.write_document(_doubt(module), canonical_bytes({}))

    def trust(self, module: ModuleId) -> None:
        """The mirror is the one that we would choose without anybody's word."""
        self.node.store.drop_document(_doubt(module))

    def draws(self, version: ModuleVersion) -> bool:
        """Whether this version is one of those that are made again here, whoever has made it again before; all of a
        doubted module are."""
        if self.node.store.read_document(_doubt(version.module)) is not None:
            return True
        lot = self.node.swarm.signer.lot("remake", f"{version.run}|{version.module}|{version.version}".encode())
        return lot < self.archive.thinning.retention.remade

    def tell(self, version: ModuleVersion) -> None:
        for listener in self._listeners:
            listener(version)


class ArchiveChain(ModuleChain):
    """A chain that is kept for ever, or as long as the archive's retention says."""

    keeps_everything = True

    def __init__(self, chains: ArchiveChains, module: ModuleId) -> None:
        super().__init__(chains, module, chains.archive.ledgers[module])
        self._archive_chains = chains
        self._dropped: list[tuple[int, list[str]]] = []
        """Payloads that retention has no need of, with the last final version when it said so."""
        self._head = 0
        """The newest version that a leader has told of."""

    def add(self, sealed: Sealed[Contribution]) -> None:
        super().add(sealed)
        if sealed.id not in self.ledger.kept:  # a final version counts it
            self._archive_chains.archive.keep(sealed)

    def append(self, sealed: Sealed[ModuleVersion], made: Made) -> None:
        """Signed at once: who has the next signature takes it for granted that we gave this one, and never asks."""
        signer = self.node.swarm.signer
        if sealed.document.author != signer.peer:
            sealed = sealed.cosigned({signer.peer: cosign(signer, sealed)})
        super().append(sealed, made)
        self._tell_withdrawn(sealed)
        self._archive_chains.tell(sealed.document)

    def append_vouched(self, sealed: Sealed[ModuleVersion]) -> None:
        super().append_vouched(sealed)
        self._tell_withdrawn(sealed)
        self._archive_chains.tell(sealed.document)

    async def _take(self, sealed: Sealed[ModuleVersion], *, source: PeerId) -> None:
        """Make the version again, or take it on the word of a quorum."""
        version, chains = sealed.document, self._archive_chains
        if not chains.archive.thinning.retention.is_light or version.rollback is not None:
            return await super()._take(sealed, source=source)
        led_by = self.node.mandates.leader(self.module)
        self.ledger.check(sealed)
        # Nothing that is answered may tell what the lot drew: who hears it could lie where it is safe.
        if self.node.mandates.has_quorum(sealed) and not version.is_fresh:
            await self._check_told(version, source=source)
            self._require_led_by(led_by)
            is_first = self._note_settled(sealed)
            is_late = await self._is_late(version.version, source)
            self._require_led_by(led_by)
            has_quorum = self.node.mandates.has_quorum(sealed)  # still: bans may come
            if is_first and has_quorum and not is_late and not chains.draws(version):
                with contextlib.suppress(BlobMissing):
                    return await self._take_settled(sealed, source=source)
                self._require_led_by(led_by)
        await self._fetch_base(source)
        self._require_led_by(led_by)
        await super()._take(sealed, source=source)

    async def _check_told(self, version: ModuleVersion, *, source: PeerId) -> None:
        run, standings = self.node.run, self.ledger.standings
        said = read_appraisals(await read_kept(self.node, version, holders=[source]))
        verdicts = run.verdicts(said, standings)
        check_told(run, version, norms=self.ledger.norms, standings=standings, verdicts=verdicts)
        self._claim(version)

    def _claim(self, version: ModuleVersion) -> None:
        """Somebody may have sent these blobs before, and would have them dropped with its other uploads."""
        for ref in filter(None, (version.snapshot, version.update, version.state, version.appraisals)):
            self.node.uploads.claim(ref.digest)

    async def _take_settled(self, sealed: Sealed[ModuleVersion], *, source: PeerId) -> None:
        """What its quorum has settled: all is checked but what its contributions give."""
        node, version, led_by = self.node, sealed.document, self.node.mandates.leader(self.module)
        if self._needs_params(version.version):
            await self._follow_params(version, holders=[*sorted(sealed.cosignatures), source])
            self._require_led_by(led_by)
        self._claim(version)
        self.append_vouched(sealed.cosigned({node.swarm.signer.peer: cosign(node.swarm.signer, sealed)}))

    async def _is_late(self, number: int, source: PeerId) -> bool:
        """Whether we were away when this version was made. Its owners have dropped its update by now, and its outer
        state is nowhere, without which no later version can be made again: so all of these are. Who has no parameters
        must know; others find out by the update."""
        newest, told = number + self.node.run.config.rounds.staleness, self.node.watch.heads[self.module].get(source)
        self._head = max(self._head, told.version if told is not None else 0)
        if self._head <= newest and not self._archive_chains.archive.thinning.retention.has_all_params:
            self._head = (await RemoteLedger(self.node, source, self.module).branch()).version
        return self._head > newest

    def _needs_params(self, number: int) -> bool:
        is_wanted = self._archive_chains.archive.thinning.wants(number, self.node.run)
        return is_wanted or len(self.node.watch.volunteers()) < DISKS_MIN

    async def _follow_params(self, version: ModuleVersion, *, holders: Sequence[PeerId]) -> None:
        """Apply the update, which is a fraction of the parameters' size. The outer state is fetched only for a stage's
        last version: a grid that grows goes on from it. Raises BlobMissing."""
        node, parent = self.node, self.ledger.head
        if version.update is None or node.store.size(parent.digest) is None:
            await fetch_kept(
                node, version.snapshot, holders=[*holders, *holders_of(node, self.module, version.version)]
            )
        else:
            blob = await fetch_kept(node, version.update, holders=holders)
            async with node.averaging:
                await asyncio.to_thread(self._apply, parent, blob, version)
        if version.version == node.run.rounds and version.state is not None:
            await fetch_kept(node, version.state, holders=holders)

    def _apply(self, parent: ModuleVersion, blob: bytes, version: ModuleVersion) -> None:
        store, run = self.node.store, self.node.run
        params = decode_module(store.get(parent.digest) or b"", run.layout(self.module))
        store.keep(version.snapshot, *updated(run, params, blob, version)[1])

    async def _fetch_base(self, source: PeerId) -> None:
        """Have what the next version is made from, if anybody has it: also so that nobody can say that the outer state
        is lost when it is not."""
        head = self.ledger.head
        alive = sorted(self.node.watch.heartbeats.keys() - {self.node.peer, source})
        owners = [peer for peer in alive if peer in self.node.mandates.peers(self.module)]
        for ref in (head.snapshot, head.state):
            if ref is not None and self.node.store.size(ref.digest) is None:
                with contextlib.suppress(SwarmError):
                    await fetch_kept(self.node, ref, holders=[source, *owners])

    def _note_settled(self, sealed: Sealed[ModuleVersion]) -> bool:
        """A quorum has settled this version; whether it is the first that we hear of with its number. Any other one is
        made again: whoever has two to offer would bring the false one after it had learnt that no lot was drawn."""
        name = self._settled_name(sealed.document.version)
        if (data := self.node.store.read_document(name)) is not None:
            return bool(json.loads(data)["id"] == sealed.id)
        by = {sealed.document.author, *sealed.cosignatures} & self.node.mandates.peers(self.module)
        self.node.store.write_document(name, canonical_bytes({"by": sorted(by), "id": sealed.id}))
        return True

    def _tell_withdrawn(self, sealed: Sealed[ModuleVersion]) -> None:
        """Note who settled a version and had another one of its number signed: these peers have lied, or have lost a
        contribution on all their disks, or their leader is gone."""
        name, number = self._settled_name(sealed.document.version), sealed.document.version
        if (data := self.node.store.read_document(name)) is None:
            return
        first = json.loads(data)
        self.node.store.drop_document(name)
        if first["id"] != sealed.id:
            self.node.history.add("withdrawn", module=str(self.module), version=number, by=first["by"])
            names = ", ".join(f"...{short(peer)}" for peer in first["by"])
            log.warning("%s: %s settled another version %d than the one that was signed", self.module, names, number)

    def _settled_name(self, version: int) -> str:
        return f"settled-{self.module}-{version:08d}"

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
        """What the archive's own retention says; a light one keeps the payloads a while, as every owner does."""
        ledger, thinning = self.ledger, self._archive_chains.archive.thinning
        if names := thinning.thin(ledger):
            self._dropped.append((ledger.final, names))
        until = self.handover.until(ledger) if thinning.retention.is_light else ledger.final
        while self._dropped and self._dropped[0][0] <= until:
            self.chains.drop_payloads(thinning.free(self._dropped.pop(0)[1]))


@functools.lru_cache(maxsize=READ_MAX)
def _read(data: bytes) -> Sealed[Contribution]:
    """What is put away is looked for a few times at once, and each time its signature would be checked."""
    return unseal(Contribution, json.loads(data))


def _name(contribution_id: str) -> str:
    return f"contribution-{contribution_id}"


def _doubt(module: ModuleId) -> str:
    return f"doubted-{module}"
