"""What an archive lacks of versions that it has taken over ready made: contributions, their payloads, blobs.

A coordinator that came out of a backup gets it from a second seed node, and that one, which came later or was away,
from the coordinator. Owners have the newest of it, too. What nobody gives stays missing: the chain still shows which
contributions counted, and who signed, but cannot be recomputed there.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator

from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.node.calls import IDS_MAX, GetContributions, GetJudgements
from dipaco_p2p.node.items import read_items
from dipaco_p2p.node.ledger import Ledger
from dipaco_p2p.node.node import Member
from dipaco_p2p.node.reading import ask
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.transfer import fetch
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.protocol.documents import BlobRef, Contribution, ModuleVersion
from dipaco_p2p.protocol.judgement import Judgement
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import ModuleId

log = logging.getLogger(__name__)

HOLDERS_MAX = 8


class Filling:
    """Of one stage's archive."""

    def __init__(self, node: Member, archive: SeedArchive) -> None:
        self._node = node
        self._archive = archive
        self._whole: dict[ModuleId, int] = defaultdict(int)
        """Up to which version nothing is missing."""

    async def fill(self) -> int:
        """Fetch what can be had; how many things are still missing."""
        missing = 0
        for ref in refs_of(self._node.run):
            missing += not await self._fetch(ref, self._anybody())
        for ledger in self._archive.ledgers.values():
            missing += await self._fill_chain(ledger)
        return missing

    async def copy_judgements(self) -> None:
        """The coordinator's word on rounds, as another seed node has it: it must not judge one twice."""
        for seed in self._seeds():
            try:
                reply = await ask(self._node, seed, GetJudgements(from_=self._judged()))
                for sealed in read_items(Judgement, reply):
                    document = sealed.document
                    if (document.run, document.author) == (self._node.run.id, self._node.run.manifest.author):
                        name = f"judgement-{document.version:08d}"
                        if self._node.store.read_document(name) is None:
                            self._node.store.write_document(name, canonical_bytes(sealed.to_dict()))
            except DipacoError as error:
                log.info("no judgements of %s: %s", seed, error)

    def _judged(self) -> int:
        names = self._node.store.documents("judgement-")
        return int(names[-1].rpartition("-")[2]) + 1 if names else 0

    async def _fill_chain(self, ledger: Ledger) -> int:
        missing, versions = 0, ledger.versions
        for sealed in versions[self._whole[ledger.module] :]:
            lacking = await self._fill_version(sealed.document)
            missing += lacking
            if not missing:
                self._whole[ledger.module] = sealed.document.version
        return missing

    async def _fill_version(self, version: ModuleVersion) -> int:
        await self._fetch_contributions([share.contribution for share in version.shares])
        missing = 0
        for share in version.shares:
            found = self._archive.find(share.contribution)
            missing += found is None or not await self._fetch(found.document.payload, self._holders(version))
        blobs = (version.snapshot, version.update, version.state)
        for ref in filter(None, blobs):
            missing += not await self._fetch(ref, self._holders(version))
        return missing

    async def _fetch_contributions(self, ids: list[str]) -> None:
        lacking = [id_ for id_ in ids if self._archive.find(id_) is None]
        for seed in self._seeds() if lacking else ():
            for begin in range(0, len(lacking), IDS_MAX):
                await self._ask_contributions(seed, lacking[begin : begin + IDS_MAX])
            lacking = [id_ for id_ in lacking if self._archive.find(id_) is None]

    async def _ask_contributions(self, seed: PeerId, ids: list[str]) -> None:
        """Replies hold as many as fit, so what was left out is asked for again."""
        wanted = list(ids)
        try:
            while wanted:
                reply = await ask(self._node, seed, GetContributions(ids=tuple(wanted)))
                found = {sealed.id: sealed for sealed in read_items(Contribution, reply) if sealed.id in wanted}
                for sealed in found.values():
                    self._archive.keep(sealed)
                if not found:
                    return
                wanted = [id_ for id_ in wanted if id_ not in found]
        except DipacoError as error:
            log.info("no contributions of %s: %s", seed, error)

    async def _fetch(self, ref: BlobRef, holders: Iterable[PeerId]) -> bool:
        """Whether a blob is here now."""
        if self._node.store.size(ref.digest) is not None:
            return True
        try:
            await fetch(self._node, ref, holders=list(holders), keep=True)
        except DipacoError as error:
            log.info("blob %s is not to be had: %s", ref.digest[:8], error)
            return False
        return True

    def _seeds(self) -> list[PeerId]:
        return [peer for peer in self._node.watch.seeds() if peer != self._node.peer]

    def _anybody(self) -> list[PeerId]:
        """Volunteers have the shards that they train on."""
        others = (peer for peer in sorted(self._node.watch.heartbeats) if peer != self._node.peer)
        return list(dict.fromkeys([*self._seeds(), *others]))[:HOLDERS_MAX]

    def _holders(self, version: ModuleVersion) -> list[PeerId]:
        """Other archives, then who owns the module, then anybody."""
        watch = self._node.watch
        grant = self._node.mandates.grant(version.module)
        likely = [*self._seeds(), *(grant.group if grant else ()), version.author, *sorted(watch.heartbeats)]
        alive = (peer for peer in dict.fromkeys(likely) if peer in watch.heartbeats and peer != self._node.peer)
        return [peer for peer, _ in zip(alive, range(HOLDERS_MAX), strict=False)]


def refs_of(run: Run) -> Iterator[BlobRef]:
    """All blobs that the manifest and the shardings of a stage name."""
    manifest = run.manifest
    yield from (manifest.tokenizer, manifest.optimizer, manifest.validation, manifest.holdout, manifest.router_split)
    yield from filter(None, [manifest.router])
    yield from (found.blob for found in manifest.shards)
    yield from (found.blob for found in manifest.genesis)
    for sealed in run.shardings:
        yield sealed.document.router
        yield sealed.document.token_router
        yield from (found.blob for found in sealed.document.shards)
