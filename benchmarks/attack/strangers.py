"""Attacks on a run, by name. A stranger says whatever it can say without the keys of others, until it is stopped.

`twins.py` starts each in a process of its own, since a lying leader is our own leader with its checks taken out. What a
stranger hears, it counts by reason in `heard.json`; `keys.json` lists its identities, so that the figures can tell what
is theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dipaco_p2p import strict
from dipaco_p2p.clock import SystemClock
from dipaco_p2p.core.model.layout import decode_module
from dipaco_p2p.core.outer.compress import compress, encode_compressed
from dipaco_p2p.errors import DipacoError, Refused
from dipaco_p2p.node.calls import Contribute, Forward, GetBranch, GetChain, GetOpen, KeepContribution, KeepVersion
from dipaco_p2p.node.items import items_reply
from dipaco_p2p.node.ledger import RemoteLedger
from dipaco_p2p.node.node import Member, fetch, open_member, send, serve_store
from dipaco_p2p.node.reading import fetch_chain
from dipaco_p2p.node.stages import fetch_stages
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.chain import Chains
from dipaco_p2p.owner.intake import Intake
from dipaco_p2p.owner.leadership import Electing, Leadership
from dipaco_p2p.protocol.documents import BlobRef, Contribution, Custody, ModuleVersion, Part, Sealed, seal, unseal
from dipaco_p2p.protocol.liveness import Claim, Heartbeat
from dipaco_p2p.protocol.norms import Norms
from dipaco_p2p.protocol.records import claims_key, peers_key, sign_record
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.protocol.versions import genesis_version
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.swarm.calls import WriteBlob
from dipaco_p2p.swarm.hivemind.libp2p import Libp2pSwarm, open_libp2p
from dipaco_p2p.swarm.stage_scope import ScopedSwarm
from dipaco_p2p.topology import ModuleId, PathId

from .volunteers import VOLUNTEERS, take_part

HEARD, KEYS = "heard.json", "keys.json"
TIMEOUT_S = 10.0
AGAIN_S = 0.1
"""Between two looks at the swarm, or two questions."""
GARBAGE = 1000.0
"""How many times as long as the parameters themselves the longest gradients are."""
TINY_NORM = 1e-7
PARROT_LENGTH = 1.0001
"""Of a copy, in lengths of what it is a copy of."""
SMALL_SHARES = 670
"""As many as once made a version too large for its document."""

Floats = np.ndarray[Any, np.dtype[np.float32]]
Attack = Callable[["Stranger"], Awaitable[None]]
Make = Callable[[ModuleVersion, ModuleVersion | None], Awaitable[Floats | None]]
"""An outer gradient that begins with the first of the two, whose parent is the second; None: not from this one."""
ATTACKS: dict[str, Attack] = {}


def attack(name: str) -> Callable[[Attack], Attack]:
    """Name an attack for the command line; its docstring says what it does."""

    def note(work: Attack) -> Attack:
        ATTACKS[name] = work
        return work

    return note


class Stranger:
    """One process without a GPU: a node of the DHT, and as many keys as it likes."""

    def __init__(self, swarm: Libp2pSwarm, node: Member, folder: Path) -> None:
        self.swarm, self.node, self.run, self.folder = swarm, node, node.run, folder
        self.heard: Counter[str] = Counter()
        self.signers: list[Signer] = [swarm.signer]
        self.modules = list(node.run.topology.modules())
        self.ttl_s = node.run.config.liveness.heartbeat_ttl_s
        self._claimed: PathId | None = None
        self._claimed_s = 0.0

    def new_keys(self, count: int) -> list[Signer]:
        """Identities cost nothing, and need no node of their own to be heard."""
        made = [Signer(secrets.token_bytes(32)) for _ in range(count)]
        self.signers += made
        return made

    def write(self) -> None:
        """What was heard so far, and by whom."""
        (self.folder / HEARD).write_text(json.dumps(self.heard))
        (self.folder / KEYS).write_text(json.dumps([signer.peer for signer in self.signers]))

    async def look(self) -> None:
        """Keep up with the swarm, and tell of ourselves; without an end."""
        await asyncio.gather(self._see(), self.node.presence.run())

    async def _see(self) -> None:
        while True:
            with contextlib.suppress(DipacoError):
                await self.node.watch.refresh()
            self.write()
            await asyncio.sleep(self.ttl_s / 6)

    async def put_as(self, signer: Signer, key: str, body: Any) -> None:
        """A record of any of our keys."""
        now_s = time.time()
        plain = strict.plain(body)
        record = sign_record(signer, key=key, counter=int(1000 * now_s), expires_s=now_s + self.ttl_s, body=plain)
        assert self.swarm._node is not None
        await self.swarm._node.store(key, record.to_bytes(), record.expires_s, subkey=signer.peer)

    def document(
        self,
        module: ModuleId,
        path: PathId,
        head: ModuleVersion,
        payload: bytes,
        *,
        author: Signer,
        tokens: int = 0,
        parts: Mapping[ModuleId, Part] | None = None,
    ) -> Sealed[Contribution]:
        """A contribution that is well formed, and weighs as much as it may. `parts` are those of all modules; without,
        the others are said to be like this one."""
        ours = Part(base_digest=head.digest, payload=BlobRef.of(payload))
        contribution = Contribution(
            run=self.run.id,
            module=module,
            path=path,
            base_version=head.version,
            base_digest=head.digest,
            payload=BlobRef.of(payload),
            steps=1,
            tokens=tokens or self.run.tokens_full,
            loss=1.0,
            others=tuple((parts or {}).get(other, ours) for other in path.modules() if other != module),
            author=author.peer,
        )
        return seal(author, contribution)

    def payload(self, module: ModuleId, values: Floats) -> bytes:
        """An outer gradient as the run encodes it."""
        return encode_compressed(compress(values, codec=self.run.config.compression.uplink)[0])

    async def params(self, version: ModuleVersion) -> Floats:
        """The parameters of a version, from whoever gives them."""
        holders = sorted(self.node.watch.heartbeats)
        data = await fetch(self.node, version.snapshot, holders=holders, keep=True)
        return decode_module(data, self.run.layout(version.module))

    async def push(self, sealed: Sealed[Contribution], payload: bytes, *, is_own: bool = True) -> str:
        """What the leader says of it: a reason, or `taken`."""
        module = sealed.document.module
        leader = self.node.watch.leader(module)
        if leader is None or leader == self.node.peer:
            return "no leader"
        request = (Contribute if is_own else partial(Forward, module=module))(contribution=sealed)
        addresses = self.node.watch.addresses(leader)
        try:
            await send(self.node, leader, payload)
            await request.call(self.node.swarm, leader, timeout_s=TIMEOUT_S, addresses=addresses)
        except Refused as refused:
            return refused.reason
        except DipacoError as error:
            return type(error).__name__
        return "taken"

    async def head_and_parent(self, module: ModuleId) -> tuple[ModuleVersion, ModuleVersion | None]:
        """The newest version that anybody shows, and the one before it."""
        chain = [genesis_version(self.run.manifest, module), *await fetch_chain(self.node, module)]
        return chain[-1], chain[-2] if len(chain) > 1 else None

    async def contribute(
        self, make: Make, *, paths: Collection[PathId] | None = None, is_claiming: bool = False
    ) -> None:
        """On these paths, or all, of every module, from every version on, with one identity and no training; a path is
        claimed just before, or none ever is."""
        wanted = set(self.run.topology.paths() if paths is None else paths)
        told: set[tuple[ModuleId, PathId, int]] = set()
        while True:
            made: dict[ModuleId, tuple[ModuleVersion, bytes]] = {}
            for module in self.modules:
                with contextlib.suppress(DipacoError):
                    head, parent = await self.head_and_parent(module)
                    if (
                        head.version < self.run.config.rounds.rounds
                        and (values := await make(head, parent)) is not None
                    ):
                        made[module] = head, self.payload(module, values)
                        self.node.store.put(made[module][1])  # judges read it here
            parts = {
                module: Part(base_digest=head.digest, payload=BlobRef.of(payload))
                for module, (head, payload) in made.items()
            }
            for module, (head, payload) in made.items():
                for path in sorted(wanted.intersection(self.run.topology.paths_through(module))):
                    if (module, path, head.version) not in told:
                        if is_claiming:
                            await self.say_claim(path)
                        said = await self.contribute_to(head, path, payload, parts)
                        if said in ("taken", "norm"):
                            told.add((module, path, head.version))
            await asyncio.sleep(AGAIN_S)

    async def contribute_to(
        self, head: ModuleVersion, path: PathId, payload: bytes, parts: Mapping[ModuleId, Part]
    ) -> str:
        """Push it as work on `path` from `head`, beside the path's other parts; what the leader says, which is noted."""
        sealed = self.document(head.module, path, head, payload, author=self.swarm.signer, parts=parts)
        said = await self.push(sealed, payload)
        self.heard[said] += 1
        return said

    async def say_claim(self, path: PathId) -> None:
        """That we train `path` from now on, and no other."""
        if self._claimed != path:
            self._claimed, self._claimed_s = path, time.time()
        await self.put_as(self.swarm.signer, claims_key(self.run.id, path), Claim(path=path, since_s=self._claimed_s))


