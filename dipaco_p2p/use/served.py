"""A run as it is read for use: one path of its newest modules, and what routes to it. Never the whole model.

    Place         where a run is: a coordinator's folder, or a live swarm; asked again, it says what is newest
    ServedRun     the run at one moment: tokenizer, routers, the frozen model that routes, paths
    Source        where its blobs and chains come from

Of a live swarm the reader is a client: it listens nowhere, and claims and says nothing. The chain of a module comes
from its leader, else from a seed node's archive; blobs come from whoever should hold them. Nothing here writes into a
run, and everything is checked: chains against the manifest, bytes against their digests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..clock import Clock
from ..core.model.layout import decode_module
from ..core.model.transformer import PathModel, path_model
from ..core.routing.router import Router, decode_router
from ..errors import ConfigError, IntegrityError, SwarmError, Unreachable, WrongRun
from ..node.calls import GetServing
from ..node.entry import is_entry
from ..node.ledger import DAMAGED_HINT, Ledger
from ..node.measuring import Chain, trained_paths, witnesses
from ..node.node import Reader, ask, fetch_in_time, open_reader
from ..node.reading import extend_chain, open_connection
from ..node.run import Run
from ..node.shardings import learn_shardings
from ..node.stages import fetch_stages
from ..node.store import Store
from ..protocol.documents import BlobRef, ModuleVersion, Sharding
from ..protocol.signing import PeerId
from ..protocol.versions import genesis_version
from ..swarm.api import Swarm
from ..swarm.stage_scope import ScopedSwarm
from ..topology import ModuleId, PathId
from .best_rounds import Best, read_evaluations, read_serving, serving_header
from .folder import RunFolder
from .tokenizer import Tokenizer

Flat = NDArray[np.float32]

EVALUATIONS = "evaluations.jsonl"
TOKEN_ROUTER_HINT = "leave --every out: each prompt is then routed once"
NEWEST_HINT = "leave --version and --best out to take the newest of each module"


class Source(Protocol):
    """Where a run is read from."""

    async def blob(self, ref: BlobRef) -> bytes:
        """The bytes, checked against their digest; raises IntegrityError or SwarmError."""

    async def chain(self, module: ModuleId) -> list[ModuleVersion]:
        """All versions from 1 on, checked to follow the genesis; raises IntegrityError or SwarmError."""

    async def best(self) -> dict[PathId, Best]:
        """What each path is served with; empty before a round was judged. Raises IntegrityError or SwarmError."""

    def evaluations(self) -> list[dict[str, Any]]:
        """What the coordinator's evaluator wrote of its rounds; empty where that is not known."""


