"""One module's chain of versions and the contributions that it may still need, on this peer's disk.

Owners, the archive and trainers keep the same files, so that any of them can go on where another stopped:

    documents/version-L1.M0-00000003.json     a sealed version, with the cosignatures that came in
    documents/open-L1.M0-<id>.json            a sealed contribution that is still needed here

A contribution is here before its receipt is signed. It leaves when a version that counts it is *final*: signed by the
coordinator, whose archive then has it, or a little later (owner/chain.py). Until then another branch may win, and then
it has to be submitted again.

`RemoteLedger` is the ledger of another peer, asked over the swarm: any owner, the seed's archive, or a trainer that
follows. A leader shows its grant with every call: a peer that follows an older one learns of it before it answers.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TypeVar

from ..canonical import canonical_bytes
from ..errors import IntegrityError, Refused, SwarmError
from ..protocol.decrees import Decree
from ..protocol.documents import Contribution, Custody, ModuleVersion, Sealed, unseal
from ..protocol.gate import Appraisal
from ..protocol.grants import Mandate
from ..protocol.liveness import Head
from ..protocol.norms import NORM_VERSIONS, Norms
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId, short
from ..protocol.standing import Standings
from ..protocol.versions import Branch, Known, Tally, check_chain, check_successor, genesis_version, is_final
from ..topology import ModuleId, PathId
from .authority import Decrees
from .calls import (
    APPRAISALS_MAX,
    ChainRequest,
    Follow,
    Forward,
    GetBranch,
    GetChain,
    GetEvidence,
    GetOpen,
    KeepContribution,
    KeepEvidence,
    KeepVersion,
    TellFinal,
)
from .items import read_items
from .node import CALL_TIMEOUT_S, CONTROL_TIMEOUT_S, WAIT_S, Member, ask, send
from .run import Run
from .store import Store

log = logging.getLogger(__name__)

DAMAGED_HINT = "remove this peer's folder of the run, or bring back a copy of it"
AGAIN_S, AUTHOR_BYTES_S = 0.2, 250_000
"""How soon a mirror that waits for a payload is asked again, and how fast that must come from its author."""
WORK_VERSIONS = 8
"""For how many versions work makes its author one who may lead before strangers."""
KEPT_MAX = 16_384
"""Contributions to one module that may be open or not final at one peer; with about 1 KB each, a bound on memory."""

D = TypeVar("D", Contribution, ModuleVersion)
R = TypeVar("R")


class _Gone(IntegrityError):
    """A document that was listed, or must be there, is not."""


class Ledger:
    """The chain from version 1 on, and what the next version will be made of."""

    def __init__(
        self,
        run: Run,
        store: Store,
        module: ModuleId,
        *,
        must_be_whole: bool = False,
        archived_name: Callable[[str], str] | None = None,
    ) -> None:
        """What was damaged on disk is left out, since others have it; `must_be_whole` raises IntegrityError instead. An
        archive gives the name under which a contribution stays that no later version needs."""
        self._run = run
        self._store = store
        self._must_be_whole = must_be_whole
        self._archived_name = archived_name
        self.module = module
        self.versions: list[Sealed[ModuleVersion]] = []
        self.open: dict[str, Sealed[Contribution]] = {}
        """What no version counts yet."""
        self.spent: dict[str, Sealed[Contribution]] = {}
        """What a version counts that is not final yet, or only just."""
        self.final = 0
        """The newest version that the coordinator has signed."""
        self._tally = Tally()
        self._load()

    @property
    def head(self) -> ModuleVersion:
        return self.versions[-1].document if self.versions else self.genesis

    @cached_property
    def genesis(self) -> ModuleVersion:
        return genesis_version(self._run.manifest, self.module)

    @property
    def branch(self) -> Branch:
        """How good this chain is among others of its module."""
        return Branch(final=self.final, version=self.head.version, weight=self.head.weight, digest=self.head.digest)

    @property
    def counted(self) -> dict[str, int]:
        """Contribution id to the version that counts it."""
        return self._tally.counted

    @property
    def base_min(self) -> int:
        """The newest rollback: nothing counts that began before it."""
        return self._tally.base_min

    def due(self, decrees: Decrees) -> Sealed[Decree] | None:
        """The newest rollback that is decreed of the module, if it is not carried out here."""
        sealed = decrees.rollback(self._run.id, self.module)
        return sealed if sealed is not None and sealed.document.number > self._tally.rolled_back_by else None

    @property
    def undone(self) -> list[Sealed[Contribution]]:
        """What is open, and cannot count since a rollback."""
        return [sealed for sealed in self.open.values() if sealed.document.base_version < self.base_min]

    @property
    def workers(self) -> Counter[PeerId]:
        """Whose work the last versions count, and how often; before the first, whose work the stage before counts."""
        shares = (share for sealed in self.versions[-WORK_VERSIONS:] for share in sealed.document.shares)
        return Counter((share.peer for share in shares) if self.versions else self._run.manifest.workers)

    @property
    def standings(self) -> Standings:
        """Of those whose work the versions count; changes with them."""
        return self._tally.standings

    def workers_on(self, path: PathId) -> frozenset[PeerId]:
        """Whose work on `path` the last versions count."""
        shares = (share for sealed in self.versions[-WORK_VERSIONS:] for share in sealed.document.shares)
        return frozenset(share.peer for share in shares if share.path == path)

    @property
    def norms(self) -> Norms:
        """What the next version's outer gradients are measured by."""
        return self._run.norms(self.module, [sealed.document for sealed in self.versions[-NORM_VERSIONS:]])

    def at(self, version: int) -> ModuleVersion:
        """A version that is on the chain, 0 too."""
        return self.versions[version - 1].document if version else self.genesis

    @property
    def kept(self) -> dict[str, Sealed[Contribution]]:
        """All contributions that are here."""
        return self.spent | self.open

    @property
    def is_complete(self) -> bool:
        return self.head.version >= self._run.rounds

    def require(self, known: Known) -> None:
        """Raise Refused unless this chain has the version that somebody knows."""
        if known.version > self.head.version:
            raise Refused(f"the head of {self.module} is {self.head.version}", reason=Reason.UNKNOWN_BASE)
        if known.version and not known.is_of(self.versions[known.version - 1].document):
            raise Refused(f"version {known.version} of {self.module} is another one here", reason=Reason.UNKNOWN_BASE)

    def check(self, sealed: Sealed[ModuleVersion]) -> None:
        """Raise IntegrityError unless this version may be the next."""
        if sealed.document.version > self._run.rounds:
            raise IntegrityError(f"version {sealed.document.version}, but {self.module} ends with {self._run.rounds}")
        check_successor(self.head, sealed.document, self._run.manifest)
        self._run.check_sizes(sealed.document)
        self._tally.check(sealed.document)

    def append(self, sealed: Sealed[ModuleVersion]) -> None:
        """The next version; raises IntegrityError if it does not follow or counts something twice."""
        self.check(sealed)
        self._write(sealed)
        self._count(sealed)
        for share in sealed.document.shares:
            if share.contribution in self.open:
                self.spent[share.contribution] = self.open.pop(share.contribution)

    def cosign(self, version: int, cosignatures: Mapping[PeerId, str]) -> None:
        """Further cosignatures of a version that is here, checked already. The coordinator's gives way to no other."""
        known = self.versions[version - 1]
        if not cosignatures.items() <= known.cosignatures.items():
            self.versions[version - 1] = known.cosigned(cosignatures, above_all=self._run.manifest.author)
            self._write(self.versions[version - 1])
            self._note_final(self.versions[version - 1])

    def adopt(self, sealed: Sealed[ModuleVersion]) -> bool:
        """What the archive has of a number: its signatures under the version that is here, or the same parameters as
        another leader has signed them. False if it is another version, or one that is not here."""
        place = sealed.document.version - 1
        ours = self.versions[place] if place < len(self.versions) else None
        if ours is None or ours.document.digest != sealed.document.digest:
            return False
        if ours.document == sealed.document:
            self.cosign(place + 1, sealed.cosignatures)
            return True
        chain = [*self.versions[:place], sealed, *self.versions[place + 1 :]]
        try:
            check_chain(chain, self._run.manifest, self.module)
        except IntegrityError:  # the same step, of contributions that count again later here
            return False
        self._write(sealed)
        self.versions, self._tally = [], Tally()
        for version in chain:
            self._count(version)
        self._sort()  # the archive's document may count others
        return True

    def settle(self, until: int) -> list[str]:
        """Forget what versions up to `until` count, which are final; the digests of the payloads."""
        settled = [self.spent[id_] for id_ in list(self.spent) if self.counted[id_] <= until]
        for sealed in settled:
            self.drop(sealed.id)
        return [sealed.document.payload.digest for sealed in settled]

    def truncate(self, version: int) -> list[str]:
        """Forget the versions after `version`; ids of the contributions that are here and open again."""
        assert version >= self.final, "what the coordinator signed is on every chain that goes on"
        for sealed in reversed(self.versions[version:]):  # from the last, so that a crash leaves a chain
            self._store.drop_document(self._version_name(sealed.document.version))
        del self.versions[version:]
        self._tally.drop_after(version)
        return self._sort()

    def add(self, sealed: Sealed[Contribution]) -> None:
        """A contribution that may be needed, kept until a final version counts it; adding it twice changes nothing."""
        place = self.spent if sealed.id in self.counted else self.open
        if sealed.id not in place and self.counted.get(sealed.id, self.final + 1) > self.final:
            self._store.write_document(self.open_name(sealed.id), canonical_bytes(sealed.to_dict()))
            place[sealed.id] = sealed

    def drop(self, contribution: str) -> None:
        """Nobody needs this contribution from here any more."""
        self.open.pop(contribution, None)
        self.spent.pop(contribution, None)
        if self._archived_name is None:
            self._store.drop_document(self.open_name(contribution))
        else:
            self._store.rename_document(self.open_name(contribution), self._archived_name(contribution))

    def _sort(self) -> list[str]:
        """Have each contribution where the versions now say that it is; ids of those that are open again."""
        reopened = [id_ for id_ in self.spent if id_ not in self.counted]
        counted = [id_ for id_ in self.open if id_ in self.counted]
        self.open.update((id_, self.spent.pop(id_)) for id_ in reopened)
        self.spent.update((id_, self.open.pop(id_)) for id_ in counted)
        return reopened

    def _count(self, sealed: Sealed[ModuleVersion]) -> None:
        self.versions.append(sealed)
        self._tally.add(sealed.document)
        self._note_final(sealed)

    def _note_final(self, sealed: Sealed[ModuleVersion]) -> None:
        if is_final(sealed, coordinator=self._run.manifest.author):
            self.final = max(self.final, sealed.document.version)

    def _write(self, sealed: Sealed[ModuleVersion]) -> None:
        self._store.write_document(self._version_name(sealed.document.version), canonical_bytes(sealed.to_dict()))

    def _load(self) -> None:
        names = self._store.documents(f"version-{self.module}-")
        # One that came while the folder was listed can be among the names without the one before it, which is there.
        last = min(int(names[-1].rpartition("-")[2]) if names else 0, self._run.rounds)
        for name in map(self._version_name, range(1, last + 1)):
            try:
                version = self._read(name, ModuleVersion)
                self.check(version)
                self._count(version)
            except IntegrityError as error:
                self._tell(error)
                for lost in reversed([each for each in names if each >= name]):
                    self._store.drop_document(lost)
                break
        for name in self._store.documents(f"open-{self.module}-"):
            try:
                self._place(self._read(name, Contribution))
            except _Gone:  # whoever works beside this reader has settled it meanwhile
                continue
            except IntegrityError as error:
                self._tell(error)
                self._store.drop_document(name)

    def _place(self, sealed: Sealed[Contribution]) -> None:
        """One that a final version counts, since a crash came before it was put away, waits for `settle`: whoever reads
        a chain changes nothing."""
        (self.spent if sealed.id in self.counted else self.open)[sealed.id] = sealed

    def _tell(self, error: IntegrityError) -> None:
        if self._must_be_whole:
            raise error
        log.warning("%s goes on with version %d: %s", self.module, self.head.version, error)

    def _read(self, name: str, kind: type[D]) -> Sealed[D]:
        data = self._store.read_document(name)
        if data is None:
            raise _Gone(f"{name}.json is missing", hint=DAMAGED_HINT)
        try:
            return unseal(kind, json.loads(data))
        except (ValueError, IntegrityError) as error:
            raise IntegrityError(f"{name}.json was damaged on disk: {error}", hint=DAMAGED_HINT) from None

    def _version_name(self, version: int) -> str:
        return f"version-{self.module}-{version:08d}"

    def open_name(self, contribution: str) -> str:
        """The document of a contribution that may be needed."""
        return f"open-{self.module}-{contribution}"


