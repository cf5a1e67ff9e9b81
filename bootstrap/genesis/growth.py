"""From a grid that has ended by decree to a larger one: the next signed stage.

Each new module begins as a module of the grid before ended, its parent (`Topology.parent`), with its outer state: both
are the parent's own blobs, so anyone can compare digests. Each path begins with fresh optimizer moments, and the text
is routed again, beginning where the parents' text was; new text that was decreed with the growth goes to the paths that
it opens. All of it follows from what is on disk: a coordinator that died in the middle comes to the same again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from dipaco_p2p.config import RunConfig
from dipaco_p2p.core.model.layout import decode_module
from dipaco_p2p.core.model.shards import Shard, decode_shard
from dipaco_p2p.core.model.transformer import path_model
from dipaco_p2p.core.routing.features import document_features
from dipaco_p2p.core.routing.grown import (
    continued,
    grown_router,
    labels_beside,
    opened,
    router_beside,
    top_beside,
)
from dipaco_p2p.core.routing.router import Paths, Router, decode_router
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.protocol.documents import GenesisRef, ModuleVersion, ShardRef
from dipaco_p2p.protocol.manifest import STAGES
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.protocol.versions import genesis_version
from dipaco_p2p.topology import ModuleId, PathId
from dipaco_p2p.use.folder import RunFolder

from ..progress import stage
from ..runfile import RunFile
from ..text.added import joined, texts_of
from ..text.sequences import Sequences
from .prepare import MOMENT_STEPS, Flat, Opening, Start, moments, open_stage
from .routing import ROUTER_FIT_MAX, Features, cut_shards, router_blob, routing_features


def grow(file: RunFile, folder: RunFolder, signer: Signer) -> Run:
    """Make the larger grid that the coordinator has decreed, of the newest stage, which is complete. Raises
    DipacoError."""
    before, old = folder.require()
    assert before.growth is not None, "nobody decreed a growth"
    config = before.manifest.config.grown(before.growth.levels)
    name = STAGES[STAGES.index(before.manifest.stage) + 1]
    tokenizer, texts = texts_of(file, folder, name)
    sequences, fresh = joined(texts), texts[-1] if before.growth.corpus else None
    store = folder.store(name)
    archive = SeedArchive(before, old)
    ended = {module: _end(before, archive, module) for module in before.topology.modules()}
    parents = {module: ended[config.topology.parent(module, before.topology)] for module in config.topology.modules()}
    genesis = tuple(_inherited(store, old, module, parent) for module, parent in parents.items())
    flats = _Flats(before, old, parents)
    start = Start(
        config=config,
        signer=signer,
        tokenizer=tokenizer,
        sequences=sequences,
        flats=(),
        workers=archive.workers_named(),
    )
    tokens = sequences.train.tokens
    vectors = routing_features(config, path_model(config.model, flats.of(config.topology.path(0))), sequences)
    with stage("Routing the sequences"):
        if fresh is None:
            routed = _routed(before, old, tokens)
            chosen = _some(len(tokens), config.seed)
            points = vectors["train"][chosen]
            router = grown_router(config, points, tokens[chosen], routed[chosen], before=before.topology)
            shards = cut_shards(config, store, router, tokens, vectors["train"])
        else:
            router, shards = _beside(config, before, (old, store), sequences, vectors, fresh)
    paths = [config.topology.path(number) for number in _spread(config.topology.path_count)]

    def at(step: int) -> tuple[list[Flat], Shard]:
        path = paths[step % len(paths)]
        data = _blob(store, shards[config.topology.number(path)].blob.digest)
        return flats.of(path), decode_shard(data, vocab_size=config.model.vocab_size, context=config.model.context)

    opening = Opening(
        stage=name,
        origin=before.origin,
        follows=before.id,
        spent=before.manifest.spent + before.rounds,
        router=router_blob(store, router),
        optimizer=moments(config, at),
        shards=shards,
    )
    return open_stage(start, store, opening, genesis=genesis)


def _beside(
    config: RunConfig,
    before: Run,
    stores: tuple[Store, Store],
    sequences: Sequences,
    vectors: Features,
    fresh: Sequences,
) -> tuple[Router, tuple[ShardRef, ...]]:
    """The router and the shards of a grid that grew with `fresh` text, which is the last of the `sequences`: each path
    that goes on keeps its text, and the others share the new one. `stores` are of the stage before and of the new."""
    old, after = before.topology, config.topology
    tokens, points = sequences.train.tokens, vectors["train"]
    known = len(tokens) - len(fresh.train)
    width, parents = config.model.width, _routed(before, stores[0], tokens[:known])
    labels = labels_beside(points[:, :width], parents, before=old, after=after, seed=config.seed)
    chosen = np.concatenate([_some(known, config.seed), known + _some(len(fresh.train), config.seed)])
    router = router_beside(config, points[chosen], tokens[chosen], labels[chosen])
    new = opened(before=old, after=after)
    top = top_beside(router, points, labels, config.routing.overlap, new=new)
    shards = cut_shards(config, stores[1], router, tokens, points, chosen=top)
    held_out = sequences.validation.tokens[: len(sequences.validation) - len(fresh.validation)]
    own = continued(before=old, after=after)[_routed(before, stores[0], held_out)]
    _tell_routed(router.assign(vectors["validation"]), own, new)
    return router, shards


def _some(count: int, seed: int) -> NDArray[np.int64]:
    """Those of so many sequences that a router is fitted on."""
    return np.sort(np.random.default_rng(seed).permutation(count)[:ROUTER_FIT_MAX])


def _tell_routed(found: Paths, own: Paths, new: Paths) -> None:
    """How well the router has learnt it: where it sends the held-out text, and the paths of the old part of it."""
    kept, moved = (own == found[: len(own)]).mean(), np.isin(found[len(own) :], new).mean()
    words = f"{moved:.0%} of the new held-out text to the {len(new)} paths opened for it"
    print(f"the router sends {words}, and {kept:.0%} of the old where it went before", flush=True)


def _spread(count: int) -> Iterator[int]:
    """The paths whose gradients the moments are of: all in turn, or as many as there are steps, evenly spread."""
    steps = min(count, MOMENT_STEPS)
    return (place * count // steps for place in range(steps))


class _Flats:
    """The weights that new paths begin with, read when they are asked for: not all of them fit into memory."""

    def __init__(self, before: Run, old: Store, parents: Mapping[ModuleId, ModuleVersion]) -> None:
        self._before, self._old, self._parents = before, old, parents

    def of(self, path: PathId) -> list[Flat]:
        found = [self._parents[module] for module in path.modules()]
        return [decode_module(_blob(self._old, one.digest), self._before.layout(one.module)) for one in found]


def _end(before: Run, archive: SeedArchive, module: ModuleId) -> ModuleVersion:
    ledger = archive.ledgers[module]
    if ledger.head.version < before.rounds:
        raise IntegrityError(f"{module} is not through its stage: version {ledger.head.version} is the newest here")
    return ledger.at(before.rounds)


def _inherited(store: Store, old: Store, module: ModuleId, parent: ModuleVersion) -> GenesisRef:
    """Version 0 of a new module: its parent's end, copied."""
    assert parent.state is not None, "every version but a genesis has one"
    blob, state = (store.put(_blob(old, ref.digest)) for ref in (parent.snapshot, parent.state))
    return GenesisRef(module=module, blob=blob, state=state)


def _routed(before: Run, store: Store, tokens: NDArray[np.int32]) -> Paths:
    """The path of the grid before that each sequence was on at its end: by its own features and newest shards."""
    config, first = before.config, before.topology.path(0)
    genesis = [genesis_version(before.manifest, module) for module in first.modules()]
    flats = [decode_module(_blob(store, one.digest), before.layout(one.module)) for one in genesis]
    known = before.sharding(before.sharding_at(before.rounds - 1))
    ref = before.manifest.router if known is None else known.document.router
    assert ref is not None, "a grid has a router"
    data = _blob(store, ref.digest)
    router = decode_router(data, path_count=before.topology.path_count, width=config.feature_width)
    frozen = path_model(config.model, flats)
    return router.assign(document_features(frozen, tokens, has_counts=config.routing.has_counts))


def _blob(store: Store, digest: str) -> bytes:
    data = store.get(digest)
    if data is None:
        raise IntegrityError(f"blob {digest[:8]} is missing in `{store.folder}`, and the next stage begins with it")
    return data