class ServedRun:
    """A run to be used; `source` is asked for no more than what is asked for here."""

    def __init__(self, run: Run, source: Source) -> None:
        self.run = run
        self._source = source
        self._best: dict[PathId, Best] = {}

    async def tokenizer(self) -> Tokenizer:
        """The run's tokenizer; raises IntegrityError."""
        return Tokenizer(await self.tokenizer_bytes())

    async def tokenizer_bytes(self) -> bytes:
        return await self._source.blob(self.run.manifest.tokenizer)

    async def router(self, *, version: int | None = None) -> Router:
        """Routes a prompt by its first 32 tokens; raises IntegrityError, also for a router of another run."""
        ref = self.router_ref(version=version)
        assert ref is not None, "a run of one path routes nothing"
        return await self._router(ref, width=self.run.config.feature_width)

    async def token_router(self, *, version: int | None = None) -> Router:
        """Routes a text at any token; raises ConfigError where the run has none, and as `router`."""
        ref = self.token_router_ref(version=version)
        if ref is None:
            message = f"{self.run.name} has no router that can be asked inside a text"
            raise ConfigError(message, hint=TOKEN_ROUTER_HINT)
        return await self._router(ref, width=2 * self.run.config.model.width)

    def router_ref(self, *, version: int | None = None) -> BlobRef | None:
        """The router that holds at `version`, or the newest; None for a run of one path."""
        sharding = self._sharding(version)
        return sharding.router if sharding else self.run.manifest.router

    def token_router_ref(self, *, version: int | None = None) -> BlobRef | None:
        """As `router_ref`; None as long as no sharding brought one."""
        sharding = self._sharding(version)
        return sharding.token_router if sharding else None

    async def usable(self, *, version: int | None = None) -> list[int]:
        """The numbers of the paths that were trained up to `version`, or at all: what to route among."""
        topology = self.run.topology
        chains = [await self._source.chain(module) for module in witnesses(topology)]
        found = trained_paths(topology, (made for chain in chains for made in chain[:version]))
        return [topology.number(path) for path in found]

    async def feature_model(self) -> PathModel:
        """The frozen model whose outputs routers look at: version 0 of the first path."""
        return path_model(self.run.config.model, [await self._flat(version) for version in self.feature_versions()])

    def feature_versions(self) -> tuple[ModuleVersion, ...]:
        """Version 0 of each of its modules."""
        return tuple(genesis_version(self.run.manifest, module) for module in self.run.topology.path(0).modules())

    def path(self, text: str) -> PathId:
        """The path that a user names; raises ConfigError."""
        path = PathId.parse(text)
        if path not in self.run.topology:
            last = self.run.topology.path(self.run.topology.path_count - 1)
            hint = f"its grid is {self.run.topology}: {self.run.topology.path(0)} to {last}"
            if self.run.manifest.router is None:
                hint = f"it is still in its warm-up, which has the one path {last}"
            raise ConfigError(f"{self.run.name} has no path {path}", hint=hint)
        return path

    async def best(self, path: PathId) -> Best:
        """What `path` should be served with, asked for once. Raises ConfigError before a round was judged."""
        self._best = self._best or await self._source.best()
        if not self._best:
            raise ConfigError(f"no round of {self.run.name} has been judged yet", hint=f"wait, or {NEWEST_HINT}")
        return self._best[path]

    async def path_versions(self, path: PathId, *, version: int | None = None) -> tuple[ModuleVersion, ...]:
        """Of each module of `path` its `version`, or its newest. Raises ConfigError for one that is not there yet."""
        return tuple([await self.version(module, version) for module in path.modules()])

    async def flats(self, versions: tuple[ModuleVersion, ...]) -> list[Flat]:
        """The flat vectors of these versions, one per level; only these are read. Raises IntegrityError."""
        return [await self._flat(version) for version in versions]

    def evaluations(self) -> list[dict[str, Any]]:
        """As `Source.evaluations`."""
        return self._source.evaluations()

    async def blob(self, ref: BlobRef) -> bytes:
        """As `Source.blob`."""
        return await self._source.blob(ref)

    async def version(self, module: ModuleId, version: int | None = None) -> ModuleVersion:
        """A version of a module, or its newest; raises as `path_versions`."""
        genesis = genesis_version(self.run.manifest, module)
        if version == 0:
            return genesis
        chain = [genesis, *await self._source.chain(module)]
        if version is not None and version >= len(chain):
            message = f"{module} has no version {version} yet: its newest is {chain[-1].version}"
            raise ConfigError(message, hint=NEWEST_HINT)
        return chain[-1 if version is None else version]

    async def _flat(self, version: ModuleVersion) -> Flat:
        return decode_module(await self._source.blob(version.snapshot), self.run.layout(version.module))

    async def _router(self, ref: BlobRef, *, width: int) -> Router:
        data = await self._source.blob(ref)
        return decode_router(data, path_count=self.run.topology.path_count, width=width)

    def _sharding(self, version: int | None) -> Sharding | None:
        """The sharding that holds at `version`; without one the newest, whose routers fit the newest modules best."""
        at = self.run.rounds if version is None else version
        sealed = self.run.sharding(self.run.sharding_at(at))
        return sealed.document if sealed else None


def check_choice(*, version: int | None, best: bool) -> None:
    """Raise ConfigError if the versions to take are named in two ways."""
    if best and version is not None:
        message = f"`--best` with `--version {version}`: each path has a best round of its own"
        raise ConfigError(message, hint="leave one of them out")


