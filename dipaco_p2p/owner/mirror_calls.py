"""What a keeper of chains answers: leaders that hand something in, and whoever wants to take a module over."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ..errors import DipacoError, IntegrityError, Refused, SwarmError
from ..node.calls import (
    ChainRequest,
    Commit,
    Cosigned,
    Final,
    Follow,
    GetBranch,
    GetChain,
    GetContributions,
    GetEvidence,
    GetMandate,
    GetOpen,
    GetVote,
    KeepContribution,
    KeepEvidence,
    KeepVersion,
    Kept,
    TellFinal,
    Voted,
)
from ..node.items import Page, items_reply, stored_reply
from ..node.node import fetch_in_time
from ..node.shardings import learn_attached
from ..program.tasks import done_or_later
from ..protocol.documents import BlobRef, Contribution, Custody, Grant, ModuleVersion, Sealed
from ..protocol.expulsion import Charge
from ..protocol.gate import Appraisal
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId, short
from ..protocol.versions import Branch
from ..swarm.calls import Done
from ..topology import ModuleId
from .chain import Chains, ModuleChain
from .expelling import vote_on
from .module_calls import learn_mandate, module_of_run
from .sources import is_relayed

log = logging.getLogger(__name__)

COMING_S = 3.0
"""How long a leader's call waits for a payload; it asks again."""
COMING_BYTES_MAX = 256_000_000
"""Of payloads that are fetched at the same time: they are in memory until they are whole."""


