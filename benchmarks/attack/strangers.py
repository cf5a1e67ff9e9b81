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
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dipaco_p2p import strict
from dipaco_p2p.clock import SystemClock
from dipaco_p2p.errors import DipacoError, Refused, SwarmError
from dipaco_p2p.node.calls import GetBranch, GetChain, GetOpen, KeepContribution, KeepVersion
from dipaco_p2p.node.items import items_reply
from dipaco_p2p.node.ledger import RemoteLedger
from dipaco_p2p.node.node import fetch, open_member, serve_store
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.stages import fetch_stages
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.chain import Chains
from dipaco_p2p.owner.granting import Electing
from dipaco_p2p.owner.intake import Intake
from dipaco_p2p.owner.leadership import Leadership
from dipaco_p2p.protocol.documents import Contribution, Custody, ModuleVersion, unseal
from dipaco_p2p.protocol.liveness import Claim, Heartbeat
from dipaco_p2p.protocol.norms import Norms
from dipaco_p2p.protocol.records import claims_key, peers_key
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.protocol.versions import genesis_version
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.swarm.calls import WriteBlob
from dipaco_p2p.swarm.hivemind.libp2p import Libp2pSwarm, open_libp2p
from dipaco_p2p.swarm.stage_scope import ScopedSwarm
from dipaco_p2p.topology import ModuleId, PathId

from .stranger import AGAIN_S, KEYS, TIMEOUT_S, Floats, Stranger
from .volunteers import VOLUNTEERS, take_part

GARBAGE = 1000.0
"""How many times as long as the parameters themselves the longest gradients are."""
TINY_NORM = 1e-7
IDLERS = 10
SMALL_SHARES = 670
"""As many as once made a version too large for its document."""

Attack = Callable[[Stranger], Coroutine[Any, Any, None]]
ATTACKS: dict[str, Attack] = {}


