"""Measuring a judged round again: any peer can, from the versions that the chains name and the blobs of the manifest.

What is measured is what the coordinator's evaluator measures (bootstrap/archives/evaluator.py), with the same functions
of the core: the held-out sequences that the router of the judgement's sharding gives to a path, among the paths that
were trained until then. Everything comes through signatures and digests; the figure itself is nobody's word but ours.

Routing is among trained paths only. A path whose volunteers all failed has modules that others trained, or private ones
that are still what the run began with; either way nobody has seen its text, and its documents are better read by their
next best path (docs/lost_work.md has the figures). A path counts as trained as soon as a version counts a contribution
of it; while no path has one, all are equally good.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..config import RoundsConfig
from ..core.model.layout import decode_module
from ..core.model.shards import HeldOut, decode_held_out
from ..core.model.transformer import PathModel, load_modules
from ..core.routing.evaluate import Evaluation, counted_tokens, losses
from ..core.routing.features import document_features
from ..core.routing.router import Router, best, decode_router
from ..errors import IntegrityError, Interrupted
from ..protocol.documents import BlobRef, ModuleVersion, Sealed, seal
from ..protocol.judgement import IN_ALL_MAX, Check, Judgement
from ..protocol.signing import PeerId
from ..protocol.versions import genesis_version
from ..topology import ModuleId, PathId, Topology
from .calls import GetChecks, GiveCheck
from .items import read_items
from .node import Reader, ask, fetch
from .reading import extend_chain, holders_of, meet_trainers
from .shardings import learn_shardings

log = logging.getLogger(__name__)

BATCH = 32
"""Sequences between two looks whether we are to stop."""

Chain = list[Sealed[ModuleVersion]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One path at one round."""

    path: PathId
    version: int
    sharding: int
    modules: tuple[str, ...]
    """Digests."""
    evaluation: Evaluation | None
    """None where nothing is routed to it."""