class MirrorCalls:
    """The calls `mirror.*`, `module.commit`, `module.mandate` and `archive.contributions`."""

    def __init__(self, chains: Chains) -> None:
        self._node = chains.node
        self._chains = chains
        self._coming: dict[str, asyncio.Task[bool]] = {}
        """Payloads on their way from their authors, by digest,"""
        self._coming_bytes = 0
        """and their sizes in all."""
        self._counted: dict[ModuleId, frozenset[str]] = {}
        """What the last version counts that a leader brought."""

    def serve(self) -> None:
        """Answer from now on."""
        swarm = self._node.swarm
        self.serve_reading()
        Commit.serve(swarm, self._on_commit)
        GetBranch.serve(swarm, self._on_branch)
        GetOpen.serve(swarm, self._on_open)
        GetVote.serve(swarm, self._on_vote)
        KeepContribution.serve(swarm, self._on_contribution)
        KeepVersion.serve(swarm, self._on_version)
        TellFinal.serve(swarm, self._on_final)
        Follow.serve(swarm, self._on_follow)
        KeepEvidence.serve(swarm, self._on_evidence)
        GetEvidence.serve(swarm, self._on_said)

    def serve_reading(self) -> None:
        """Answer what changes nothing, for a stage that is over."""
        GetMandate.serve(self._node.swarm, self._on_mandate)
        GetChain.serve(self._node.swarm, self._on_chain)
        GetContributions.serve(self._node.swarm, self._on_contributions)

    async def _on_mandate(self, sender: PeerId, request: GetMandate) -> Page[Grant]:
        return items_reply(self._node.mandates.newest(module_of_run(self._node, request.module)))

    async def _on_chain(self, sender: PeerId, request: GetChain) -> Page[ModuleVersion]:
        chain = self._chain(request)
        longest = max(chain.ledger.versions, self._chains.kept(chain.module), key=len)
        return items_reply(longest[request.after :])

    async def _on_branch(self, sender: PeerId, request: GetBranch) -> Branch:
        return (await self._seen(sender, request)).ledger.branch

    async def _on_open(self, sender: PeerId, request: GetOpen) -> Page[Contribution]:
        ledger = (await self._seen(sender, request)).ledger
        kept, counted, final = ledger.kept, ledger.counted, ledger.final
        names = sorted(name for name in kept if name > request.after and counted.get(name, final + 1) > final)
        return items_reply(kept[name] for name in names)

    async def _on_contributions(self, sender: PeerId, request: GetContributions) -> Page[Contribution]:
        return stored_reply(map(self._chains.find_stored, request.ids))

    async def _on_vote(self, sender: PeerId, request: GetVote) -> Voted:
        chain, run = self._chain(request), self._node.run.id
        charge = Charge(run=run, module=chain.module, peer=request.peer, found=request.found, decrees=request.decrees)
        return Voted(signature=vote_on(chain, charge).signature)

    async def _on_commit(self, sender: PeerId, request: Commit) -> Done:
        document = request.contribution.document
        if document.run != self._node.run.id:
            raise Refused("a contribution to another run", reason=Reason.WRONG_RUN)
        if document.author != sender:
            raise Refused("only its author commits to a contribution", reason=Reason.NOT_AUTHOR)
        chain = self._chains[module_of_run(self._node, document.module)]
        if not (chain.is_owner or chain.keeps_everything):
            raise Refused(f"{chain.module} is not kept here", reason=Reason.NOT_LEADER)
        if document.path not in self._node.run.topology.paths_through(chain.module):
            raise Refused(f"{document.path} does not go through {chain.module}", reason=Reason.WRONG_PATH)
        base, head, staleness = document.base_version, chain.ledger.head.version, self._node.run.config.rounds.staleness
        if not -staleness <= base - head <= 1:  # we may be a version behind
            raise Refused(f"based on version {base}, while the head is {head}", reason=Reason.STALE_BASE)
        chain.originals.commit(request.contribution, is_known=self._chains.is_proven(document.author))
        return Done()

    async def _on_contribution(self, sender: PeerId, request: KeepContribution) -> Kept:
        chain = await self._seen(sender, request)
        learn_attached(self._node, request.sharding)
        require_same(request.contribution.document.module, request.module)
        if request.contribution.id not in chain.ledger.kept:
            self._require_room(chain, request.contribution)
        try:
            chain.keep_contribution(sender, request.contribution)
        except Refused as refused:
            if refused.reason != Reason.PAYLOAD_MISSING:
                raise
            await self._fetch_payload(sender, request.contribution.document)
            chain.keep_contribution(sender, request.contribution)
        return Kept(custody=Custody.sign(self._node.swarm.signer, request.contribution.id))

    def _require_room(self, chain: ModuleChain, sealed: Sealed[Contribution]) -> None:
        """Raise Refused if the disk has no room for this one; what the leader's version counts may have most of it."""
        payload, room = sealed.document.payload, chain.chains.room
        if not chain.keeps_everything:
            room.require_signed(chain.ledger)
        coming_bytes = self._coming_bytes - (payload.size if payload.digest in self._coming else 0)
        is_counted = sealed.id in self._counted.get(chain.module, ())
        try:
            room.require_share(sealed, is_counted=is_counted, coming_bytes=coming_bytes)
        except Refused as refused:  # for a reason in the work: a mirror that is always busy seems deaf to its leader
            raise Refused(str(refused), reason=Reason.FULL) from None

    async def _fetch_payload(self, leader: PeerId, document: Contribution) -> None:
        """From its author, or every contribution would go over the leader's line once for each mirror. Raises Refused:
        it is not to be had there, or it is still on its way (busy). An author behind a relay gives it only to spare a
        leader that is behind one too."""
        node, payload, author = self._node, document.payload, document.author
        coming = self._coming.get(payload.digest)
        if coming is None:
            is_near = author == node.peer or bool(node.watch.addresses(author))
            is_there = is_near and is_relayed(node, author) <= is_relayed(node, leader)
            is_fit = payload.size <= node.run.payload_bytes_max(document.module)
            if not (is_there and is_fit and self._coming_bytes + payload.size <= COMING_BYTES_MAX):
                raise Refused(f"upload blob {payload.digest[:8]} first", reason=Reason.PAYLOAD_MISSING)
            coming = self._coming[payload.digest] = asyncio.create_task(self._come(author, payload))
            self._coming_bytes += payload.size
        await done_or_later(coming, node.clock, COMING_S)
        if not coming.done():
            raise Refused(f"blob {payload.digest[:8]} is on its way from its author", reason=Reason.BUSY)
        if not coming.result():
            raise Refused(f"the author did not give blob {payload.digest[:8]}", reason=Reason.PAYLOAD_MISSING)

    async def _come(self, author: PeerId, payload: BlobRef) -> bool:
        """Whether the payload is here now."""
        try:
            await fetch_in_time(self._node, payload, holders=[author], keep=True)
        except DipacoError as error:
            log.info("%s did not give a payload: %s", short(author), error)
            return False
        finally:
            del self._coming[payload.digest]
            self._coming_bytes -= payload.size
        return True

    async def _on_version(self, sender: PeerId, request: KeepVersion) -> Cosigned:
        chain = await self._seen(sender, request)
        require_same(request.version.document.module, request.module)
        if self._node.mandates.leader(chain.module) == sender:
            self._counted[chain.module] = frozenset(share.contribution for share in request.version.document.shares)
        signature = await chain.keep_version(sender, request.version)
        chain.note_final(request.final, request.final_signature)
        return Cosigned(cosignature=signature)

    async def _on_final(self, sender: PeerId, request: TellFinal) -> Final:
        chain = self._chain(request)
        chain.note_final(request.final, request.final_signature)
        return Final(final=chain.ledger.final)

    async def _on_evidence(self, sender: PeerId, request: KeepEvidence) -> Done:
        chain = await self._seen(sender, request)
        chain.require_leader(sender)
        chain.evidence.keep(request.appraisals)
        return Done()

    async def _on_said(self, sender: PeerId, request: GetEvidence) -> Page[Appraisal]:
        return items_reply((await self._seen(sender, request)).evidence.said())

    async def _on_follow(self, sender: PeerId, request: Follow) -> Done:
        chain = await self._seen(sender, request)
        try:
            await chain.welcome(sender)
        except (SwarmError, IntegrityError) as error:  # the caller may be gone by now
            raise Refused(f"your chain of {request.module} is not to be had: {error}", reason=Reason.BUSY) from None
        return Done()

    def _chain(self, request: ChainRequest[Any]) -> ModuleChain:
        """The chain that a request is about; raises Refused."""
        return self._chains[module_of_run(self._node, request.module)]

    async def _seen(self, sender: PeerId, request: ChainRequest[Any]) -> ModuleChain:
        """The same, after a look at the grant that a leader shows: from then on we answer it, and no earlier one."""
        chain, grant = self._chain(request), request.grant
        if grant is not None and not self._node.mandates.believes(chain.module, grant):
            if grant.document.leader == sender:
                await learn_mandate(self._node, chain.module, sender)
        return chain


def require_same(found: ModuleId, module: ModuleId) -> None:
    """Raise Refused unless a document is of the module that the request names."""
    if found != module:
        raise Refused(f"a document of {found} in a request about {module}", reason=Reason.WRONG_MODULE)
