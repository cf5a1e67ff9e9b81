"""A peer that lies: what it can say without the key of another, it says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dipaco_p2p import strict
from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.outer.compress import compress, encode_compressed
from dipaco_p2p.core.tensor_file import decode, encode
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.node.items import Page, items_reply, read_items
from dipaco_p2p.protocol.documents import BlobRef, Contribution, Custody, Grant, Part, Recipe, Sealed, seal, unseal
from dipaco_p2p.protocol.grants import Mandate
from dipaco_p2p.protocol.liveness import Claim, Head, Heartbeat, read_all
from dipaco_p2p.protocol.neighbours import bits, place
from dipaco_p2p.protocol.records import claims_key, heads_key, peers_key, sign_record
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.protocol.versions import genesis_version
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.swarm.blobs.blobs import send_blob
from dipaco_p2p.swarm.stage_scope import ScopedSwarm
from dipaco_p2p.topology import ModuleId, PathId

from .actors import Environment
from .virtual_time import VirtualClock

TIMEOUT_S = 5.0
CLAIMED_FIRST = 0.5
NEWEST = 0.7
WORKERS, WORKS = 0.8, 0.2
COPY_LENGTH = 1.0001
COPIED_DEADLINES = 2
"""That somebody copies for: a newcomer to a path waits for one."""
NO_STATE = BlobRef.of(b"a state that is given to nobody")


class Stranger:
    """A hostile node, and what it needs to know to lie well."""

    def __init__(self, world: Environment, chance: random.Random, *, signer: Signer | None = None) -> None:
        self.world = world
        self.chance = chance
        self.signer = signer or Signer(chance.randbytes(32))
        self.node = world.network.join(self.signer)
        self.swarm = ScopedSwarm(self.node, world.run.id)
        self.run = world.run
        for method in ("mirror.contribution", "mirror.version", "module.contribute", "module.next", "module.round"):
            self.swarm.serve(method, self._agree)
        self.swarm.serve("blob.write", self._swallow)
        self._mandates: dict[ModuleId, Mandate] = {}
        """Those that we have granted ourselves, each with the grants before it."""

    def leave(self) -> None:
        self.world.network.kill(self.signer.peer)

    async def _agree(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        """Yes to everything, and nothing is done."""
        forged = {"receipt": {}, "cosignature": "00" * 64}
        if "contribution" in header:
            custody = Custody.sign(self.signer, unseal(Contribution, header["contribution"]).id)
            forged["custody"] = strict.plain(custody)
        return Reply(self.chance.choice(({}, {"version": 99}, forged)))

    async def _swallow(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        """All of it is here, and none is."""
        return Reply({"have": header["size"], "done": True, "range": 2**20})

    def module(self) -> ModuleId:
        return self.chance.choice(list(self.run.topology.modules()))

    async def head(self, module: ModuleId) -> tuple[PeerId, Head] | None:
        """The leader of `module`, as its records say."""
        records = await self.node.get(heads_key(self.run.id, module))
        heads = read_all(Head, {peer: record.body for peer, record in records.items()})
        heads = {peer: head for peer, head in heads.items() if not head.resigned and peer != self.signer.peer}
        return max(heads.items(), key=lambda item: (item[1].term, item[0]), default=None)

    async def put(self, key: str, body: Any) -> None:
        await self.node.put(key, strict.plain(body), ttl_s=self.world.plan.ttl_s)

    async def claim(self, path: PathId, *, since_s: float) -> None:
        """Say that we train `path`."""
        self.world.note("stranger", "claims", peer=self.signer.peer, path=str(path))
        await self.put(claims_key(self.run.id, path), Claim(path=path, since_s=since_s, round=0))

    async def contribute(
        self,
        payload: bytes,
        *,
        module: ModuleId | None = None,
        copy_of: str = "",
        length: float = 0.01,
        **changes: Any,
    ) -> str:
        """A contribution that is signed well, with these things wrong; its id. What the leader says is not waited for
        long. Now and then we claim its path first; that of a copy we have claimed. Of the path's other modules each
        value has this `length`."""
        module = module or self.module()
        found = await self.head(module)
        if found is None:
            return ""
        leader, head = found
        path = changes.pop("path", None) or self.chance.choice(self.run.topology.paths_through(module))
        if not copy_of and self.chance.random() < CLAIMED_FIRST:
            await self.claim(path, since_s=VirtualClock().now_s())
        audited = self.run.config.audited
        document = Contribution(
            run=self.run.id,
            module=module,
            path=path,
            base_version=head.version,
            base_digest=self._digest(module, head),
            sharding=0,
            payload=BlobRef.of(payload),
            state=NO_STATE if audited else None,
            steps=1,
            tokens=self.run.tokens_full,
            loss=1.0,
            others=changes.pop("others", None) or await self._others(module, path, length=length),
            recipe=Recipe(round=head.version, place=0, replicas=1) if audited else None,
            author=self.signer.peer,
        )
        with contextlib.suppress(DipacoError, ValueError):
            sealed = seal(self.signer, replace(document, **changes))
            if copy_of:
                self.world.note("stranger", "copies", id=sealed.id, of=copy_of)
            await send_blob(self.swarm, leader, payload, timeout_s=TIMEOUT_S)
            header = {"contribution": sealed.to_dict()}
            reply = await self.swarm.call(leader, "module.contribute", header, timeout_s=TIMEOUT_S)
            self.world.note("stranger", "taken", module=str(module), id=sealed.id, reply=sorted(reply.header))
            return sealed.id
        return ""

    def _digest(self, module: ModuleId, head: Head | None) -> str:
        """Of the version that a leader announces."""
        return head.digest if head is not None and head.version else genesis_version(self.run.manifest, module).digest

    async def _others(self, module: ModuleId, path: PathId, *, length: float) -> tuple[Part, ...]:
        """The other parts of the path; their leaders are given what judges would ask for."""
        parts = []
        for other in path.modules() if self.run.config.judging.judges else ():
            if other != module:
                found, payload = await self.head(other), self.gradient(other, length)
                if found is not None:
                    with contextlib.suppress(DipacoError):
                        await send_blob(self.swarm, found[0], payload, timeout_s=TIMEOUT_S)
                digest = self._digest(other, None if found is None else found[1])
                parts.append(Part(base_digest=digest, payload=BlobRef.of(payload)))
        return tuple(parts)

    async def repeat_work(self, module: ModuleId, path: PathId) -> None:
        """Hand in what somebody has done on `path` from the head, a little longer, as our own."""
        found = await self.head(module)
        if found is None:
            return
        leader, head = found
        for sealed in await read_items(Contribution, await self._call(leader, "mirror.open", module, after="")):
            theirs = sealed.document
            if theirs.author != self.signer.peer and (theirs.path, theirs.base_version) == (path, head.version):
                wish = {"digest": theirs.payload.digest, "offset": 0, "length": theirs.payload.size}
                payload = (await self.swarm.call(leader, "blob.read", wish, timeout_s=TIMEOUT_S)).body
                values = self.run.read_contribution(payload, module).expand() * np.float32(COPY_LENGTH)
                await self.contribute(
                    self._encoded(values), module=module, path=path, copy_of=sealed.id, others=theirs.others
                )
                return

    def gradient(self, module: ModuleId, length: float = 0.01) -> bytes:
        """A well-formed outer gradient, each number of which is `length`."""
        return self._encoded(np.full(self.run.layout(module).size, length, dtype=np.float32))

    def _encoded(self, values: Floats) -> bytes:
        return encode_compressed(compress(values, codec=self.run.config.compression.uplink)[0])

    async def lead_idly(self) -> None:
        """Ask the coordinator for every module without an end; lead what it grants, and take nothing. Most work a
        little now and then, since strangers lead after everybody else."""
        coordinator, run = self.run.manifest.author, self.run
        leads: dict[ModuleId, Head] = {}
        does_work = self.chance.random() < WORKERS
        while True:
            await self.put(peers_key(run.id), Heartbeat(owns=True, addresses=self.node.addresses))
            if does_work and self.chance.random() < WORKS:
                module = self.module()
                await self.contribute(self.gradient(module), module=module)
            for module in run.topology.modules():
                with contextlib.suppress(DipacoError):
                    shown = await read_items(Grant, await self._call(coordinator, "module.mandate", module))
                    newest = shown[-1].document if shown else None
                    if newest is None or newest.leader != self.signer.peer:
                        header = {"term": newest.term + 1 if newest else 1, "mirrors": [], "mandate": []}
                        reply = await self._call(coordinator, "archive.adopt", module, **header)
                        sealed = unseal(Grant, reply.header["grant"])
                        leads[module] = self._head_of(sealed.document, sealed.signature, await self.head(module))
                        facts = {"module": str(module), "term": sealed.document.term, "peer": self.signer.peer}
                        self.world.note("stranger", "granted", **facts)
            for module, head in leads.items():
                await self.put(heads_key(run.id, module), head)
            await asyncio.sleep(self.world.plan.ttl_s / 6)

    async def usurp(self) -> None:
        """Offer without an end to own modules, and never work. In the group of a volunteer grant ourselves the next
        term, lead, and take nothing; and once the coordinator has granted it since, a later term than its."""
        self.swarm.serve("module.mandate", self._show_mandate)
        while True:
            await self.put(peers_key(self.run.id), Heartbeat(owns=True, addresses=self.node.addresses))
            for module in self.run.topology.modules():
                with contextlib.suppress(DipacoError):
                    newest = await read_items(
                        Grant, await self._call(self.run.manifest.author, "module.mandate", module)
                    )
                    if newest:
                        self._grant_ourselves(module, newest)
                if (ours := self._mandates.get(module)) is not None:
                    head = self._head_of(ours[-1].document, ours[-1].signature, await self.head(module))
                    await self.put(heads_key(self.run.id, module), head)
            await asyncio.sleep(self.world.plan.ttl_s / 6)

    def _grant_ourselves(self, module: ModuleId, newest: Sequence[Sealed[Grant]]) -> None:
        last, ours = newest[-1].document, self._mandates.get(module, ())
        if last.leader == self.signer.peer:
            return
        is_member = self.signer.peer in last.group
        if is_member and last.leader != self.run.manifest.author:
            facts = {"module": str(module), "term": last.term + 1, "peer": self.signer.peer}
            self.world.note("stranger", "usurps", **facts)
            ours = tuple(newest)
        elif is_member or not ours or ours[-2].document.author == self.signer.peer:
            return  # a member of the newest group needs no old one's terms, and to extend those once is enough
        while ours[-1].document.term <= last.term:
            before, me = ours[-1].document, self.signer.peer
            grant = replace(before, term=before.term + 1, after=before.term, leader=me, mirrors=(), author=me)
            ours = *ours, seal(self.signer, grant)
        self._mandates[module] = ours

    async def _show_mandate(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Page[Grant]:
        return items_reply(self._mandates.get(ModuleId.parse(header["module"]), ()))

    async def flood(self, bucket: str, *, count: int) -> None:
        """Fill a bucket with heartbeats of keys that fall into it, without an end."""
        signers: list[Signer] = []
        while len(signers) < count:
            signer = Signer(self.chance.randbytes(32))
            if bits(place(signer.peer), len(bucket)) == bucket:
                signers.append(signer)
        key, ttl_s, body = peers_key(self.run.id, bucket), self.world.plan.ttl_s, strict.plain(Heartbeat(owns=True))
        counter = 0
        while True:
            now_s, counter = VirtualClock().now_s(), counter + 1
            for signer in signers:
                record = sign_record(signer, key=key, counter=counter, expires_s=now_s + ttl_s, body=body)
                self.node.store_bytes(key, signer.peer, record.to_bytes())
            await asyncio.sleep(ttl_s / 3)

    async def be_a_seed(self) -> None:
        """Say without an end that we are an archive, and that we keep what we are handed."""
        while True:
            await self.put(peers_key(self.run.id), Heartbeat(role="seed", owns=True, addresses=self.node.addresses))
            await asyncio.sleep(self.world.plan.ttl_s / 3)

    async def _call(self, peer: PeerId, method: str, module: ModuleId, **header: Any) -> Reply:
        return await self.swarm.call(peer, method, {"module": str(module)} | header, timeout_s=TIMEOUT_S)

    def _head_of(self, grant: Grant, signature: str, before: tuple[PeerId, Head] | None) -> Head:
        """As of a leader that has all that the one before it had."""
        digest = genesis_version(self.run.manifest, grant.module).digest
        head = before[1] if before is not None else Head(version=0, digest=digest, term=1)
        head = replace(head, grant=signature, granted_by=grant.author)
        return replace(head, term=grant.term, after=grant.after, mirrors=grant.mirrors)


Act = Callable[[Stranger], Awaitable[None]]


async def junk_records(stranger: Stranger) -> None:
    """Bodies that are none, under every kind of key."""
    run, path = stranger.run.id, stranger.chance.choice(list(stranger.run.topology.paths()))
    for key in (peers_key(run), heads_key(run, stranger.module()), claims_key(run, path)):
        body = stranger.chance.choice(({"x": "y" * 2000}, {"version": -1}, {"path": 7, "since_s": "soon"}, {}))
        await stranger.node.put(key, body, ttl_s=60.0)
        stranger.node.store_bytes(key, stranger.signer.peer, stranger.chance.randbytes(200))


async def forged_head(stranger: Stranger) -> None:
    """I lead this module, in a later term than anybody."""
    module = stranger.module()
    found = await stranger.head(module)
    base = found[1] if found else None
    version = (base.version if base else 0) + stranger.chance.randint(0, 3)
    digest = base.digest if base else genesis_version(stranger.run.manifest, module).digest
    head = Head(version=version, digest=digest, term=(base.term if base else 0) + 5, grant="00" * 64)
    if base is not None and stranger.chance.random() < 0.5:
        head = replace(base, term=base.term)  # with the true leader's grant
    await stranger.put(heads_key(stranger.run.id, module), head)


async def false_claims(stranger: Stranger) -> None:
    """I train all paths; and never a contribution comes."""
    for path in stranger.run.topology.paths():
        await stranger.claim(path, since_s=0.0)


async def willing_owner(stranger: Stranger) -> None:
    """I am alive and own modules: choose me as a mirror."""
    await stranger.put(peers_key(stranger.run.id), Heartbeat(owns=True, addresses=stranger.node.addresses))


async def replayed_contribution(stranger: Stranger) -> None:
    """Somebody else's contribution, once more."""
    documents = sorted((stranger.world.seed.folder / "documents").glob("open-*.json"))
    found = await stranger.head(stranger.module())
    if documents and found is not None:
        sealed = json.loads(stranger.chance.choice(documents).read_bytes())
        with contextlib.suppress(DipacoError):
            await stranger.swarm.call(found[0], "module.contribute", {"contribution": sealed}, timeout_s=TIMEOUT_S)