def attack(name: str) -> Callable[[Attack], Attack]:
    """Name an attack for the command line; its docstring says what it does."""

    def note(work: Attack) -> Attack:
        ATTACKS[name] = work
        return work

    return note


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
    with the states that auditors ask for."""
    path = await _claimed_by_others(me)
    await asyncio.gather(_stay(me, path), *(_repeat_work(me, module, path, path) for module in path.modules()))


@attack("copyist")
async def copyist(me: Stranger) -> None:
    """As `parrot`, but on the path that shares the fewest modules with the one whose work it hands in."""
    source = await _claimed_by_others(me)
    path = min(me.run.topology.paths(), key=lambda path: len(set(path.modules()) & set(source.modules())))
    await asyncio.gather(_stay(me, path), *(_repeat_work(me, module, path, source) for module in path.modules()))


async def _claimed_by_others(me: Stranger) -> PathId:
    path = None
    while path is None:
        await asyncio.sleep(AGAIN_S)
        path = max((path for path, claims in me.node.watch.claims.items() if claims), default=None)
    return path


async def _stay(me: Stranger, path: PathId) -> None:
    while True:
        await me.say_claim(path)
        await asyncio.sleep(me.ttl_s / 6)


async def _repeat_work(me: Stranger, module: ModuleId, path: PathId, source: PathId) -> None:
    """Hand in as work on `module` of `path` what others did for the module of `source` at the same level."""
    origin = source.modules()[path.modules().index(module)]
    done = -1
    while True:
        await asyncio.sleep(AGAIN_S)
        with contextlib.suppress(DipacoError):
            head, _ = await me.head_and_parent(module)
            leader = me.node.watch.leader(origin)
            if leader is None or head.version == done:
                continue
            for sealed in await RemoteLedger(me.node, leader, origin).kept():
                theirs = sealed.document
                if theirs.author != me.node.peer and (theirs.path, theirs.base_version) == (source, head.version):
                    data = await fetch(me.node, theirs.payload, holders=[leader, theirs.author], keep=True)
                    for state in (theirs.state, theirs.recipe.start if theirs.recipe else None):
                        if state is not None:
                            await fetch(me.node, state, holders=[theirs.author], keep=True)
                    parts = {
                        ours: replace(part, base_digest=(await me.head_and_parent(ours))[0].digest)
                        for ours, part in zip(path.modules(), theirs.parts, strict=True)
                    }
                    said = await me.contribute_to(head, path, data, parts, like=theirs)
                    done = head.version if said in ("taken", "norm") else done
                    break


async def _as_a_volunteer(me: Stranger) -> None:
    raise AssertionError("played by `take_part`")


ATTACKS |= dict.fromkeys(VOLUNTEERS, _as_a_volunteer)


# -- claims without work


async def claim(me: Stranger, keys: Sequence[Signer], paths: Iterable[Sequence[PathId]]) -> None:
    """Each key claims its paths since ever, and says that it lives."""
    wanted = list(zip(keys, paths, strict=True))
    while True:
        await say_claims(me, wanted)
        await asyncio.sleep(me.ttl_s / 3)


async def say_claims(me: Stranger, wanted: Sequence[tuple[Signer, Sequence[PathId]]]) -> None:
    """Each key says once that it lives, and claims its paths."""
    for key, paths in wanted:
        await me.put_as(key, peers_key(me.run.id), Heartbeat(doing="training", tokens_per_s=1e6))
        for path in paths:
            await me.put_as(key, claims_key(me.run.id, path), Claim(path=path, since_s=0.0))


def claims_of(count: int, *, spared: int) -> Attack:
    """Keys that claim every path, but for so many, and never train."""

    async def work(me: Stranger) -> None:
        paths = list(me.run.topology.paths())[spared:]
        await claim(me, me.new_keys(count), [paths] * count)

    return work


@attack("claims-fresh")
async def claims_fresh(me: Stranger) -> None:
    """A new key for each path with every life of a heartbeat, so that the chance of a new claim never ends."""
    paths = list(me.run.topology.paths())
    while True:
        await say_claims(me, [(key, [path]) for key, path in zip(me.new_keys(len(paths)), paths, strict=True)])
        await asyncio.sleep(me.ttl_s)


@attack("idle")
async def idle(me: Stranger) -> None:
    """Identities that say they train, one path each, and do nothing."""
    paths = list(me.run.topology.paths())
    await claim(me, me.new_keys(IDLERS), [[paths[number % len(paths)]] for number in range(IDLERS)])


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


async def _attack_stages(name: str, swarm: Libp2pSwarm, seed: PeerId, folder: Path) -> None:
    """Attack the newest stage of the run; once another one opens, that one."""
    me: Stranger | None = None
    working: list[asyncio.Task[None]] = []
    try:
        while True:
            with contextlib.suppress(SwarmError):
                run = (await fetch_stages(swarm, seed, expected=None))[-1]
                if me is None or run.id != me.run.id:
                    for task in working:
                        task.cancel()
                    me = _member(run, swarm, folder, before=me)
                    await me.node.watch.refresh()
                    working = [asyncio.create_task(work) for work in (me.look(), ATTACKS[name](me))]
            await asyncio.sleep(1)
            for task in working:
                if task.done():
                    task.result()
    finally:
        if me is not None:
            me.write()


def _member(run: Run, swarm: Libp2pSwarm, folder: Path, *, before: Stranger | None) -> Stranger:
    upload_max = max(map(run.payload_bytes_max, run.topology.modules()))
    store = Store(folder / "store" / run.id[:16])
    node = open_member(run, ScopedSwarm(swarm, run.id), SystemClock(), store, upload_bytes_max=upload_max)
    serve_store(node.swarm, store)
    return Stranger(swarm, node, folder, before=before)


async def live(name: str, address: str, folder: Path) -> None:
    """Join the run at `address`, and attack it until SIGTERM."""
    folder.mkdir(parents=True, exist_ok=True)
    swarm = await open_libp2p(folder / "identity.key", initial_peers=[address], clock=SystemClock())
    try:
        seed = await swarm.connect(address, timeout_s=TIMEOUT_S)
        if name in VOLUNTEERS:
            (folder / KEYS).write_text(json.dumps([swarm.peer]))
            stages = await fetch_stages(swarm, seed, expected=None)
            working = asyncio.ensure_future(take_part(name, swarm, seed, stages, folder))
        else:
            working = asyncio.ensure_future(_attack_stages(name, swarm, seed, folder))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await working
    finally:
        await swarm.close()


def main() -> None:
    """`strangers NAME ADDRESS FOLDER`."""
    name, address, folder = sys.argv[1:]
    asyncio.run(live(name, address, Path(folder)))