@asynccontextmanager
async def open_served(source: str, *, expected: str | None = None) -> AsyncIterator[ServedRun]:
    """The run at `source` as it is now; see `open_place`."""
    async with open_place(source, expected=expected) as place:
        yield await place.newest()


class Place(Protocol):
    """Where a run is found again."""

    async def newest(self) -> ServedRun:
        """Its newest stage as it is now. Raises WrongRun, IntegrityError, SwarmError."""


@asynccontextmanager
async def open_place(source: str, *, expected: str | None = None) -> AsyncIterator[Place]:
    """The folder of a coordinator, or what `dipaco-peer join` takes, for a live swarm, under an identity that is
    forgotten afterwards.

    `expected` is the start of the run's id. Raises ConfigError, and as joining does.
    """
    if is_entry(source):
        async with open_connection(source, expected=expected) as found:
            yield SwarmPlace(found.swarm, found.host, found.clock, folder=found.folder, expected=found.run)
        return
    folder = RunFolder(Path(source), is_read_only=True)
    if not folder.names:
        hint = "give the folder that `start --dir` was given, a ticket, or an address like /ip4/.../tcp/.../p2p/..."
        raise ConfigError(f"`{source}` holds no run", hint=hint)
    yield FolderPlace(folder, expected=expected)


def open_folder(folder: RunFolder, *, expected: str | None = None) -> ServedRun:
    """The newest stage of the run in a coordinator's folder, where the coordinator may be at work."""
    return FolderPlace(folder, expected=expected).open()


class FolderPlace:
    """A coordinator's folder; its stages and versions come while it is read."""

    def __init__(self, folder: RunFolder, *, expected: str | None = None) -> None:
        self._folder = folder
        self._expected = (expected or "").removeprefix("run:")
        self._known: dict[tuple[Path, ModuleId], _Read] = {}

    async def newest(self) -> ServedRun:
        return self.open()

    def open(self) -> ServedRun:
        """As `newest`."""
        run, store = self._folder.require()
        if not any(name.startswith(self._expected) for name in (run.id, run.origin)):
            message = f"`{self._folder.root}` holds {run.name}, not run:{self._expected[:8]}"
            raise WrongRun(message, hint="leave --run out to take it")
        return ServedRun(run, _Folder(run, store, self._known))


class _Read(NamedTuple):
    """A chain, and what told it apart on the disk."""

    mark: tuple[str, int]
    """Name of the newest document, and when it was written (ns)."""
    versions: list[ModuleVersion]


class _Folder:
    """A coordinator's folder as a source."""

    def __init__(self, run: Run, store: Store, known: dict[tuple[Path, ModuleId], _Read]) -> None:
        """`known` chains are read again only if they have changed on the disk."""
        self._run = run
        self._store = store
        self._known = known
        self._chains: dict[ModuleId, list[ModuleVersion]] = {}

    async def blob(self, ref: BlobRef) -> bytes:
        data = await asyncio.to_thread(self._store.get, ref.digest)
        if data is None:
            if self._store.documents("thinned-"):
                message = f"`{self._store.folder}` keeps the parameters of some versions alone, as its [archive] says"
                raise ConfigError(message, hint=f"take another one: {NEWEST_HINT}")
            raise IntegrityError(f"blob {ref.digest[:8]} is missing in `{self._store.folder}`", hint=DAMAGED_HINT)
        return data

    async def chain(self, module: ModuleId) -> list[ModuleVersion]:
        if module not in self._chains:
            self._chains[module] = await asyncio.to_thread(self._read, module)
        return self._chains[module]

    def _read(self, module: ModuleId) -> list[ModuleVersion]:
        key, mark = (self._store.folder, module), self._mark(module)
        if key not in self._known or self._known[key].mark != mark:
            versions = [sealed.document for sealed in Ledger(self._run, self._store, module).versions]
            self._known[key] = _Read(mark, versions)
        return self._known[key].versions

    def _mark(self, module: ModuleId) -> tuple[str, int]:
        names = self._store.documents(f"version-{module}-")
        return (names[-1], self._store.written_ns(names[-1])) if names else ("", 0)

    async def best(self) -> dict[PathId, Best]:
        return read_serving(serving_header(self.evaluations()), self._run)

    def evaluations(self) -> list[dict[str, Any]]:
        return read_evaluations(self._store.folder / EVALUATIONS)


