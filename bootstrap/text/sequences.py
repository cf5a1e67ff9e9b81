"""The corpus as sequences of `context` tokens, split by document, and kept on disk until the run is over.

The fork after the warm-up and every re-sharding go back to the same sequences, also after a restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dipaco_p2p.canonical import canonical_bytes, digest
from dipaco_p2p.config import ModelConfig
from dipaco_p2p.core.model.shards import HeldOut, check_tokens, cut, split_by_document
from dipaco_p2p.core.tensor_file import decode, encode
from dipaco_p2p.errors import CorpusError, IntegrityError
from dipaco_p2p.program.files import write_atomically
from dipaco_p2p.strict import plain
from dipaco_p2p.use.tokenizer import Tokenizer

from ..checkpoint import Checkpoint
from ..progress import stage
from ..runfile import RunFile
from .corpus import documents_min, load_corpus, require_documents
from .samples import Document
from .tokenizer import tokenise, train_tokenizer

Tokens = NDArray[np.int32]

FILE = "sequences.safetensors"
PARTS = ("train", "validation", "holdout", "router")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """All text of a run; no document is in two parts."""

    train: HeldOut
    validation: HeldOut
    holdout: HeldOut
    router: HeldOut


def prepare_sequences(file: RunFile, folder: Path, *, is_begun: bool = False) -> tuple[bytes, Sequences]:
    """The tokenizer and the sequences of a run: from disk, else made from the corpus. A run that `is_begun` was made of
    what is on disk, whatever the run file now says of the corpus. Raises DipacoError."""
    tokenizer_path, path = folder / "tokenizer.json", folder / FILE
    if tokenizer_path.exists() and path.exists():
        sequences = read_sequences(path, file.run.model, key=None if is_begun else _key(file))
        if sequences is not None:
            return tokenizer_path.read_bytes(), sequences
        tokenizer_path.unlink()  # of another corpus: the preparation was stopped, and the run file changed since
    with stage("Reading the corpus"):
        documents = load_corpus(file.corpus, seed=file.run.seed)
    require_documents(documents, documents_min(file.run.topology.path_count))
    data = _tokenizer(file, documents, tokenizer_path)
    with stage("Tokenising", total=len(documents)) as advance:
        arrays = tokenise(documents, Tokenizer(data), on_progress=advance)
    sequences = split(arrays, file)
    write_atomically(path, encode_sequences(sequences, key=_key(file)))
    return data, sequences


def split(arrays: list[Tokens], file: RunFile) -> Sequences:
    """Cut every document, then deal the documents out; raises CorpusError if too few are long enough."""
    context, corpus = file.run.model.context, file.corpus
    pieces = [piece for piece in (cut(array, context=context) for array in arrays) if len(piece)]
    both = corpus.router_share + corpus.holdout_share
    found = split_by_document(len(pieces), seed=file.run.seed, validation=corpus.validation_share, router=both)
    shuffled = np.random.default_rng(file.run.seed).permutation(found.router)
    count = max(1, round(len(shuffled) * corpus.holdout_share / both)) if len(shuffled) > 1 else 0
    # With one document for both, early stopping looks at what routers are fitted on: neither is a reported figure.
    chosen = {
        "train": found.train,
        "validation": found.validation,
        "holdout": np.sort(shuffled[:count]) if count else found.router,
        "router": np.sort(shuffled[count:]),
    }
    if not all(len(numbers) for numbers in chosen.values()):
        raise CorpusError(
            f"only {len(pieces)} documents have {context} tokens or more",
            hint="give the run more text, or a smaller `context`",
        )
    return Sequences(**{name: _part(pieces, numbers) for name, numbers in chosen.items()})


def encode_sequences(sequences: Sequences, *, key: str) -> bytes:
    """The bytes of all parts; `key` says what they were made from."""
    tensors: dict[str, NDArray[np.int32]] = {}
    for name in PARTS:
        part: HeldOut = getattr(sequences, name)
        tensors |= {f"{name}.tokens": part.tokens, f"{name}.documents": part.documents}
    return encode(tensors, metadata={"key": key})


def read_sequences(path: Path, model: ModelConfig, *, key: str | None = None) -> Sequences | None:
    """The inverse; None if they were made from something else than `key` says. Raises IntegrityError."""
    try:
        tensors, metadata = decode(path.read_bytes())
        return None if key is not None and metadata.get("key") != key else _parts(tensors, model)
    except IntegrityError as error:
        raise IntegrityError(f"{path.name} is damaged: {error}", hint="remove it, and it is made again") from None


def decode_sequences(data: bytes, model: ModelConfig) -> Sequences:
    """The inverse of `encode_sequences`, whatever they were made from. Raises IntegrityError."""
    return _parts(decode(data)[0], model)


def _parts(tensors: Mapping[str, NDArray[Any]], model: ModelConfig) -> Sequences:
    try:
        parts = {n: HeldOut(tokens=tensors[f"{n}.tokens"], documents=tensors[f"{n}.documents"]) for n in PARTS}
    except KeyError as error:
        raise IntegrityError(f"{error} is missing") from None
    for part in parts.values():
        check_tokens(part.tokens, vocab_size=model.vocab_size, context=model.context)
    return Sequences(**parts)


def _key(file: RunFile) -> str:
    begins = [digest(_checkpoint(file).tokenizer())] if file.checkpoint else []
    return digest(canonical_bytes([plain(file.run), plain(file.corpus), *begins]))


def _checkpoint(file: RunFile) -> Checkpoint:
    return Checkpoint(Path(file.checkpoint), file.run.model)


def _part(pieces: list[Tokens], numbers: NDArray[np.int64]) -> HeldOut:
    documents = np.concatenate([np.full(len(pieces[n]), n, dtype=np.int32) for n in numbers])
    return HeldOut(tokens=np.concatenate([pieces[n] for n in numbers]), documents=documents)


def _tokenizer(file: RunFile, documents: list[Document], path: Path) -> bytes:
    if path.exists():
        return path.read_bytes()
    if file.checkpoint:
        data = _checkpoint(file).tokenizer()
        write_atomically(path, data)
        return data
    with stage("Training the tokenizer", total=sum(document.size_bytes for document in documents)) as advance:
        texts = (document.text for document in documents)
        data = train_tokenizer(texts, vocab_size=file.run.model.vocab_size, on_progress=advance)
    write_atomically(path, data)
    return data
