"""From a run file to a signed run: corpus, tokenizer, sequences, warm-up, router, shards, genesis, manifest.

Read `prepare` from top to bottom: it is the whole story in its order. The tokenizer and the warm-up are kept on disk
as soon as they are made, so that an interrupted preparation goes on; a prepared folder is opened, never redone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dipaco_p2p.canonical import canonical_bytes, digest
from dipaco_p2p.config import PREFIX_TOKENS, PROTOCOL_VERSION, RunConfig
from dipaco_p2p.core.codec import encode_module
from dipaco_p2p.core.features import features
from dipaco_p2p.core.inner import InnerLoop, StepReport
from dipaco_p2p.core.layout import module_layout
from dipaco_p2p.core.model import PathModel, initial_modules, load_modules
from dipaco_p2p.core.router import Router, encode_router, fit_kmeans
from dipaco_p2p.core.shards import Shard, cut, encode_shard, split_by_document
from dipaco_p2p.errors import ConfigError, CorpusError
from dipaco_p2p.protocol.documents import BlobRef, GenesisRef, Manifest, ShardRef, seal
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.runtime.run import Run, open_run
from dipaco_p2p.runtime.store import Store, write_atomically

from .corpus import load_corpus, require_documents
from .documents import Document
from .prepare_text import tokenise
from .progress import stage
from .runfile import RunFile
from .tokenizer import Tokenizer, train_tokenizer

MANIFEST = "manifest"
ROUTER_FIT_MAX = 20_000
"""Sequences that the router is fitted on; more changes its centroids by less than another seed does."""

Tokens = NDArray[np.int32]
Flat = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """The corpus as sequences of `context` tokens, split by document."""

    train: Tokens
    validation: Tokens
    router: Tokens


def prepare(file: RunFile, folder: Path, store: Store, signer: Signer) -> Run:
    """Make the run that `file` describes, or open it if `folder` holds it already. Raises DipacoError."""
    found = _open_prepared(file.run, folder, store)
    if found is not None:
        return found
    with stage("Reading the corpus"):
        documents = load_corpus(file.corpus, seed=file.run.seed)
    require_documents(documents, max(16, 4 * file.run.topology.path_count))
    tokenizer_data = _tokenizer(file.run, documents, folder)
    sequences = _sequences(file, documents, Tokenizer(tokenizer_data))
    flats, optimizer = _pretrained(file.run, sequences.train, folder, digest(tokenizer_data))
    router, assigned = _routed(file.run, flats, sequences)
    manifest = _manifest(file.run, store, signer, tokenizer_data, router, flats, optimizer, sequences, assigned)
    sealed = seal(signer, manifest)
    store.write_document(MANIFEST, canonical_bytes(sealed.to_dict()))
    return Run(sealed)


def open_prepared(store: Store) -> Run | None:
    """The run in a prepared folder, or None if there is none."""
    data = store.read_document(MANIFEST)
    return None if data is None else open_run(json.loads(data))


def _open_prepared(config: RunConfig, folder: Path, store: Store) -> Run | None:
    run = open_prepared(store)
    if run is not None and run.config != config:
        raise ConfigError(
            f"{folder} holds {run.name}, which was made from another run file",
            hint="choose another --dir, or take the run file back to what it was",
        )
    return run


def _tokenizer(config: RunConfig, documents: list[Document], folder: Path) -> bytes:
    path = folder / "tokenizer.json"
    if path.exists():
        return path.read_bytes()
    with stage("Training the tokenizer", total=sum(document.size_bytes for document in documents)) as advance:
        texts = (document.text for document in documents)
        data = train_tokenizer(texts, vocab_size=config.model.vocab_size, on_progress=advance)
    write_atomically(path, data)
    return data


def _sequences(file: RunFile, documents: list[Document], tokenizer: Tokenizer) -> Sequences:
    with stage("Tokenising", total=len(documents)) as advance:
        arrays = tokenise(documents, tokenizer, on_progress=advance)
    pieces = [cut(array, context=file.run.model.context) for array in arrays]
    pieces = [piece for piece in pieces if len(piece)]
    split = split_by_document(
        len(pieces), seed=file.run.seed, validation=file.corpus.validation_share, router=file.corpus.router_share
    )
    parts = {name: [pieces[i] for i in getattr(split, name)] for name in ("train", "validation", "router")}
    if not all(parts.values()):
        raise CorpusError(
            f"only {len(pieces)} documents have {file.run.model.context} tokens or more",
            hint="give the run more text, or a smaller `context`",
        )
    return Sequences(**{name: np.concatenate(rows) for name, rows in parts.items()})


def _pretrained(config: RunConfig, train: Tokens, folder: Path, key: str) -> tuple[list[Flat], bytes]:
    """The one-path model after the warm-up, one flat vector per level, and AdamW's state."""
    start = initial_modules(config.model, seed=config.seed)
    flats = [start[level] for level in range(len(config.model.levels))]
    loop = InnerLoop(config.inner, config.total_steps, config.model, device="cpu", seed=config.seed)
    if config.pretrain_steps:
        with stage("Warming up the one-path model", total=config.pretrain_steps) as advance:

            def on_step(report: StepReport) -> bool:
                advance(report.step + 1)
                return True

            result = loop.run(flats, Shard(tokens=train), first_step=0, steps=config.pretrain_steps, on_step=on_step)
        flats = result.flats
    return flats, loop.state_bytes()


def _routed(config: RunConfig, flats: list[Flat], sequences: Sequences) -> tuple[Router, dict[str, NDArray[np.int64]]]:
    """A router fitted on the frozen model's features, and the path number of every sequence."""
    model = PathModel(config.model)
    load_modules(model, flats)
    with stage("Routing the sequences"):
        found = {name: features(model, getattr(sequences, name)[:, :PREFIX_TOKENS]) for name in ("train", "validation")}
        chosen = np.random.default_rng(config.seed).permutation(len(found["train"]))[:ROUTER_FIT_MAX]
        router = fit_kmeans(found["train"][np.sort(chosen)], path_count=config.topology.path_count, seed=config.seed)
    return router, {name: router.assign(vectors) for name, vectors in found.items()}


def _manifest(
    config: RunConfig,
    store: Store,
    signer: Signer,
    tokenizer: bytes,
    router: Router,
    flats: list[Flat],
    optimizer: bytes,
    sequences: Sequences,
    assigned: dict[str, NDArray[np.int64]],
) -> Manifest:
    blobs = [store.put(encode_module(flat, module_layout(config.model, i))) for i, flat in enumerate(flats)]
    return Manifest(
        protocol=PROTOCOL_VERSION,
        config=config,
        admission="open",
        tokenizer=store.put(tokenizer),
        router=store.put(encode_router(router)),
        optimizer=store.put(optimizer),
        shards=_shards(config, store, sequences.train, assigned["train"]),
        validation=_shards(config, store, sequences.validation, assigned["validation"]),
        genesis=tuple(GenesisRef(module=module, blob=blobs[module.level]) for module in config.topology.modules()),
        author=signer.peer,
    )


def _shards(config: RunConfig, store: Store, tokens: Tokens, numbers: NDArray[np.int64]) -> tuple[ShardRef, ...]:
    """One shard per path that got anything."""
    refs = []
    for number, path in enumerate(config.topology.paths()):
        rows = tokens[numbers == number]
        if len(rows):
            blob: BlobRef = store.put(encode_shard(Shard(tokens=rows)))
            refs.append(ShardRef(path=path, blob=blob, sequences=len(rows)))
    return tuple(refs)