def head_record(ledger: Ledger, mandate: Mandate) -> Head:
    """What the leader of a module says in the DHT; `mandates.grant_of` is the inverse, of the grant in it."""
    grant, head = mandate[-1].document, ledger.head
    return Head(
        version=head.version,
        digest=head.digest,
        final=ledger.final,
        weight=head.weight,
        term=grant.term,
        mirrors=grant.mirrors,
        after=grant.after,
        granted_by=grant.author,
        grant=mandate[-1].signature,
    )


class RemoteLedger:
    """The ledger of `module` at `peer`. Every method raises SwarmError, Refused or IntegrityError."""

    def __init__(self, node: Member, peer: PeerId, module: ModuleId) -> None:
        self.peer = peer
        self._node = node
        self.module = module

    async def branch(self) -> Branch:
        """The end of its chain; its word."""
        return await self._ask(GetBranch(module=self.module))

    async def chain(self, *, after: int, until: int | None = None) -> list[Sealed[ModuleVersion]]:
        """All versions that follow `after`, up to `until`."""
        found: list[Sealed[ModuleVersion]] = []
        while until is None or after + len(found) < until:
            page = await self.page(after=after + len(found))
            if not page:
                break
            found += page
        return found if until is None else found[: max(until - after, 0)]

    async def page(self, *, after: int) -> list[Sealed[ModuleVersion]]:
        """The first few versions that follow `after`, up to the stage's last one. A page that goes on with others, or
        beyond what the run can have, is an IntegrityError: whoever answers could page for ever. So is one that names
        what is too large to be fetched."""
        found = await read_items(ModuleVersion, await self._ask(GetChain(module=self.module, after=after)))
        numbers = [sealed.document.version for sealed in found]
        if numbers != list(range(after + 1, after + 1 + len(found))):
            raise IntegrityError(f"asked for the versions of {self.module} after {after}, it gave {numbers[:5]}")
        if after + len(found) > self._node.run.config.rounds.rounds:
            raise IntegrityError(f"it gave more versions of {self.module} than the run has rounds")
        for document in (sealed.document for sealed in found):
            if (document.run, document.module) != (self._node.run.id, self.module):
                raise IntegrityError(f"asked for versions of {self.module}, it gave one of another run or module")
            self._node.run.check_sizes(document)
        return [sealed for sealed in found if sealed.document.version <= self._node.run.rounds]

    async def finals(self, *, after: int, until: int) -> list[ModuleVersion]:
        """The same up to `until`, as far as the coordinator has signed them."""
        is_signed = partial(is_final, coordinator=self._node.run.manifest.author)
        shown = await self.chain(after=after, until=until)
        return [sealed.document for sealed in itertools.takewhile(is_signed, shown)]

    async def meet(
        self, ours: Sequence[Sealed[ModuleVersion]], *, until: int | None
    ) -> tuple[int, list[Sealed[ModuleVersion]]]:
        """The newest version that is the same here and there, and what follows it there, up to `until`."""
        theirs = (await self.branch()).version
        end = theirs if until is None else min(theirs, until)
        common, step = min(len(ours), end), 1
        while common:
            page = await self.page(after=common - 1)
            if page and page[0].document.digest == ours[common - 1].document.digest:
                break
            common, step = max(common - step, 0), 2 * step
        chain = await self.chain(after=common, until=end)
        for sealed in list(chain):
            if len(ours) > common and ours[common].document.digest == sealed.document.digest:
                common += 1
                chain.pop(0)
        return common, chain

    async def kept(self) -> list[Sealed[Contribution]]:
        """The contributions that are open or not final yet, without those that no leader can have admitted: a holder
        could make up any. They must come in order, be of this module, and be no more than KEPT_MAX, or it is an
        IntegrityError: whoever answers could page for ever."""
        found: list[Sealed[Contribution]] = []
        while len(found) <= KEPT_MAX:
            after = found[-1].id if found else ""
            page = await read_items(Contribution, await self._ask(GetOpen(module=self.module, after=after)))
            if not page:
                return [sealed for sealed in found if self._may_count(sealed.document)]
            names = [after, *(sealed.id for sealed in page)]
            if any(name >= following for name, following in itertools.pairwise(names)):
                raise IntegrityError(f"contributions to {self.module} that are out of order")
            if any(sealed.document.module != self.module for sealed in page):
                raise IntegrityError(f"contributions to another module than {self.module}")
            found += page
        raise IntegrityError(f"more than {KEPT_MAX} contributions to {self.module} that are not final")

    def _may_count(self, document: Contribution) -> bool:
        """By what its document says, whatever version it began from."""
        run = self._node.run
        is_here = document.run == run.id and document.path in run.topology.paths_through(self.module)
        return is_here and document.payload.size <= run.payload_bytes_max(self.module)

    async def keep(self, sealed: Sealed[Contribution], payload: bytes, *, is_new: bool) -> Custody:
        """Have it keep a contribution of the module that we lead; its word for it. If that `is_new`, it fetches the
        payload from its author; what it does not get there we bring."""
        sharding = self._node.run.sharding(sealed.document.sharding)
        request = KeepContribution(module=self.module, contribution=sealed, sharding=sharding)
        custody = await self._fetched(request) if is_new else None
        if custody is None:
            await send(self._node, self.peer, payload, digest=sealed.document.payload.digest)
            custody = (await self._ask(request)).custody
        if custody.peer != self.peer or not custody.is_of(sealed.id):
            raise IntegrityError(f"...{short(self.peer)} did not sign that it keeps {sealed.id[:8]}")
        return custody

    async def _fetched(self, request: KeepContribution) -> Custody | None:
        """Its word, once it has the payload from the author; None if it does not get it there in time."""
        clock, size_bytes = self._node.clock, request.contribution.document.payload.size
        until_s = clock.now_s() + WAIT_S + size_bytes / AUTHOR_BYTES_S
        while clock.now_s() < until_s:
            try:
                return (await self._ask(request)).custody
            except Refused as refused:
                if refused.reason == Reason.PAYLOAD_MISSING:
                    return None
                if refused.reason != Reason.BUSY:
                    raise
            await clock.sleep(AGAIN_S)
        return None

    async def cosign(self, sealed: Sealed[ModuleVersion], *, final: int, final_signature: str) -> str:
        """Have it make our new version again, and keep it; its cosignature.

        `final` is the newest final version, and `final_signature` what the coordinator cosigned it with.
        """
        request = KeepVersion(module=self.module, version=sealed, final=final, final_signature=final_signature)
        return (await self._ask(request, timeout_s=CALL_TIMEOUT_S)).cosignature

    async def tell_final(self, final: int, signature: str) -> int:
        """Tell it the newest final version; the newest of which it then knows."""
        return (await self._ask(TellFinal(module=self.module, final=final, final_signature=signature))).final

    async def keep_evidence(self, said: Sequence[Sealed[Appraisal]]) -> None:
        """Have it keep what was said against work, of which no version tells."""
        for begin in range(0, len(said), APPRAISALS_MAX):
            batch = tuple(said[begin : begin + APPRAISALS_MAX])
            await self._ask(KeepEvidence(module=self.module, appraisals=batch))

    async def evidence(self) -> list[Sealed[Appraisal]]:
        """The same that an archive was given."""
        return await read_items(Appraisal, await self._ask(GetEvidence(module=self.module)))

    async def follow(self) -> None:
        """Have it take over our chain, as a new mirror."""
        await self._ask(Follow(module=self.module), timeout_s=CALL_TIMEOUT_S)

    async def forward(self, sealed: Sealed[Contribution], payload: bytes) -> None:
        """Submit a contribution once more, to the leader: its branch has lost, or its leader is gone."""
        await send(self._node, self.peer, payload, digest=sealed.document.payload.digest)
        sharding = self._node.run.sharding(sealed.document.sharding)
        request = Forward(module=self.module, contribution=sealed, sharding=sharding)
        await self._ask(request, timeout_s=CALL_TIMEOUT_S)

    async def _ask(self, request: ChainRequest[R], *, timeout_s: float = CONTROL_TIMEOUT_S) -> R:
        """Ask, and once more if the answer is lost: much depends on it, and every call is idempotent."""
        shown = replace(request, grant=self._node.mandates.shown(self.module))
        with contextlib.suppress(SwarmError):
            return await ask(self._node, self.peer, shown, timeout_s=timeout_s)
        return await ask(self._node, self.peer, shown, timeout_s=timeout_s)
