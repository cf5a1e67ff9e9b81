"""What a keeper of chains answers: leaders that hand something in, and whoever wants to take a module over."""

from __future__ import annotations

from typing import Any

from ..errors import IntegrityError, Refused, SwarmError
from ..node.calls import (
    ChainRequest,
    Commit,
    Cosigned,
    Final,
    Follow,
    GetBranch,
    GetChain,
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
from ..node.items import Page, items_reply
from ..node.shardings import learn_attached
from ..protocol.documents import Contribution, Custody, Grant, ModuleVersion
from ..protocol.expulsion import Charge
from ..protocol.gate import Appraisal
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId
from ..protocol.versions import Branch
from ..swarm.calls import Done
from ..topology import ModuleId
from .chain import Chains, ModuleChain
from .expelling import vote_on
from .module_calls import learn_mandate, module_of_run


class MirrorCalls:
    """The calls `mirror.*`, `module.commit` and `module.mandate`."""

    def __init__(self, chains: Chains) -> None:
        self._node = chains.node
        self._chains = chains

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

    async def _on_mandate(self, sender: PeerId, request: GetMandate) -> Page[Grant]:
        return items_reply(self._node.mandates.newest(module_of_run(self._node, request.module)))

    async def _on_chain(self, sender: PeerId, request: GetChain) -> Page[ModuleVersion]:
        chain = self._chain(request)
        longest = max(chain.ledger.versions, self._chains.kept(chain.module), key=len)
        return items_reply(longest[request.after :])

    async def _on_branch(self, sender: PeerId, request: GetBranch) -> Branch:
        return (await self._seen(sender, request)).ledger.branch

    async def _on_open(self, sender: PeerId, request: GetOpen) -> Page[Contribution]:
        kept = (await self._seen(sender, request)).ledger.kept
        return items_reply(kept[name] for name in sorted(kept) if name > request.after)

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
        base, head, staleness = document.base_version, chain.ledger.head.version, self._node.run.config.rounds.staleness
        if not -staleness <= base - head <= 1:  # we may be a version behind
            raise Refused(f"based on version {base}, while the head is {head}", reason=Reason.STALE_BASE)
        chain.originals.commit(request.contribution, is_known=document.author in chain.ledger.workers)
        return Done()

    async def _on_contribution(self, sender: PeerId, request: KeepContribution) -> Kept:
        chain = await self._seen(sender, request)
        learn_attached(self._node, request.sharding)
        require_same(request.contribution.document.module, request.module)
        chain.keep_contribution(sender, request.contribution)
        return Kept(custody=Custody.sign(self._node.swarm.signer, request.contribution.id))

    async def _on_version(self, sender: PeerId, request: KeepVersion) -> Cosigned:
        chain = await self._seen(sender, request)
        require_same(request.version.document.module, request.module)
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
        if grant is not None:
            is_known = grant.document.module == chain.module and self._node.mandates.believes(chain.module, grant)
            if not is_known and grant.document.leader == sender:
                await learn_mandate(self._node, chain.module, sender)
        return chain


def require_same(found: ModuleId, module: ModuleId) -> None:
    """Raise Refused unless a document is of the module that the request names."""
    if found != module:
        raise Refused(f"a document of {found} in a request about {module}", reason=Reason.WRONG_MODULE)