class Measuring:
    """What one peer needs to measure the paths of one stage; what it has fetched for that stays in memory."""

    def __init__(self, node: Reader, *, device: str = "cpu", is_stopping: Callable[[], bool] = lambda: False) -> None:
        """`node` need not have said anything to the swarm, and need not be a volunteer; `is_stopping` is asked between
        batches: nobody waits for what is measured then."""
        self._node = node
        self._device = device
        self._is_stopping = is_stopping
        self._chains: dict[ModuleId, Chain] = {}
        self._part: HeldOut | None = None
        self._features: NDArray[np.float32] | None = None
        self._routers: dict[int, Router] = {}

    async def measure_again(self, judgement: Judgement, path: PathId) -> Measured:
        """`path` at the judgement's round, from the versions and by the sharding that it names. Raises as
        `measure`, and IntegrityError if the chains have other versions."""
        version, digests = judgement.version, {found.module: found.digest for found in judgement.modules}
        made = [await self._version(module, version) for module in path.modules()]
        for one in made:
            if digests.get(one.module, one.digest) != one.digest:
                raise IntegrityError(
                    f"round {version} was judged with another version of {one.module} than its chain's"
                )
        usable = await self._trained(version)
        return await self.measure(path, version, judgement.sharding, [one.snapshot for one in made], usable=usable)

    async def measure(
        self, path: PathId, version: int, sharding: int, snapshots: Sequence[BlobRef], *, usable: Collection[PathId]
    ) -> Measured:
        """`path`, composed of `snapshots`, at a round, on what the router of a sharding gives it among the `usable`
        paths. Raises IntegrityError if the sharding was not for that round, Interrupted when it is not wanted any more,
        and DipacoError for what is not to be had."""
        run, modules = self._node.run, path.modules()
        await learn_shardings(self._node)
        self._require_sharding(sharding, version)
        chosen = await self._assigned(sharding, usable) == run.topology.number(path)
        found: Evaluation | None = None
        if chosen.any():
            pairs = zip(modules, snapshots, strict=True)
            blobs = [await self._snapshot(module, version, ref) for module, ref in pairs]
            tokens = (await self._held_out()).tokens[chosen]
            end = threading.Event()
            try:
                found = await asyncio.to_thread(self._evaluate, path, blobs, tokens, end=end)
            finally:
                end.set()  # else the thread would go on when nobody waits for it any more
        names = tuple(ref.digest for ref in snapshots)
        return Measured(path=path, version=version, sharding=sharding, modules=names, evaluation=found)

    async def trainers(self, path: PathId, version: int) -> set[PeerId]:
        """Whose work on `path` the versions of its modules count, up to a round."""
        chains = [await self._chain(module, version) for module in path.modules()]
        shares = (share for chain in chains for sealed in chain for share in sealed.document.shares)
        return {share.peer for share in shares if share.path == path}

    # -- what it is made from

    def _require_sharding(self, number: int, version: int) -> None:
        """It need not be the newest: that may have been published after the round was judged."""
        known = self._node.run.sharding(number)
        if number and (known is None or known.document.from_round > max(version - 1, 0)):
            raise IntegrityError(f"round {version} was judged by sharding {number}, which was not for it")

    async def _chain(self, module: ModuleId, version: int) -> Chain:
        """Up to `version`; what is known is not asked for again."""
        known = self._chains.get(module, [])
        if len(known) < version:
            node = self._node
            known = self._chains[module] = await extend_chain(node, module, known)
        if len(known) < version:
            raise IntegrityError(f"{module} has no version {version}: its newest is {len(known)}")
        return known[:version]

    async def _version(self, module: ModuleId, version: int) -> ModuleVersion:
        if not version:
            return genesis_version(self._node.run.manifest, module)
        return (await self._chain(module, version))[-1].document

    async def _trained(self, version: int) -> list[PathId]:
        """The paths that were trained up to a round."""
        run = self._node.run
        chains = [await self._chain(module, version) for module in witnesses(run.topology)]
        return trained_paths(run.topology, (sealed.document for chain in chains for sealed in chain))

    async def _assigned(self, sharding: int, usable: Collection[PathId]) -> NDArray[np.int64]:
        """The path number of each held-out sequence, as the coordinator's evaluator has it."""
        run, part = self._node.run, await self._held_out()
        if run.manifest.router is None:
            return np.zeros(len(part), dtype=np.int64)
        router, vectors = await self._router(sharding), await self._vectors(part)
        return assign(router, vectors, [run.topology.number(path) for path in usable])

    async def _router(self, sharding: int) -> Router:
        if sharding not in self._routers:
            run = self._node.run
            known = run.sharding(sharding)
            ref = known.document.router if known else run.manifest.router
            assert ref is not None
            data, width = await self._blob(ref), run.config.feature_width
            self._routers[sharding] = decode_router(data, path_count=run.config.model.path_count, width=width)
        return self._routers[sharding]

    async def _vectors(self, part: HeldOut) -> NDArray[np.float32]:
        """What sequences are routed by: outputs of the frozen model, version 0 of every level, and perhaps counts."""
        if self._features is None:
            run = self._node.run
            path = run.topology.path(0)
            blobs = [await self._blob(genesis_version(run.manifest, module).snapshot) for module in path.modules()]

            def work() -> NDArray[np.float32]:
                has_counts = run.config.routing.has_counts
                # Not on a device: a document between two paths then goes to the same one everywhere.
                return document_features(self._model(path, blobs, device="cpu"), part.tokens, has_counts=has_counts)

            self._features = await asyncio.to_thread(work)
        return self._features

    async def _held_out(self) -> HeldOut:
        if self._part is None:
            run, model = self._node.run, self._node.run.config.model
            data = await self._blob(run.manifest.validation)
            self._part = decode_held_out(data, vocab_size=model.vocab_size, context=model.context)
        return self._part

    async def _snapshot(self, module: ModuleId, version: int, ref: BlobRef) -> bytes:
        """Of the archives last: a light one may have no parameters."""
        if self._node.store.size(ref.digest) is None:
            await meet_trainers(self._node, module)
        return await fetch(self._node, ref, holders=holders_of(self._node, module, version))

    async def _blob(self, ref: BlobRef) -> bytes:
        """What the manifest and the shardings name: seed nodes have it."""
        likely = [self._node.run.manifest.author, *self._node.watch.seeds()]
        return await fetch(self._node, ref, holders=list(dict.fromkeys(likely)))

    def _evaluate(
        self, path: PathId, blobs: Sequence[bytes], tokens: NDArray[np.int32], *, end: threading.Event
    ) -> Evaluation:
        model, nats = self._model(path, blobs, device=self._device), list[float]()
        for first in range(0, len(tokens), BATCH):
            if end.is_set() or self._is_stopping():
                raise Interrupted("the measurement is not wanted any more")
            nats += losses(model, tokens[first : first + BATCH], batch=BATCH).tolist()
        return Evaluation(
            nats_total=math.fsum(nats),
            tokens=len(tokens) * counted_tokens(self._node.run.config.model.context),
        )

    def _model(self, path: PathId, blobs: Sequence[bytes], *, device: str) -> PathModel:
        run = self._node.run
        model = PathModel(run.config.model).to(device)
        flats = [decode_module(data, run.layout(module)) for data, module in zip(blobs, path.modules(), strict=True)]
        load_modules(model, flats)
        return model


