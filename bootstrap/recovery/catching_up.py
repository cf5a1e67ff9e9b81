"""A coordinator that came out of a backup learns what it signed after it, before it signs anything.

It signs one grant for a term, one version, one sharding and one decree of a number: who forgets what it signed could
sign another, and split the run for good. So it asks everybody alive for mandates, shardings, decrees and chains, and
waits two lives of a heartbeat from the first peer that it sees: whoever is in the swarm has said so by then.

What nobody alive knows is forgotten: a term of a leader that is away with its whole group and with all who ever saw it
lead. `Filling` then fetches what the archive lacks of versions that it has taken over ready made. What nobody gives
stays missing: the chain still shows which contributions counted and who signed, but cannot be recomputed there.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.node.calls import IDS_MAX, GetContributions, GetJudgements
from dipaco_p2p.node.items import read_items
from dipaco_p2p.node.ledger import Ledger, RemoteLedger
from dipaco_p2p.node.node import Member, ask, fetch_in_time
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.shardings import learn_shardings
from dipaco_p2p.owner.archive import ArchiveChains, SeedArchive
from dipaco_p2p.protocol.documents import BlobRef, Contribution, ModuleVersion
from dipaco_p2p.protocol.judgement import Judgement
from dipaco_p2p.protocol.signing import PeerId, short
from dipaco_p2p.protocol.versions import Branch
from dipaco_p2p.topology import ModuleId

from ..folder import drop_marker, read_marker, write_marker

log = logging.getLogger(__name__)

QUIET_HEARTBEATS = 2.0
QUIET_S_MIN = 5.0
ASKED_MAX = 64
FILL_AGAIN_S = 10.0


class CatchingUp:
    """Of the stage that is open; over at once in a folder that never came out of a backup."""

    def __init__(self, chains: ArchiveChains, root: Path, *, tell: Callable[[str], None]) -> None:
        node, archive = self._node, self._archive = chains.node, chains.archive
        self._chains = chains
        self._root = root
        self._tell = tell
        self._filling = Filling(node, archive)
        self._marker = read_marker(root)
        self.is_over = asyncio.Event()
        """From then on this coordinator may sign."""
        if self._marker is None or self._marker.is_caught_up:
            self.is_over.set()

    @property
    def is_going_on(self) -> bool:
        return not self.is_over.is_set()

    async def run(self) -> None:
        """Until all is known and everything is here."""
        if self._marker is None:
            return
        if self.is_going_on:
            self._tell(
                "this folder was restored from a backup: nothing is signed until the swarm has said what came after it"
            )
            await self._learn_all()
            self._marker = replace(self._marker, is_caught_up=True)
            write_marker(self._root, self._marker)
            self._node.history.add("caught_up", versions=self._versions())
            self._tell(f"caught up with the swarm: {self._versions()} versions in the archive")
            self.is_over.set()
        await self._fill_all()

    async def _learn_all(self) -> None:
        clock, ttl_s = self._node.clock, self._node.run.config.liveness.heartbeat_ttl_s
        quiet_s, met_s = max(QUIET_HEARTBEATS * ttl_s, QUIET_S_MIN), None
        while met_s is None or clock.now_s() < met_s + quiet_s:
            await self._node.watch.refresh()
            others = await self._others()
            if others and met_s is None:
                met_s = clock.now_s()
            await self.learn(others)
            await clock.sleep(ttl_s / 3)
        await self.learn(await self._others())

    async def learn_once(self) -> None:
        """As far as it goes now: of a stage that is over."""
        await self.learn(await self._others())
        await self._filling.fill()

    async def learn(self, others: list[PeerId]) -> None:
        """What these peers know: who leads, which shardings there are, which versions are final."""
        for peer in others:
            await self._node.watch.decree_news.try_learn(peer)
            await learn_shardings(self._node, of=[peer])
        await asyncio.gather(*(self._learn_module(module, others) for module in self._node.run.topology.modules()))
        await self._filling.copy_judgements()

    async def _learn_module(self, module: ModuleId, others: list[PeerId]) -> None:
        found: dict[PeerId, Branch] = {}
        owners = sorted(self._node.mandates.peers(module) & self._node.watch.heartbeats.keys() - {self._node.peer})
        for peer in dict.fromkeys([*owners, *others]):
            try:
                await self._node.watch.mandate_news.learn(module, peer)
                found[peer] = await RemoteLedger(self._node, peer, module).branch()
            except DipacoError as error:
                log.info("%s: ...%s does not say what it knows: %s", module, short(peer), error)
        for peer in sorted(found, key=lambda peer: (found[peer].rank, peer)):
            try:
                await self._chains[module].catch_up(peer, until=found[peer].final)
            except DipacoError as error:
                log.info("%s: the chain of ...%s is not to be had: %s", module, short(peer), error)

    async def _fill_all(self) -> None:
        told = -1
        while missing := await self._filling.fill():
            if missing != told:
                self._tell(f"{missing} files of versions after the backup are missing; still asking for them")
                told = missing
            await self._node.clock.sleep(FILL_AGAIN_S)
        drop_marker(self._root)
        self._node.history.add("filled")
        self._tell("the archive is complete again")

    async def _others(self) -> list[PeerId]:
        """Whom to ask: seed nodes first, since they have most; then leaders, former owners and peers that have worked,
        as far as this folder or a grant names them; then strangers. Where there are too many, chance decides at each
        look, and those who are gone come last: keys cost nothing, and neither does having worked once.
        """
        node, watch = self._node, self._node.watch

        def drawn(peers: Iterable[PeerId]) -> list[PeerId]:
            return sorted(sorted(peers), key=lambda peer: (peer not in watch.heartbeats, random.random()))

        leaders = itertools.chain(*watch.heads.values())
        known = list(dict.fromkeys([*leaders, *drawn(node.mandates.all_peers() | self._chains.workers)]))[:ASKED_MAX]
        await watch.find(*known)  # in a large swarm they are seldom our neighbours
        found = dict.fromkeys([*watch.seeds(), *known, *drawn(watch.heartbeats)])
        return [peer for peer in found if peer in watch.heartbeats and peer != node.peer][:ASKED_MAX]

    def _versions(self) -> int:
        return sum(len(ledger.versions) for ledger in self._archive.ledgers.values())


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
                for sealed in await read_items(Judgement, reply):
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
        thinned, retention = self._archive.thinning.of(ledger.module), self._archive.thinning.retention
        for sealed in versions[self._whole[ledger.module] :]:
            version = sealed.document.version
            # A version of which blobs are kept, but no contributions, is the one that those after it are made from.
            if version <= thinned.versions:
                is_needed = not retention.has_all_params and self._archive.thinning.wants(version, self._node.run)
                lacking = await self._fill_params(sealed.document) if is_needed else 0
            elif retention.is_light and version <= thinned.contributions:
                lacking = await self._fill_params(sealed.document)
            else:
                lacking = await self._fill_version(sealed.document)
            missing += lacking
            if not missing:
                self._whole[ledger.module] = sealed.document.version
        return missing

    async def _fill_params(self, version: ModuleVersion) -> int:
        """What a light archive has of a version: of the last one the outer state as well."""
        refs = [version.snapshot, version.state if version.version == self._node.run.rounds else None]
        return sum([not await self._fetch(ref, self._holders(version)) for ref in refs if ref is not None])

    async def _fill_version(self, version: ModuleVersion) -> int:
        await self._fetch_contributions([share.contribution for share in version.shares])
        missing = 0
        for share in version.shares:
            found = self._archive.find(share.contribution)
            missing += found is None or not await self._fetch(found.document.payload, self._holders(version))
        blobs = (version.snapshot, version.update, version.state, version.appraisals)
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
                found = {sealed.id: sealed for sealed in await read_items(Contribution, reply) if sealed.id in wanted}
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
            await fetch_in_time(self._node, ref, holders=list(holders), keep=True)
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
    yield from (found.state for found in manifest.genesis if found.state is not None)
    for sealed in run.shardings:
        yield sealed.document.router
        yield sealed.document.token_router
        yield from (found.blob for found in sealed.document.shards)