def scaled(values: Any, norm: float) -> Floats:
    """The same direction, this long."""
    made: Floats = (values * (norm / max(float(np.linalg.norm(values)), 1e-30))).astype(np.float32)
    return made


def usual_norm(version: ModuleVersion) -> float:
    """The median of what a version counts."""
    return float(np.median([share.norm for share in version.shares])) if version.shares else 0.0


async def last_step(me: Stranger, head: ModuleVersion, parent: ModuleVersion | None) -> Floats | None:
    """The direction in which the last round moved the module, as long as its contributions were."""
    if parent is None or not head.shares:
        return None
    return scaled(await me.params(parent) - await me.params(head), usual_norm(head))


async def last_step_back(me: Stranger, head: ModuleVersion, parent: ModuleVersion | None) -> Floats | None:
    """The last round's step with the other sign, three times as long."""
    found = await last_step(me, head, parent)
    return None if found is None else scaled(-found, 3 * usual_norm(head))


# -- work that nobody did


@attack("copy")
async def copy(me: Stranger) -> None:
    """One identity pushes the last round's step again, on all paths."""
    await me.contribute(partial(last_step, me))


@attack("negate")
async def negate(me: Stranger) -> None:
    """One identity pushes the last round's step with the other sign, three times as long, on all paths."""
    await me.contribute(partial(last_step_back, me))


