"""Text that comes with a growth: read once, before the growth is decreed, and kept in the run's folder from then on.

    <dir>/text-<digest>.safetensors     the four parts of `sequences.safetensors`, of the new text alone

Read then, and not when the next stage is made: whoever decrees hears at once what is wrong with the text, nothing is
signed before the text is on disk, and neither a restart nor a source that was changed or removed since makes another
stage. The decree names the digest of the file; where the text came from, nobody is told.

A document is a duplicate if half of it or more is in the run already, or in a document before it: by its pieces, as in
text that is found on a machine (corpus.py), or by its sequences, for text without punctuation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dipaco_p2p.canonical import digest
from dipaco_p2p.config import ModelConfig
from dipaco_p2p.core.model.shards import HeldOut, cut, decode_held_out
from dipaco_p2p.errors import CorpusError, IntegrityError
from dipaco_p2p.node.run import Run
from dipaco_p2p.program.files import write_atomically
from dipaco_p2p.protocol.documents import BlobRef
from dipaco_p2p.protocol.manifest import STAGES
from dipaco_p2p.use.folder import RunFolder
from dipaco_p2p.use.tokenizer import Tokenizer

from ..folder import text_path, text_paths
from ..progress import stage
from ..runfile import RunFile
from .corpus import Novelty, load_corpus, pieces
from .sequences import PARTS, Sequences, Tokens, decode_sequences, encode_sequences, prepare_sequences, split
from .tokenizer import tokenise

MISSING_HINT = "bring it back from a backup of the run's folder: the growth that was decreed begins with it"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewText:
    """What was read for a growth."""

    data: bytes
    """The file that is kept."""
    documents: int
    """Those that are used."""
    duplicates: int
    """Those left out since the run has their text, or since they are copies of each other."""
    short: int
    """Those left out since they are shorter than a sequence."""
    train: int
    """Sequences that are trained on."""
    held_out: int
    """Sequences that are held out: validation, holdout and router split."""

    @property
    def digest(self) -> str:
        """What the decree names."""
        return digest(self.data)

    @property
    def counts(self) -> dict[str, int]:
        """For people."""
        return {name: getattr(self, name) for name in ("documents", "duplicates", "short", "train", "held_out")}


def read_text(file: RunFile, folder: RunFolder, run: Run, source: str, *, sequences_min: int) -> NewText:
    """The text of `source`, read and split as [corpus] of the run file says, with the run's tokenizer; `run` is the
    stage that is to grow. Raises CorpusError for text that cannot be read, or gives fewer than `sequences_min`."""
    tokenizer, texts = texts_of(file, folder, run.manifest.stage)
    with stage("Reading the corpus"):
        documents = load_corpus(replace(file.corpus, source=source), seed=file.run.seed)
    vocabulary, context = Tokenizer(tokenizer), file.run.model.context
    wanted = {piece for document in documents for piece in pieces(document.text)}
    novelty = Novelty(piece for text in _texts(texts, vocabulary) for piece in pieces(text) if piece in wanted)
    with stage("Tokenising", total=len(documents)) as advance:
        fresh = [document for document in documents if novelty.admit(document.text)]
        arrays = _without_copies(tokenise(fresh, vocabulary, on_progress=advance), texts, context=context)
    duplicates = len(documents) - len(arrays)
    if not arrays:
        message = f"all {duplicates} documents of the new text are in the run already"
        raise CorpusError(message, hint="give text that the run does not have, or grow without `--corpus`")
    sequences = split(arrays, file)
    train = len(sequences.train)
    if train < sequences_min:
        left = f" ({duplicates} duplicate documents were left out)" if duplicates else ""
        message = f"the new text has {train} sequences to train on{left}, but the new paths need {sequences_min}"
        raise CorpusError(message, hint="add text, or grow by fewer modules")
    used = sum(len(np.unique(getattr(sequences, name).documents)) for name in PARTS)
    return NewText(
        data=encode_sequences(sequences, key=vocabulary.digest),
        documents=used,
        duplicates=duplicates,
        short=sum(len(array) < context for array in arrays),
        train=train,
        held_out=sum(len(getattr(sequences, name)) for name in PARTS) - train,
    )


def keep_text(root: Path, text: NewText) -> None:
    """On disk before anything that names it is signed."""
    write_atomically(text_path(root, text.digest), text.data)


def drop_unnamed(root: Path, named: Iterable[str]) -> None:
    """Remove what was read for growths that were then refused, or never decreed."""
    kept = {text_path(root, name) for name in named}
    for path in text_paths(root):
        if path not in kept:
            path.unlink(missing_ok=True)


def texts_of(file: RunFile, folder: RunFolder, name: str) -> tuple[bytes, list[Sequences]]:
    """The tokenizer, and the texts that the stage of this name has: the run file's, then those of the growths before,
    in their order. Raises DipacoError."""
    tokenizer, first = prepare_sequences(file, folder.root, is_begun=True)
    return tokenizer, [
        first,
        *(_read(folder.root, each, file.run.model) for each in decreed_texts(folder.stages(), name)),
    ]


def decreed_texts(stages: Iterable[Run], name: str) -> list[str]:
    """Digests of the texts that growths brought before the stage of this name."""
    before = [run.growth for run in stages if STAGES.index(run.manifest.stage) < STAGES.index(name)]
    return [growth.corpus for growth in before if growth is not None and growth.corpus]


def joined(texts: Sequence[Sequences]) -> Sequences:
    """One text behind the other in each part; the documents of all keep different numbers."""
    parts: dict[str, list[HeldOut]] = {name: [] for name in PARTS}
    offset = 0
    for text in texts:
        found: dict[str, HeldOut] = {name: getattr(text, name) for name in PARTS}
        for name, part in found.items():
            parts[name].append(HeldOut(tokens=part.tokens, documents=part.documents + np.int32(offset)))
        offset += 1 + max(int(part.documents.max()) for part in found.values())
    return Sequences(**{name: _one(found) for name, found in parts.items()})


def validation_bounds(folder: RunFolder, name: str) -> tuple[int, ...]:
    """At which validation sequence of the stage of this name each text after the first begins."""
    bounds = []
    for run in folder.stages():
        if run.manifest.stage != name and run.growth is not None and run.growth.corpus:
            bounds.append(len(held_out(folder, run, run.manifest.validation)))
        if run.manifest.stage == name:
            break
    return tuple(bounds)


def held_out(folder: RunFolder, run: Run, ref: BlobRef) -> HeldOut:
    """A held-out part of one stage. Raises IntegrityError if it is missing or damaged."""
    data, model = folder.store(run.manifest.stage).get(ref.digest), run.config.model
    if data is None:
        raise IntegrityError(f"blob {ref.digest[:8]} is missing from the archive of the {run.manifest.stage}")
    return decode_held_out(data, vocab_size=model.vocab_size, context=model.context)


def find_text(root: Path, name: str, model: ModelConfig) -> Sequences | None:
    """The text that a decree names; None if this folder never had it. Raises IntegrityError for a damaged one."""
    return _read(root, name, model) if text_path(root, name).exists() else None


def _one(parts: Sequence[HeldOut]) -> HeldOut:
    return HeldOut(
        tokens=np.concatenate([part.tokens for part in parts]),
        documents=np.concatenate([part.documents for part in parts]),
    )


def _read(root: Path, name: str, model: ModelConfig) -> Sequences:
    path = text_path(root, name)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise IntegrityError(f"{path.name} cannot be read: {error.strerror}", hint=MISSING_HINT) from None
    if digest(data) != name:
        raise IntegrityError(f"{path.name} was damaged on disk", hint=MISSING_HINT)
    return decode_sequences(data, model)


def _texts(texts: Iterable[Sequences], tokenizer: Tokenizer) -> Iterator[str]:
    """The documents of the run, as far as they are in its sequences."""
    for text in texts:
        for name in PARTS:
            part: HeldOut = getattr(text, name)
            ends = np.flatnonzero(np.diff(part.documents)) + 1
            yield from (tokenizer.decode(rows.reshape(-1).tolist()) for rows in np.split(part.tokens, ends))


def _without_copies(arrays: Sequence[Tokens], texts: Iterable[Sequences], *, context: int) -> list[Tokens]:
    """Those of which less than half of the sequences are in `texts` or in an array before."""
    rows = [[row.tobytes() for row in cut(array, context=context)] for array in arrays]
    wanted = {row for each in rows for row in each}
    known = (row.tobytes() for text in texts for name in PARTS for row in _rows(getattr(text, name)))
    seen = {row for row in known if row in wanted}
    kept = []
    for array, own in zip(arrays, rows, strict=True):
        if not own or 2 * sum(row in seen for row in own) < len(own):
            kept.append(array)
        seen.update(own)
    return kept


def _rows(part: HeldOut) -> NDArray[np.int32]:
    return np.ascontiguousarray(part.tokens)