log = logging.getLogger(__name__)


async def read_swarm(swarm: Swarm, host: PeerId, clock: Clock, *, folder: Path, expected: str | None) -> ServedRun:
    """The newest stage of the run that `host` names; what is fetched is kept in `folder`."""
    return await SwarmPlace(swarm, host, clock, folder=folder, expected=expected).newest()


class SwarmPlace:
    """The run that `host` names, as its peers have it; what is fetched is kept in `folder`."""

    def __init__(self, swarm: Swarm, host: PeerId, clock: Clock, *, folder: Path, expected: str | None) -> None:
        self._swarm, self._host, self._clock, self._folder, self._expected = swarm, host, clock, folder, expected
        self._node: Reader | None = None
        self._known: dict[ModuleId, Chain] = {}

    async def newest(self) -> ServedRun:
        """Once it is known, also while `host` is gone: others have the versions. Where nobody is heard of, the stage
        may have ended while we were away."""
        if self._node is None or not self._node.run.is_last_stage or not self._node.watch.heartbeats:
            try:
                run = (await fetch_stages(self._swarm, self._host, expected=self._expected))[-1]
                if self._node is None or self._node.run.id != run.id:
                    # A store of its own: each stage has documents of the same names.
                    scoped, store = ScopedSwarm(self._swarm, run.id), Store(self._folder / run.id[:16])
                    self._node, self._known = open_reader(run, scoped, self._clock, store), {}
            except SwarmError:
                if self._node is None:
                    raise
        assert self._node is not None
        await self._node.watch.read_peers()
        await learn_shardings(self._node)
        return ServedRun(self._node.run, LiveSwarm(self._node, host=self._host, known=self._known))


class LiveSwarm:
    """The peers of a run as a source; `host` is the one whose address was given."""

    def __init__(self, node: Reader, *, host: PeerId, known: dict[ModuleId, Chain]) -> None:
        """What is `known` of a chain is not asked for again."""
        self._node = node
        self._host = host
        self._known = known
        self._chains: dict[ModuleId, list[ModuleVersion]] = {}
        self._authors: dict[str, PeerId] = {}
        """Digest of a snapshot to who published it."""

    async def blob(self, ref: BlobRef) -> bytes:
        return await fetch_in_time(self._node, ref, holders=self._holders(ref), keep=True)

    async def chain(self, module: ModuleId) -> list[ModuleVersion]:
        """Asked for once: whatever is published later, a text is written with the versions that it began with."""
        if module not in self._chains:
            before = self._known.get(module, [])
            found = self._known[module] = await extend_chain(self._node, module, before)
            if before and found[-1:] != before[-1:]:  # the disk is the user's: only the newest of each stays
                self._node.store.drop(before[-1].document.digest)
            self._chains[module] = [sealed.document for sealed in found]
            self._authors |= {version.digest: version.author for version in self._chains[module]}
        return self._chains[module]

    async def best(self) -> dict[PathId, Best]:
        """Only the coordinator is asked: it judges the rounds, and nothing but the connection signs its answer."""
        node, author = self._node, self._node.run.manifest.author
        try:
            reply = await ask(node, author, GetServing())
        except SwarmError as error:
            log.info("%s of %s gave nothing: %s", GetServing.METHOD, author, error)
            message = "the coordinator, which judges the rounds, does not answer"
            raise Unreachable(message, hint=NEWEST_HINT) from None
        return read_serving({"rounds": reply.rounds, "losses": reply.losses}, node.run)

    def evaluations(self) -> list[dict[str, Any]]:
        return []

    def _holders(self, ref: BlobRef) -> list[PeerId]:
        """Who may have it: seed nodes keep everything, a snapshot's author and its module's leader the newest."""
        author = self._authors.get(ref.digest)
        leaders = [self._node.watch.leader(module) for module in self._chains]
        likely = [*self._node.watch.seeds(), author, *leaders, self._host]
        return list(dict.fromkeys(peer for peer in likely if peer is not None))