def noise_of(norm: Callable[[Floats, ModuleVersion], float]) -> Attack:
    """One identity pushes random numbers, of this norm, on all paths."""

    async def work(me: Stranger) -> None:
        chance = np.random.default_rng(0)

        async def make(head: ModuleVersion, parent: ModuleVersion | None) -> Floats | None:
            params = await me.params(head)
            length = norm(params, head)
            return scaled(np.asarray(chance.normal(size=params.shape)), length) if length else None

        await me.contribute(make)

    return work


ATTACKS["noise"] = noise_of(lambda params, head: 3 * usual_norm(head))
ATTACKS["tiny"] = noise_of(lambda params, head: TINY_NORM)
ATTACKS["cold-start"] = noise_of(lambda params, head: 10 * float(np.linalg.norm(params)))


@attack("shares")
async def shares(me: Stranger) -> None:
    """670 contributions by as many keys, of one payload, to each version."""
    keys = me.new_keys(SMALL_SHARES)
    while True:
        for module in me.modules:
            with contextlib.suppress(DipacoError):
                head, parent = await me.head_and_parent(module)
                values = await last_step(me, head, parent)
                if values is None:
                    values = np.full(me.run.layout(module).size, 1e-4, dtype=np.float32)
                payload, paths = me.payload(module, values), me.run.topology.paths_through(module)
                for number, key in enumerate(keys):
                    sealed = me.document(module, paths[number % len(paths)], head, payload, author=key, tokens=1)
                    me.heard[await me.push(sealed, payload, is_own=False)] += 1
        await asyncio.sleep(AGAIN_S)


# -- work that nobody did, with claims