async def not_a_number(stranger: Stranger) -> None:
    """An outer gradient whose scales are NaN, infinite or negative, in whatever codec the run has."""
    module = stranger.module()
    tensors, metadata = decode(stranger.gradient(module, 0.01))
    scale = stranger.chance.choice((np.nan, np.inf, -1.0))
    spoilt = {name: np.full_like(t, scale) if t.dtype == np.float32 else t for name, t in tensors.items()}
    await stranger.contribute(encode(spoilt, metadata=metadata), module=module)


async def huge_gradient(stranger: Stranger) -> None:
    """An outer gradient that is a million times too long."""
    module = stranger.module()
    await stranger.contribute(stranger.gradient(module, 1e6), module=module)


async def huge_payload(stranger: Stranger) -> None:
    """A payload over the limit, and one that is no outer gradient at all."""
    size = stranger.run.payload_bytes_max(stranger.module())
    await stranger.contribute(stranger.chance.randbytes(size + stranger.chance.choice((1, -7, 100_000))))


async def weight_lie(stranger: Stranger) -> None:
    """A small gradient that claims the work of a thousand."""
    module = stranger.module()
    await stranger.contribute(stranger.gradient(module), module=module, tokens=stranger.run.tokens_full * 1000)


async def stale_base(stranger: Stranger) -> None:
    """A contribution to a version that is long gone, that never was, or that is another one than the newest."""
    module, base = stranger.module(), dict[str, Any](base_digest="ab" * 32)
    if stranger.chance.random() >= NEWEST:
        base["base_version"] = stranger.chance.choice((0, 1, 50))
    await stranger.contribute(stranger.gradient(module), module=module, **base)