def measuring_s(rounds: RoundsConfig) -> float:
    """How long a volunteer may take for one path that the coordinator wants measured."""
    return rounds.deadline_s / 4


# -- what was measured, said and asked for


def check_of(node: Reader, measured: Measured) -> Sealed[Check] | None:
    """What this peer signs of a measurement; None where there is no figure, or none that a document can say."""
    found = measured.evaluation
    if found is None or not math.isfinite(found.nats_total):
        return None
    check = Check(
        run=node.run.id,
        version=measured.version,
        path=measured.path,
        modules=measured.modules,
        sharding=measured.sharding,
        validation=node.run.manifest.validation.digest,
        nats=found.nats_total,
        tokens=found.tokens,
        at_s=node.clock.now_s(),
        author=node.peer,
    )
    return seal(node.swarm.signer, check)


async def send_check(node: Reader, sealed: Sealed[Check], seed: PeerId) -> None:
    """Give a check to a seed node; raises as `ask`: Refused if it does not want it."""
    await ask(node, seed, GiveCheck(check=sealed))


async def read_checks(node: Reader, seed: PeerId, *, begin: int) -> tuple[list[Sealed[Check]], int]:
    """The checks that a seed node has taken from number `begin` on, and the number to go on with. Raises as `ask`, and
    IntegrityError."""
    found: list[Sealed[Check]] = []
    while len(found) < IN_ALL_MAX:
        reply = await ask(node, seed, GetChecks(from_=begin))
        page, following = await read_items(Check, reply), reply.next
        if not page or following is None or following <= begin:
            break
        found, begin = found + page, following
    return found, begin


def witnesses(topology: Topology) -> list[ModuleId]:
    """The modules whose chains say it of all paths: those of the narrowest level, since a path has one of each."""
    narrowest = topology.widths.index(min(topology.widths))
    return [module for module in topology.modules() if module.level == narrowest]


def trained_paths(topology: Topology, versions: Iterable[ModuleVersion]) -> list[PathId]:
    """The paths that these versions of the witnesses count; all if they count none."""
    counted = {share.path for version in versions for share in version.shares}
    return [path for path in topology.paths() if path in counted] or list(topology.paths())


def assign(router: Router, vectors: NDArray[np.float32], usable: Iterable[int]) -> NDArray[np.int64]:
    """The path number (n,) of each of `vectors` (n, D): the best by score of those in `usable`."""
    scores = router.scores(vectors)
    barred = np.ones(scores.shape[1], dtype=bool)
    barred[list(usable)] = False
    scores[:, barred] = -np.inf
    return best(scores)
