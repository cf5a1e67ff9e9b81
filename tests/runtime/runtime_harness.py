"""A whole run in one process: a tiny model, a seed node, volunteers, and bare peers that speak to them by hand."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from virtual_time import VirtualClock, end, play

from bootstrap.archive import OwnArchive, SeedArchive
from dipaco_p2p.config import (
    PROTOCOL_VERSION,
    InnerConfig,
    LevelConfig,
    LivenessConfig,
    ModelConfig,
    RoundsConfig,
    RunConfig,
)
from dipaco_p2p.core.codec import encode_module
from dipaco_p2p.core.compress import compress, decode_compressed, encode_compressed
from dipaco_p2p.core.inner import InnerLoop
from dipaco_p2p.core.layout import module_layout
from dipaco_p2p.core.model import initial_modules
from dipaco_p2p.core.outer import OuterState
from dipaco_p2p.core.shards import Shard, encode_shard
from dipaco_p2p.protocol.documents import (
    BlobRef,
    Contribution,
    GenesisRef,
    Manifest,
    ModuleVersion,
    Receipt,
    Sealed,
    ShardRef,
    seal,
    unseal,
)
from dipaco_p2p.protocol.grants import sign_grant
from dipaco_p2p.protocol.liveness import Heartbeat, heartbeat_interval_s
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.protocol.versions import genesis_version
from dipaco_p2p.runtime.archive import RemoteArchive
from dipaco_p2p.runtime.history import History
from dipaco_p2p.runtime.join import serve_manifest
from dipaco_p2p.runtime.node import Node
from dipaco_p2p.runtime.owner import ModuleOwner
from dipaco_p2p.runtime.ownership import Ownership
from dipaco_p2p.runtime.presence import Presence
from dipaco_p2p.runtime.recompute import Admitted, Made, make_version
from dipaco_p2p.runtime.run import Run
from dipaco_p2p.runtime.store import Store
from dipaco_p2p.runtime.transfer import Uploads, send, serve_store
from dipaco_p2p.runtime.watch import Watch
from dipaco_p2p.swarm.memory import MemoryNetwork, MemorySwarm
from dipaco_p2p.topology import ModuleId, PathId
from peers.status import Status
from peers.volunteer import Volunteer

SEED_NUMBER = 200
GRACE_S = 30.0

MODEL = ModelConfig(
    vocab_size=258,
    width=16,
    heads=2,
    ffn_width=24,
    context=72,
    levels=(
        LevelConfig(modules=1, blocks=1, embedding=True, head=True),
        LevelConfig(modules=2, blocks=1),
        LevelConfig(modules=2, blocks=1),
    ),
)


# -- a run


def signer(number: int) -> Signer:
    return Signer(bytes([number]) * 32)


def tiny_config(*, rounds: int = 2, steps: int = 2, min_paths: int = 4, **changes: Any) -> RunConfig:
    """Four paths, a few thousand parameters per module."""
    return RunConfig(
        name="tiny",
        pretrain_steps=0,
        model=MODEL,
        inner=InnerConfig(steps=steps, batch=2, warmup_steps=1),
        rounds=RoundsConfig(rounds=rounds, min_paths=min_paths, deadline_s=20.0, grace_s=1.0, **changes),
        liveness=LivenessConfig(heartbeat_ttl_s=6.0, settle_s=0.5),
    )


@functools.cache
def _initial() -> tuple[list[np.ndarray[Any, Any]], bytes]:
    start = initial_modules(MODEL, seed=0)
    loop = InnerLoop(InnerConfig(), 1, MODEL, device="cpu", seed=0)
    return [start[level] for level in range(len(MODEL.levels))], loop.state_bytes()


def make_run(store: Store, config: RunConfig) -> Run:
    """A run whose blobs are in `store`, signed by the seed node; its text is noise with a pattern per path."""
    flats, optimizer = _initial()
    blobs = [store.put(encode_module(flat, module_layout(MODEL, level))) for level, flat in enumerate(flats)]
    generator = np.random.default_rng(1)

    def shards(count: int) -> tuple[ShardRef, ...]:
        refs = []
        for number, path in enumerate(config.topology.paths()):
            tokens = (generator.integers(0, 8, (count + number, MODEL.context)) + 32 * number).astype(np.int32)
            refs.append(ShardRef(path=path, blob=store.put(encode_shard(Shard(tokens=tokens))), sequences=len(tokens)))
        return tuple(refs)

    manifest = Manifest(
        protocol=PROTOCOL_VERSION,
        config=config,
        admission="open",
        tokenizer=store.put(b"{}"),
        router=store.put(b"no router: the shards are made by hand"),
        optimizer=store.put(optimizer),
        shards=shards(6),
        validation=shards(2),
        genesis=tuple(GenesisRef(module=module, blob=blobs[module.level]) for module in config.topology.modules()),
        author=signer(SEED_NUMBER).peer,
    )
    run = Run(seal(signer(SEED_NUMBER), manifest))
    run.check_genesis()
    return run


def node_of(
    run: Run, swarm: MemorySwarm, folder: Path, clock: Any, heartbeat: Heartbeat, *, keeps_everything: bool = False
) -> Node:
    """A peer as the programs build it; `events` of its history are in memory."""
    return Node(
        run=run,
        swarm=swarm,
        store=Store(folder),
        clock=clock,
        watch=Watch(run, swarm, clock),
        presence=Presence(run, swarm, clock, heartbeat),
        history=History(None, clock),
        keeps_everything=keeps_everything,
    )


def with_uploads(node: Node) -> Node:
    """The same peer, taking uploads as a volunteer does."""
    size_max = max(map(node.run.payload_bytes_max, node.run.topology.modules()))
    return replace(node, keep_upload=Uploads(node.swarm, node.store, size_max=size_max).claim)


class TinySeed:
    """The seed node of a tiny run, without its command line: archive, blobs, owner of last resort."""

    def __init__(self, world: World, run: Run) -> None:
        self.swarm = world.network.join(signer(SEED_NUMBER))
        heartbeat = Heartbeat(role="seed", owns=True, doing="serving")
        self.node = node_of(run, self.swarm, world.folder / "seed", world.clock, heartbeat, keeps_everything=True)
        self.archive = SeedArchive(run, self.node.store, self.swarm.signer)
        self.ownership = Ownership(self.node, OwnArchive(self.archive, self.swarm.peer))
        serve_manifest(self.swarm, run.sealed)
        serve_store(self.swarm, self.node.store)
        size_max = 2 * max(map(run.snapshot_bytes_max, run.topology.modules()))
        self.archive.serve(
            self.swarm, Uploads(self.swarm, self.node.store, size_max=size_max), on_deposed=self._on_deposed
        )

    async def run(self) -> None:
        await asyncio.gather(self.node.presence.run(), watch_forever(self.node), self.ownership.run())

    async def _on_deposed(self, module: ModuleId, holder: PeerId) -> None:
        if holder == self.node.peer:
            await self.ownership.drop(module)
            await self.node.presence.resign(module)


class TinyVolunteer:
    """A volunteer of a tiny run, with everything that it said of itself in `events`."""

    def __init__(self, world: World, run: Run, number: int, *, status: Status | None = None) -> None:
        self.number = number
        self.folder = world.folder / f"volunteer-{number}"
        self.swarm = world.network.join(signer(number))
        self.node = with_uploads(node_of(run, self.swarm, self.folder, world.clock, Heartbeat(owns=True)))
        self.events: list[dict[str, Any]] = []
        self.node.history.listen(self.events.append)
        serve_store(self.swarm, self.node.store)
        self.archive = RemoteArchive(self.swarm, self.node.watch)
        self.ownership = Ownership(self.node, self.archive, may_take=lambda: self.volunteer.is_run_open())
        self.status = status or Status()
        self.volunteer = Volunteer(self.node, self.ownership, self.status, device="cpu", folder=self.folder)
        self.task: asyncio.Task[None] | None = None

    @property
    def peer(self) -> PeerId:
        return self.swarm.peer

    def start(self) -> TinyVolunteer:
        self.task = asyncio.create_task(self._run(), name=f"volunteer {self.number}")
        return self

    async def _run(self) -> None:
        await self.node.watch.refresh()
        await self.volunteer.run(grace_s=GRACE_S)

    async def done(self) -> None:
        assert self.task is not None
        await self.task

    def said(self, ev: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["ev"] == ev]


async def watch_forever(node: Node) -> None:
    while True:
        await node.watch.refresh()
        await node.clock.sleep(heartbeat_interval_s(node.run.config.liveness) / 2)


class World:
    """A network with a seed node, and whoever joins it; a context manager that ends all of them."""

    def __init__(self, folder: Path, *, config: RunConfig | None = None, seed: int = 7, **faults: Any) -> None:
        self.folder = folder
        self.clock = VirtualClock()
        self.network = MemoryNetwork(seed, self.clock, **faults)
        self.run = make_run(Store(folder / "seed"), config or tiny_config())
        self.volunteers: list[TinyVolunteer] = []
        self.leaders: list[Leader] = []
        self.seed: TinySeed
        self._seed_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> World:
        self.start_seed()
        await self.seed.node.presence.beat()
        return self

    async def __aexit__(self, *error: object) -> None:
        for volunteer in self.volunteers:
            await self.kill(volunteer)
        for leader in self.leaders:
            await leader.die(self)
        await self.kill_seed()

    def start_seed(self) -> TinySeed:
        """Also after `kill_seed`: it goes on from its disk."""
        self.seed = TinySeed(self, self.run)
        self._seed_task = asyncio.create_task(self.seed.run(), name="seed")
        return self.seed

    async def kill_seed(self) -> None:
        self.network.kill(self.seed.swarm.peer)
        await end(self._seed_task)
        for module in self.seed.ownership.modules:
            await self.seed.ownership.drop(module)

    def join(self, number: int, *, status: Status | None = None) -> TinyVolunteer:
        volunteer = TinyVolunteer(self, self.run, number, status=status)
        self.volunteers.append(volunteer)
        return volunteer.start()

    async def kill(self, volunteer: TinyVolunteer) -> None:
        """As SIGKILL would: nothing that it does from now on reaches anybody."""
        self.network.kill(volunteer.peer)
        await end(volunteer.task)

    def leader(self, number: int) -> Leader:
        self.leaders.append(Leader(self, number))
        return self.leaders[-1]

    def peer(self, number: int) -> Node:
        """A bare node: no volunteer, for tests that speak to the others themselves."""
        return node_of(
            self.run,
            self.network.join(signer(number)),
            self.folder / f"peer-{number}",
            self.clock,
            Heartbeat(owns=False),
        )


# -- contributions made by hand


def contribution_of(
    run: Run, author: Signer, payload: bytes, /, *, module: ModuleId, path: PathId, **changes: Any
) -> Contribution:
    """An honest contribution to version 0, but for `changes`."""
    base = genesis_version(run.manifest, module)
    document = Contribution(
        run=run.id,
        module=module,
        path=path,
        base_version=0,
        base_digest=base.digest,
        payload=BlobRef.of(payload),
        steps=run.config.inner.steps,
        tokens=run.tokens_full,
        loss=5.0,
        author=author.peer,
    )
    return replace(document, **changes)


def gradient_bytes(run: Run, module: ModuleId, *, seed: int = 0, size: float = 1e-3) -> bytes:
    """A compressed outer gradient of random values."""
    values = np.random.default_rng(seed).normal(0, size, run.layout(module).size).astype(np.float32)
    return encode_compressed(compress(values)[0])


def version_of(
    run: Run,
    leader: Signer,
    admitted: list[tuple[Sealed[Contribution], bytes]],
    *,
    term: int,
    after: Made | None = None,
) -> tuple[Sealed[ModuleVersion], Made]:
    """The version that an honest leader makes of `admitted`, after the genesis or what was made before."""
    module = admitted[0][0].document.module
    layout = run.layout(module)
    if after is None:
        parent, state = genesis_version(run.manifest, module), OuterState.fresh(_initial()[0][module.level])
    else:
        parent, state = after.version, after.state
    gradients = [Admitted(sealed, decode_compressed(payload, size=layout.size)) for sealed, payload in admitted]
    grant = sign_grant(signer(SEED_NUMBER), run=run.id, module=module, term=term, leader=leader.peer)
    made = make_version(run, parent, state, gradients, clip_norm=None, term=term, grant=grant, author=leader.peer)
    return seal(leader, made.version), made


class Leader:
    """A peer that leads what it is told to, without training: its rounds close half a second after a contribution."""

    def __init__(self, world: World, number: int) -> None:
        self.swarm = world.network.join(signer(number))
        folder = world.folder / f"leader-{number}"
        self.node = with_uploads(node_of(world.run, self.swarm, folder, world.clock, Heartbeat(owns=True)))
        self.events: list[dict[str, Any]] = []
        self.node.history.listen(self.events.append)
        self.archive = RemoteArchive(self.swarm, self.node.watch)
        self.ownership = Ownership(self.node, self.archive, may_take=lambda: False)
        serve_store(self.swarm, self.node.store)
        self.tasks = [asyncio.create_task(part) for part in (self.node.presence.run(), watch_forever(self.node))]

    @property
    def peer(self) -> PeerId:
        return self.swarm.peer

    def owner(self, module: ModuleId) -> ModuleOwner:
        return self.ownership._owners[module]

    async def lead(self, module: ModuleId) -> ModuleOwner:
        await self.node.watch.refresh()
        await self.ownership.take(module)
        return self.owner(module)

    async def die(self, world: World) -> None:
        world.network.kill(self.peer)
        for task in self.tasks:
            await end(task)
        for module in self.ownership.modules:
            await self.ownership.drop(module)


async def offer(
    node: Node, leader: PeerId, document: Contribution | Sealed[Contribution], payload: bytes
) -> Sealed[Receipt]:
    """Upload and contribute once, as any client may; raises what the leader says."""
    sealed = document if isinstance(document, Sealed) else seal(node.swarm.signer, document)
    await send(node, leader, payload)
    header = {"contribution": sealed.to_dict()}
    reply = await node.swarm.call(leader, "module.contribute", header, timeout_s=20.0)
    return unseal(Receipt, reply.header["receipt"])


def finished_run(folder: Path, *, rounds: int = 2) -> Run:
    """A run that four volunteers completed; the seed node's archive is in `folder`/seed."""
    found: list[Run] = []

    async def scenario() -> None:
        async with World(folder, config=tiny_config(rounds=rounds)) as world:
            for number in (1, 2, 3, 4):
                world.join(number)
            for volunteer in world.volunteers:
                await volunteer.done()
            found.append(world.run)

    play(scenario)
    return found[0]