@attack("pace")
async def pace(me: Stranger) -> None:
    """A volunteer of half of the paths, one after the other, that is done as soon as it begins, so that deadlines
    shrink."""
    paths = list(me.run.topology.paths())
    await me.contribute(partial(last_step, me), paths=paths[: len(paths) // 2], is_claiming=True)


@attack("mover")
async def mover(me: Stranger) -> None:
    """As `negate`; it moves its claim to each path before it pushes."""
    await me.contribute(partial(last_step_back, me), is_claiming=True)


@attack("claimant")
async def claimant(me: Stranger) -> None:
    """As `negate`, on the one path that it claims: a quarter of the run's."""
    await me.contribute(partial(last_step_back, me), paths=[max(me.run.topology.paths())], is_claiming=True)


@attack("parrot")
async def parrot(me: Stranger) -> None:
    """A replica of an honest volunteer: claims its path, waits for its work of each round, and hands it in as its own,
    a little longer, so that no byte of the payload needs to be the same."""
    path = None
    while path is None:
        await asyncio.sleep(AGAIN_S)
        path = max((path for path, claims in me.node.watch.claims.items() if claims), default=None)
    await asyncio.gather(_stay(me, path), *(_repeat_work(me, module, path) for module in path.modules()))


async def _stay(me: Stranger, path: PathId) -> None:
    while True:
        await me.say_claim(path)
        await asyncio.sleep(me.ttl_s / 6)


async def _repeat_work(me: Stranger, module: ModuleId, path: PathId) -> None:
    done = -1
    while True:
        await asyncio.sleep(AGAIN_S)
        with contextlib.suppress(DipacoError):
            head, _ = await me.head_and_parent(module)
            leader = me.node.watch.leader(module)
            if leader is None or head.version == done:
                continue
            for sealed in await RemoteLedger(me.node, leader, module).kept():
                theirs = sealed.document
                if theirs.author != me.node.peer and (theirs.path, theirs.base_version) == (path, head.version):
                    data = await fetch(me.node, theirs.payload, holders=[leader, theirs.author])
                    values = me.run.read_contribution(data, module).expand() * np.float32(PARROT_LENGTH)
                    parts = dict(zip(path.modules(), theirs.parts, strict=True))
                    said = await me.contribute_to(head, path, me.payload(module, values), parts)
                    done = head.version if said in ("taken", "norm") else done
                    break


async def _as_a_volunteer(me: Stranger) -> None:
    raise AssertionError("played by `take_part`")


ATTACKS |= dict.fromkeys(VOLUNTEERS, _as_a_volunteer)


# -- claims without work


async def claim(me: Stranger, keys: Sequence[Signer], paths: Iterable[Sequence[PathId]]) -> None:
    """Each key claims its paths since ever, and says that it lives."""
    wanted = [(key, path) for key, theirs in zip(keys, paths, strict=True) for path in theirs]
    while True:
        for key in keys:
            await me.put_as(key, peers_key(me.run.id), Heartbeat(doing="training", tokens_per_s=1e6))
        for key, path in wanted:
            await me.put_as(key, claims_key(me.run.id, path), Claim(path=path, since_s=0.0))
        await asyncio.sleep(me.ttl_s / 3)


def claims_of(count: int, *, spared: int) -> Attack:
    """Keys that claim every path, but for so many, and never train."""

    async def work(me: Stranger) -> None:
        paths = list(me.run.topology.paths())[spared:]
        await claim(me, me.new_keys(count), [paths] * count)

    return work


for keys_, spared_ in ((4, 0), (4, 1), (50, 0), (50, 1)):
    ATTACKS[f"claims-{keys_}-{'herd' if spared_ else 'all'}"] = claims_of(keys_, spared=spared_)


# -- roles that nobody gave


@attack("leader")
async def leader(me: Stranger) -> None:
    """Asks for every module without an end; what it leads, it fills with garbage of its own, and signs it."""
    Intake.judge = lambda self, *what, **facts: None  # type: ignore[method-assign]
    Norms.bounds = lambda self, base: (0.0, float("inf"))  # type: ignore[method-assign]
    Norms.clip_norm = lambda self, base: None  # type: ignore[method-assign]
    me.node.presence.note(owns=True)
    leadership = Leadership(Chains(me.node), Electing(me.node))
    await asyncio.gather(*(_lead(me, leadership, module) for module in me.modules))


async def _lead(me: Stranger, leadership: Leadership, module: ModuleId) -> None:
    while True:
        try:
            if module not in leadership.modules:
                await leadership.take(module)
                me.heard["led"] += 1
            await _fill(me, leadership, module)
        except Refused as refused:
            me.heard[refused.reason] += 1
        except DipacoError as error:
            me.heard[type(error).__name__] += 1
        await asyncio.sleep(AGAIN_S)


async def _fill(me: Stranger, leadership: Leadership, module: ModuleId) -> None:
    led = leadership._leader_of(module)
    params = await me.params(led.head)
    values = scaled(np.ones_like(params), GARBAGE * float(np.linalg.norm(params)))
    payload = me.payload(module, values)
    me.node.store.put(payload)
    for path in me.run.topology.paths_through(module):
        sealed = me.document(module, path, led.head, payload, author=me.swarm.signer)
        await led.contribute(me.node.peer, sealed)


@attack("seeds")
async def seeds(me: Stranger) -> None:
    """Says that it is a seed node, agrees to keep and to cosign everything, and keeps nothing."""
    signer = me.swarm.signer

    async def keep(sender: str, header: dict[str, Any], body: bytes) -> Reply:
        me.heard["kept"] += 1
        sealed = unseal(Contribution, header["contribution"])
        return Reply({"custody": strict.plain(Custody.sign(signer, sealed.id))})

    async def cosign(sender: str, header: dict[str, Any], body: bytes) -> Reply:
        me.heard["cosigned"] += 1
        return Reply({"cosignature": "00" * 64})

    async def swallow(sender: str, header: dict[str, Any], body: bytes) -> Reply:
        return Reply({"have": header["size"], "done": True, "range": 2**20})

    me.node.swarm.serve(KeepContribution.METHOD, keep)
    me.node.swarm.serve(KeepVersion.METHOD, cosign)
    me.node.swarm.serve(WriteBlob.METHOD, swallow)
    me.node.presence.note(role="seed", owns=True)
    await asyncio.Event().wait()


@attack("pager")
async def pager(me: Stranger) -> None:
    """Says that it owns modules and is a seed node; whoever asks what it keeps is given page after page."""
    me.node.presence.note(role="seed", owns=True)
    module, payload = me.modules[0], secrets.token_bytes(64)
    genesis = {each: genesis_version(me.run.manifest, each) for each in me.modules}

    async def branch(sender: str, header: dict[str, Any], body: bytes) -> Reply:
        me.heard["state"] += 1
        return Reply({"final": 0, "version": 10**6, "weight": 10**9, "digest": genesis[module].digest})

    async def page(sender: str, header: dict[str, Any], body: bytes) -> Reply:
        me.heard["page"] += 1
        asked = ModuleId.parse(header["module"])
        path = me.run.topology.paths_through(asked)[0]
        made = [me.document(asked, path, genesis[asked], payload, author=key) for key in me.new_keys(100)]
        return items_reply(sorted(made, key=lambda sealed: sealed.id))

    for kind, answer in ((GetBranch, branch), (GetOpen, page), (GetChain, page)):
        me.node.swarm.serve(kind.METHOD, answer)
    await asyncio.Event().wait()


# -- the process


async def live(name: str, address: str, folder: Path) -> None:
    """Join the run at `address`, and attack it until SIGTERM."""
    folder.mkdir(parents=True, exist_ok=True)
    clock = SystemClock()
    swarm = await open_libp2p(folder / "identity.key", initial_peers=[address], clock=clock)
    try:
        seed = await swarm.connect(address, timeout_s=TIMEOUT_S)
        stages = await fetch_stages(swarm, seed, expected=None)
        run = stages[-1]
        working: asyncio.Future[Any]
        if name in VOLUNTEERS:
            (folder / KEYS).write_text(json.dumps([swarm.peer]))
            working = asyncio.ensure_future(take_part(name, swarm, seed, stages, folder))
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
            with contextlib.suppress(asyncio.CancelledError):
                await working
            return
        upload_max = max(map(run.payload_bytes_max, run.topology.modules()))
        scoped = ScopedSwarm(swarm, run.id)
        node = open_member(run, scoped, clock, Store(folder / "store"), upload_bytes_max=upload_max)
        serve_store(node.swarm, node.store)
        me = Stranger(swarm, node, folder)
        await node.watch.refresh()
        working = asyncio.gather(me.look(), ATTACKS[name](me))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
        try:
            await working
        except asyncio.CancelledError:
            me.write()
    finally:
        await swarm.close()


def main() -> None:
    """`strangers NAME ADDRESS FOLDER`."""
    name, address, folder = sys.argv[1:]
    asyncio.run(live(name, address, Path(folder)))