async def foreign_path(stranger: Stranger) -> None:
    """A contribution of a path that does not go through the module."""
    module = stranger.module()
    foreign = [path for path in stranger.run.topology.paths() if module not in path.modules()]
    if foreign:
        await stranger.contribute(stranger.gradient(module), module=module, path=stranger.chance.choice(foreign))


async def second_helping(stranger: Stranger) -> None:
    """Two good contributions to the same base, where one may count."""
    module = stranger.module()
    path = stranger.run.topology.paths_through(module)[0]
    for length in (0.01, 0.02):
        await stranger.contribute(stranger.gradient(module, length), module=module, path=path)


async def harmful_work(stranger: Stranger) -> None:
    """Work that makes its path worse in all its modules, on a path that is claimed for it."""
    module = stranger.module()
    path = stranger.chance.choice(stranger.run.topology.paths_through(module))
    await stranger.claim(path, since_s=VirtualClock().now_s())
    length = -stranger.chance.choice((0.001, 0.003, 0.01))
    id_ = await stranger.contribute(stranger.gradient(module, length), module=module, path=path, length=length)
    if id_:
        stranger.world.note("stranger", "harms", module=str(module), id=id_)


async def copied_work(stranger: Stranger) -> None:
    """A replica that never trains: each round, what somebody else did on its path comes from it as well."""
    path, clock = stranger.chance.choice(list(stranger.run.topology.paths())), VirtualClock()
    since_s = clock.now_s()
    while clock.now_s() < since_s + COPIED_DEADLINES * stranger.run.config.rounds.deadline_s:
        await stranger.claim(path, since_s=since_s)
        for module in path.modules():
            with contextlib.suppress(DipacoError):
                await stranger.repeat_work(module, path)
        await asyncio.sleep(stranger.world.plan.ttl_s / 6)


HOSTILE_ACTS: tuple[Act, ...] = (
    junk_records,
    forged_head,
    false_claims,
    willing_owner,
    replayed_contribution,
    not_a_number,
    huge_gradient,
    huge_payload,
    weight_lie,
    stale_base,
    foreign_path,
    second_helping,
    harmful_work,
    copied_work,
)
