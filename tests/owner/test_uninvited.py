"""A leader in a run of the invited, or with a list: it takes work of those whom a chain of invitations leads to, while
nobody on the chain is banned; of nobody else, whatever they show, and however good their work is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime_harness import World, claim, offer
from tiny_run import SEED_NUMBER, contribution_of, gradient_bytes, signer, tiny_config
from virtual_time import eventually

from dipaco_p2p.config import INVITE, LIST, AdmissionConfig
from dipaco_p2p.errors import Refused
from dipaco_p2p.node import invitations as remembering
from dipaco_p2p.node.invitations import Chain, invite
from dipaco_p2p.node.node import Member, send
from dipaco_p2p.owner.leader import Leader
from dipaco_p2p.owner.takeover import Takeover
from dipaco_p2p.protocol.documents import Contribution, seal
from dipaco_p2p.protocol.invitations import LINKS_MAX, Invitation
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.topology import ModuleId, PathId

COORDINATOR = signer(SEED_NUMBER)
MODULE = ModuleId(1, 0)
PATHS = (PathId((0, 0, 0)), PathId((0, 0, 1)))
ANNA, BERT, CARA, EVE = 61, 62, 63, 64
LEADER = 50


class Stage:
    """A led module, and whoever offers work to its leader by hand."""

    def __init__(self, world: World, owner: Leader) -> None:
        self.world, self.owner = world, owner
        self.leader = world.leaders[0]
        self.nodes: dict[int, Member] = {}

    def node(self, number: int) -> Member:
        if number not in self.nodes:
            self.nodes[number] = self.world.peer(number)
        return self.nodes[number]

    def chain(self, *numbers: int, run: str | None = None) -> Chain:
        """From the coordinator over all of these."""
        found: Chain = ()
        for author, number in zip([SEED_NUMBER, *numbers], numbers, strict=False):
            found = invite(signer(author), run or self.world.run.origin, signer(number).peer, at_s=1.0, held=found)
        return found

    def work(self, number: int, path: PathId = PATHS[0]) -> tuple[Contribution, bytes]:
        """Good work from the head on; never the same twice."""
        head = self.owner.head
        payload = gradient_bytes(self.world.run, MODULE, seed=1000 * head.version + number)
        base = {"base_version": head.version, "base_digest": head.digest}
        return contribution_of(self.world.run, signer(number), payload, module=MODULE, path=path, **base), payload

    async def offer(self, number: int, chain: Chain = (), *, path: PathId = PATHS[0]) -> str:
        """What the leader says to good work of a peer that shows `chain`: a reason, or `taken`."""
        node = self.node(number)
        await node.watch.refresh()
        node.invitations.own = chain
        try:
            await offer(node, self.leader.peer, *self.work(number, path))
        except Refused as refused:
            return refused.reason
        return "taken"

    async def round_of(self, number: int, chain: Chain, *, path: PathId = PATHS[0]) -> None:
        """A version that counts work of this peer."""
        before = self.owner.head.version
        assert await self.offer(number, chain, path=path) == "taken"
        await eventually(lambda: self.owner.head.version == before + 1)

    def ban(self, number: int) -> None:
        decrees = self.leader.node.decrees
        decrees.issue(COORDINATOR, "ban", at_s=0.0, reason="a test", peer=signer(number).peer)


@asynccontextmanager
async def on_stage(folder: Path, admission: AdmissionConfig | None = None) -> AsyncIterator[Stage]:
    config = replace(tiny_config(rounds=9), admission=admission or AdmissionConfig(policy=INVITE))
    async with World(folder, config=config) as world:
        leader = world.leader(LEADER)
        yield Stage(world, await leader.lead(MODULE))


def of(author: int, peer: int, run: str, key: Signer | None = None) -> Any:
    """An invitation that says it is by `author`; `key` is what it is signed with, if not with theirs."""
    document = Invitation(run=run, peer=signer(peer).peer, at_s=1, author=signer(author).peer)
    sealed = seal(signer(author), document)
    return sealed if key is None else replace(sealed, signature=key.sign(Invitation.KIND, b"something else"))


async def test_good_work_of_a_stranger_is_refused_before_its_payload_is_looked_at(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        assert await stage.offer(EVE) == Reason.UNINVITED
        header = {"contribution": seal(signer(ANNA), stage.work(ANNA)[0]).to_dict()}
        with pytest.raises(Refused) as caught:  # without an upload
            await stage.node(ANNA).swarm.call(stage.leader.peer, "module.contribute", header, timeout_s=5.0)
        assert caught.value.reason == Reason.UNINVITED and "showed no invitation" in str(caught.value)
        assert not stage.owner.open_round().entries
        assert await stage.offer(ANNA, stage.chain(ANNA)) == "taken"


FORGED: dict[str, Callable[[Stage, str], Chain]] = {
    "another's": lambda stage, run: stage.chain(ANNA),
    "cut at its beginning": lambda stage, run: stage.chain(ANNA, BERT, EVE)[1:],
    "cut in its middle": lambda stage, run: (stage.chain(ANNA)[0], of(BERT, EVE, run)),
    "cut at its end": lambda stage, run: stage.chain(ANNA, EVE)[:1],
    "in another order": lambda stage, run: stage.chain(ANNA, EVE)[::-1],
    "to another run": lambda stage, run: stage.chain(EVE, run="ab" * 32),
    "one to another run": lambda stage, run: (stage.chain(ANNA)[0], of(ANNA, EVE, "ab" * 32)),
    "its own": lambda stage, run: (of(CARA, EVE, run),),
    "signed by somebody else": lambda stage, run: (of(SEED_NUMBER, EVE, run, key=signer(EVE)),),
    "too long": lambda stage, run: (*stage.chain(*[ANNA, BERT] * (LINKS_MAX // 2)), of(BERT, EVE, run)),
}


@pytest.mark.parametrize("what", FORGED)
async def test_no_forged_chain_lets_a_stranger_in(tmp_path: Path, what: str) -> None:
    async with on_stage(tmp_path) as stage:
        await stage.round_of(ANNA, stage.chain(ANNA))
        chain = FORGED[what](stage, stage.world.run.origin)
        is_malformed = what in ("signed by somebody else", "too long")
        assert await stage.offer(EVE, chain) == (Reason.MALFORMED if is_malformed else Reason.UNINVITED)
        assert await stage.offer(EVE, stage.chain(EVE)) == "taken"


async def test_a_volunteer_lets_others_in_once_its_own_work_counts(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        chain = stage.chain(ANNA, BERT)
        assert await stage.offer(BERT, chain) == Reason.UNINVITED
        await stage.round_of(ANNA, chain[:1])
        await stage.round_of(BERT, chain)
        assert await stage.offer(CARA, stage.chain(ANNA, BERT, CARA)) == "taken"


async def test_a_ban_of_one_peer_takes_all_that_it_let_in_along(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        chain = stage.chain(ANNA, BERT, CARA)
        for number, length in ((ANNA, 1), (BERT, 2), (CARA, 3)):
            await stage.round_of(number, chain[:length])
        stage.ban(ANNA)
        assert await stage.offer(ANNA, chain[:1]) == Reason.BANNED
        assert await stage.offer(BERT, chain[:2]) == Reason.UNINVITED
        assert await stage.offer(CARA, chain) == Reason.UNINVITED
        assert await stage.offer(CARA) == Reason.UNINVITED, "nor by the chain that it showed before"
        assert await stage.offer(CARA, stage.chain(CARA)) == "taken", "the coordinator may invite it again"


async def test_a_ban_takes_no_receipt_back(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        await stage.round_of(ANNA, stage.chain(ANNA))
        await claim(stage.leader.node, PATHS[1])  # the round waits for this path
        await stage.leader.node.watch.refresh()
        node, chain = stage.node(BERT), stage.chain(ANNA, BERT)
        await node.watch.refresh()
        node.invitations.own = chain
        document, payload = stage.work(BERT)
        receipt = await offer(node, stage.leader.peer, document, payload)
        stage.ban(ANNA)
        assert (await offer(node, stage.leader.peer, document, payload)).document == receipt.document
        assert await stage.offer(BERT, chain, path=PATHS[1]) == Reason.UNINVITED


async def forward(stage: Stage, author: int, *, by: Member | None = None) -> str:
    """What the leader says to `by`, else to somebody who never owned the module, that brings good work of `author`."""
    node, (document, payload) = by or stage.node(EVE), stage.work(author)
    await claim(stage.node(author), document.path)
    await send(node, stage.leader.peer, payload)
    header = {"module": str(MODULE), "contribution": seal(signer(author), document).to_dict()}
    await stage.leader.node.watch.refresh()
    try:
        await node.swarm.call(stage.leader.peer, "module.forward", header, timeout_s=5.0)
    except Refused as refused:
        return refused.reason
    return "taken"


async def test_what_others_bring_counts_by_the_chain_that_its_author_showed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembering, "SHOWN_MAX", 1)
    async with on_stage(tmp_path) as stage:
        assert await forward(stage, ANNA) == Reason.UNINVITED
        await stage.round_of(ANNA, stage.chain(ANNA))
        assert await forward(stage, ANNA) == "taken"
        await eventually(lambda: stage.owner.head.version == 2)
        await stage.round_of(BERT, stage.chain(BERT))
        assert await forward(stage, ANNA) == Reason.UNINVITED, "there is room for one"


async def test_what_may_have_a_receipt_is_taken_from_whoever_may_have_given_it(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as stage:
        assert await forward(stage, ANNA, by=stage.world.seed.node) == "taken"


@asynccontextmanager
async def after_a_former_leader(folder: Path, admission: AdmissionConfig) -> AsyncIterator[tuple[Stage, Member]]:
    """Who led the module before, and owns it no more; others would take its word that work has a receipt."""
    async with World(folder, config=replace(tiny_config(rounds=9, owners=1), admission=admission)) as world:
        former = world.leader(LEADER + 1)
        await former.lead(MODULE)
        await former.die(world)
        await asyncio.sleep(3 * world.run.config.liveness.heartbeat_ttl_s)
        leader = world.leader(LEADER)
        leader.node.mandates.learn(MODULE, former.node.mandates.newest(MODULE))
        stage = Stage(world, await leader.lead(MODULE))
        stage.leader = leader
        assert former.peer in leader.node.mandates.peers(MODULE) - set(stage.owner.grant.group)
        yield stage, stage.node(LEADER + 1)


async def test_nobody_s_word_lets_in_whom_nobody_invited(tmp_path: Path) -> None:
    """Attack: a former owner forwarded work of keys that nobody had invited, as if it had a receipt."""
    async with after_a_former_leader(tmp_path, AdmissionConfig(policy=INVITE)) as (stage, former):
        assert await forward(stage, EVE, by=former) == Reason.UNINVITED
        await stage.round_of(ANNA, stage.chain(ANNA))
        stage.ban(ANNA)
        assert await forward(stage, ANNA, by=former) == "taken", "a ban takes back no receipt"
        await eventually(lambda: stage.owner.head.version == 2)
        assert await forward(stage, BERT, by=former) == Reason.UNINVITED
        stage.leader.node.invitations.learn(signer(BERT).peer, stage.chain(BERT))
        assert await forward(stage, BERT, by=former) == "taken", "it is offered again, and BERT has shown how"


async def test_nobody_s_word_lets_in_whom_a_list_does_not_name(tmp_path: Path) -> None:
    peers = [signer(number).peer for number in (ANNA, LEADER, LEADER + 1)]
    async with after_a_former_leader(tmp_path, AdmissionConfig(policy=LIST, peers=tuple(peers))) as (stage, former):
        assert await forward(stage, EVE, by=former) == Reason.UNINVITED
        assert await forward(stage, ANNA, by=former) == "taken"


async def test_what_a_mirror_lists_to_the_next_leader_needs_an_invited_author(tmp_path: Path) -> None:
    """Attack: a mirror told whoever took the module over that it kept work of keys that nobody had invited."""
    config = replace(tiny_config(rounds=9), admission=AdmissionConfig(policy=INVITE))
    async with World(tmp_path, config=config) as world:
        stage = Stage(world, await world.leader(LEADER).lead(MODULE))
        bad, later = world.leader(LEADER + 1), world.leader(LEADER + 2)
        listed = []
        for number, path in ((ANNA, PATHS[0]), (EVE, PATHS[1])):
            document, payload = stage.work(number, path)
            listed.append(seal(signer(number), document))
            bad.node.store.put(payload)
            bad.chain.add(listed[-1])
        later.node.invitations.learn(signer(ANNA).peer, stage.chain(ANNA))
        await later.node.watch.refresh()
        takeover = Takeover(later.chain)
        await takeover._take_open(await takeover._listed([bad.peer]))
        assert list(later.chain.ledger.open) == [listed[0].id]


async def test_a_list_lets_in_whom_it_names_and_nobody_hears_the_others(tmp_path: Path) -> None:
    listed = AdmissionConfig(policy=LIST, peers=(signer(ANNA).peer, signer(LEADER).peer))
    async with on_stage(tmp_path, listed) as stage:
        assert await stage.offer(EVE, stage.chain(EVE)) == Reason.UNINVITED
        await stage.node(EVE).presence.beat()
        await stage.node(ANNA).presence.beat()
        watch = stage.leader.node.watch
        await watch.refresh()
        assert signer(ANNA).peer in watch.heartbeats and signer(EVE).peer not in watch.heartbeats
        assert await stage.offer(ANNA) == "taken"


async def test_an_open_run_looks_at_no_chain(tmp_path: Path) -> None:
    async with on_stage(tmp_path, AdmissionConfig()) as stage:
        assert await stage.offer(ANNA) == "taken"
        assert await stage.offer(EVE, stage.chain(ANNA), path=PATHS[1]) == "taken"
