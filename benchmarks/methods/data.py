"""From text to sequences, split by document into four parts that no method mixes.

    train    what paths learn from
    router   scored by all paths, to fit routers on
    tune     decides settings: outer learning rates
    report   every figure that is shown

Rule 1: a document is in one part only. Of a domain with few documents, as whole novels, pieces of them count as
documents, since a part could otherwise be empty or a single book.
Rule 2: the split is the same for every method and seed. What is not trained on has at most `PER_DOCUMENT` sequences of
a document, and as many of each domain as there are, up to an equal number: one statute of a hundred sequences among
eight hundred once turned a comparison round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from bootstrap.progress import stage
from bootstrap.runfile import CorpusConfig
from bootstrap.text.corpus import load_corpus
from bootstrap.text.samples import Document, balanced
from bootstrap.text.tokenizer import tokenise, train_tokenizer
from dipaco_p2p.config import PREFIX_TOKENS
from dipaco_p2p.core.arrays import Array
from dipaco_p2p.core.model.shards import cut, split_by_document
from dipaco_p2p.errors import CorpusError
from dipaco_p2p.use.tokenizer import Tokenizer

from .jobs import CONTEXT, SIZES, Size

PARTS = ("train", "router", "tune", "report")
ROUTER_SHARE, TUNE_SHARE, REPORT_SHARE = 0.08, 0.04, 0.08
SEQUENCES_MAX = {"router": 1600, "tune": 400, "report": 800}
PER_DOCUMENT = 10
FEW_DOCUMENTS = 50
PIECE_SEQUENCES = 16
"""Length of the pieces that are documents of their own where there are few documents."""
SPLIT_SEED = 0
REPO = Path(__file__).parents[2]
OWN = "own"
"""The corpus that is this project's own text."""
OWN_KINDS = {".py": "code", ".md": "documents", ".toml": "configuration"}

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Sequences (n, T), and of each (n,) its document, domain (a place in `Data.domains`) and bytes that count."""

    tokens: npt.NDArray[np.int32]
    documents: Ints
    domains: Ints
    bytes: Ints

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, chosen: Ints) -> Part:
        """Some of the sequences."""
        return Part(**{name: getattr(self, name)[chosen] for name in self.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Data:
    """All text of the experiment."""

    train: Part
    router: Part
    tune: Part
    report: Part
    domains: tuple[str, ...]

    def save(self, path: Path) -> None:
        """As one file."""
        arrays = {f"{name}.{field}": getattr(getattr(self, name), field) for name in PARTS for field in Part.__slots__}
        save_arrays(path, domains=np.array(self.domains), **arrays)

    @classmethod
    def load(cls, path: Path) -> Self:
        """The inverse of `save`."""
        with np.load(path) as arrays:
            parts = {name: Part(**{field: arrays[f"{name}.{field}"] for field in Part.__slots__}) for name in PARTS}
            return cls(domains=tuple(arrays["domains"].tolist()), **parts)


def save_arrays(path: Path, **arrays: Array) -> None:
    """An .npz file that appears whole."""
    partial = path.with_name(f"partial-{path.name}")
    np.savez(partial, **arrays)  # type: ignore[arg-type]  # numpy's stub knows of no arrays by name
    partial.replace(path)


def prepare_data(sources: Sequence[str], *, bytes_max: int, size: Size = SIZES["small"]) -> Data:
    """Read the corpora, train the tokenizer, cut and split. Raises CorpusError."""
    with stage("Reading the corpus"):
        documents = read_documents(sources, bytes_max=bytes_max)
    with stage("Training the tokenizer", total=sum(document.size_bytes for document in documents)) as advance:
        data = train_tokenizer((d.text for d in documents), vocab_size=size.vocab_size, on_progress=advance)
    tokenizer = Tokenizer(data)
    with stage("Tokenising", total=len(documents)) as advance:
        arrays = tokenise(documents, tokenizer, on_progress=advance)
    names = [document.domain for document in documents]
    return split_sequences(names, arrays, tokenizer.byte_lengths(), context=size.context)


def read_documents(sources: Sequence[str], *, bytes_max: int) -> list[Document]:
    """The documents of all corpora, near-equal shares of text from each domain, at most `bytes_max` in all."""
    found: dict[str, list[Document]] = {}
    for source in sources:
        own = own_documents(REPO) if source == OWN else None
        for document in own or load_corpus(CorpusConfig(source=source, bytes_max=bytes_max), seed=SPLIT_SEED):
            found.setdefault(document.domain, []).append(document)
    return balanced(found, bytes_max=bytes_max)


def own_documents(root: Path) -> list[Document]:
    """The text of a project: code, pages and configuration in its folders, hidden ones left out."""
    found = []
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.suffix in OWN_KINDS and not any(part.startswith(".") for part in name.split("/")) and path.is_file():
            found.append(Document(path.read_text(), OWN_KINDS[path.suffix], name))
    return found


def split_sequences(
    names: Sequence[str], arrays: Sequence[npt.NDArray[np.int32]], byte_lengths: Ints, *, context: int = CONTEXT
) -> Data:
    """The parts, from the domain and the tokens of each document. Raises CorpusError if one of them would be empty."""
    domains = tuple(sorted(set(names)))
    pieces: dict[str, list[tuple[npt.NDArray[np.int32], int, int]]] = {part: [] for part in PARTS}
    number = 0
    for place, domain in enumerate(domains):
        whole = [cut(array, context=context) for name, array in zip(names, arrays, strict=True) if name == domain]
        documents = _documents([rows for rows in whole if len(rows)])
        for part, chosen in _split(len(documents)).items():
            pieces[part] += [(documents[i], number + i, place) for i in chosen]
        number += len(documents)
    if not all(pieces.values()):
        raise CorpusError(f"the corpus has only {number} documents of {context} tokens or more", hint="give more text")
    parts = {name: _part(pieces[name], byte_lengths) for name in PARTS}
    held_out = {name: _thinned(_few_each(parts[name]), most) for name, most in SEQUENCES_MAX.items()}
    return Data(domains=domains, train=parts["train"], **held_out)


def _documents(rows: list[npt.NDArray[np.int32]]) -> list[npt.NDArray[np.int32]]:
    if len(rows) >= FEW_DOCUMENTS:
        return rows
    return [many[i : i + PIECE_SEQUENCES] for many in rows for i in range(0, len(many), PIECE_SEQUENCES)]


def _split(count: int) -> dict[str, Ints]:
    held_out = TUNE_SHARE + REPORT_SHARE
    split = split_by_document(count, seed=SPLIT_SEED, validation=held_out, router=ROUTER_SHARE)
    shuffled = np.random.default_rng(SPLIT_SEED).permutation(split.validation)
    tune = max(round(len(shuffled) * TUNE_SHARE / held_out), int(len(shuffled) > 1))
    return {"train": split.train, "router": split.router, "tune": shuffled[:tune], "report": shuffled[tune:]}


def _part(pieces: Sequence[tuple[npt.NDArray[np.int32], int, int]], byte_lengths: Ints) -> Part:
    tokens = np.concatenate([rows for rows, _, _ in pieces])
    counts = [len(rows) for rows, _, _ in pieces]
    return Part(
        tokens=tokens,
        documents=np.repeat([document for _, document, _ in pieces], counts),
        domains=np.repeat([domain for _, _, domain in pieces], counts),
        bytes=byte_lengths[tokens[:, PREFIX_TOKENS:]].sum(axis=1),
    )


def _few_each(part: Part) -> Part:
    """At most `PER_DOCUMENT` sequences of each document, drawn at random."""
    order = np.random.default_rng(SPLIT_SEED).permutation(len(part))
    by_document = order[np.argsort(part.documents[order], kind="stable")]
    documents = part.documents[by_document]
    place = np.arange(len(part)) - np.searchsorted(documents, documents)
    return part.rows(np.sort(by_document[place < PER_DOCUMENT]))


def _thinned(part: Part, most: int) -> Part:
    """At most `most` sequences, drawn at random, the poorest domains first to keep all of theirs."""
    left, kept = most, []
    generator = np.random.default_rng(SPLIT_SEED)
    sizes = np.bincount(part.domains)
    present = [domain for domain in np.argsort(sizes, kind="stable") if sizes[domain]]
    for done, domain in enumerate(present):
        rows = np.flatnonzero(part.domains == domain)
        count = min(len(rows), left // (len(present) - done))
        kept.append(generator.permutation(rows)[:count])
        left -= count
    return part.rows(np.sort(np.concatenate(kept)))
