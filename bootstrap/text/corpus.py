"""The run's text, from wherever `[corpus] source` says: found on this machine, local files, or a dataset of the hub.

Local files and the hub are read through `datasets`, as streams: nothing is copied to disk and reading stops at
`bytes_max`. A local file is a domain by its name, a folder's sub-folders are domains by theirs.

    .txt             one document; a corpus that is a single .txt file is split at blank lines into documents
                     of at least `PARAGRAPHS_CHARS_MIN` characters
    .jsonl .jsonl.gz one JSON object per line, the text in `text_field`
    .parquet         one row per document, the text in the column `text_field`

Every problem is a CorpusError of one line that names the file.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from dipaco_p2p.errors import CorpusError

from ..runfile import CorpusConfig
from .installed_text import found_documents
from .samples import Document, balanced

KINDS: Mapping[str, str] = {".txt": "text", ".jsonl": "json", ".jsonl.gz": "json", ".parquet": "parquet"}
"""Suffix of a file to the builder of `datasets` that reads it."""
PARAGRAPHS_CHARS_MIN = 2000
_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")


def load_corpus(config: CorpusConfig, *, seed: int) -> list[Document]:
    """The documents of the corpus, always in the same order; `seed` chooses among what is found on this machine.

    Raises CorpusError if there is no text, or it cannot be read.
    """
    if config.source == "found":
        documents = found_documents(bytes_max=config.bytes_max, seed=seed)
        documents = documents[: config.documents_max or None]
    else:
        documents = balanced(_streams(config), bytes_max=config.bytes_max, documents_max=config.documents_max)
    if not documents:
        raise CorpusError(
            f"no document with text in corpus `{config.source}`", hint="see `source` and `bytes_max` in [corpus]"
        )
    return documents


def require_documents(documents: Sequence[Document], minimum: int) -> None:
    """Raise CorpusError if there are fewer than `minimum` documents."""
    if len(documents) < minimum:
        hint = "add text, or use a smaller grid"
        raise CorpusError(f"the corpus has {len(documents)} documents, but the run needs at least {minimum}", hint=hint)


def _streams(config: CorpusConfig) -> dict[str, Iterable[Document]]:
    path = Path(config.source).expanduser()
    if path.exists():
        return _local_streams(path, config.text_field)
    match = _HUB_NAME.fullmatch(config.source)
    if match is None or _suffix(path) or config.source.startswith("."):
        raise CorpusError(
            f"corpus `{config.source}` does not exist", hint="give a file, a folder, `found` or a hub name `org/name`"
        )
    return {match[1]: _hub_documents(match[1], match[2], config.text_field)}


def _local_streams(path: Path, text_field: str) -> dict[str, Iterable[Document]]:
    if path.is_file():
        _refuse_suffix(path)
        return {_stem(path): _file_documents(path, text_field, domain=_stem(path), source=path.name, split_text=True)}
    files = sorted(file for file in path.rglob("*") if file.is_file() and _suffix(file))
    if not files:
        raise CorpusError(f"folder `{path}` holds no corpus file", hint=f"files end in {', '.join(KINDS)}")
    by_domain: dict[str, list[Path]] = {}
    for file in files:
        first = file.relative_to(path).parts[0]
        by_domain.setdefault(_stem(file) if path / first == file else first, []).append(file)
    return {domain: _folder_documents(path, group, text_field, domain) for domain, group in by_domain.items()}


def _folder_documents(folder: Path, files: Sequence[Path], text_field: str, domain: str) -> Iterator[Document]:
    for file in files:
        source = file.relative_to(folder).as_posix()
        yield from _file_documents(file, text_field, domain=domain, source=source)


def _suffix(path: Path) -> str:
    return next((suffix for suffix in KINDS if path.name.lower().endswith(suffix)), "")


def _stem(path: Path) -> str:
    return path.name[: -len(_suffix(path))]


def _refuse_suffix(path: Path) -> None:
    if not _suffix(path):
        raise CorpusError(f"corpus file `{path}` is of an unknown kind", hint=f"files end in {', '.join(KINDS)}")


def _file_documents(
    path: Path, text_field: str, *, domain: str, source: str, split_text: bool = False
) -> Iterator[Document]:
    """The documents of one file; rows without text are passed over."""
    kind = KINDS[_suffix(path)]
    options = {"sample_by": "paragraph" if split_text else "document"} if kind == "text" else {}
    field = "text" if kind == "text" else text_field
    try:
        if _is_empty(path):
            return
        rows = _load(kind, data_files=_literal(path), **options)
        texts = _texts(rows, field, where=str(path))
        for number, text in enumerate(_joined(texts) if kind == "text" and split_text else texts):
            yield Document(text, domain, f"{source}#{number}")
    except (ValueError, TypeError, OSError, EOFError) as error:  # what pyarrow, datasets and gzip raise
        raise _unreadable(path, kind, error) from None


def _literal(path: Path) -> str:
    """`datasets` takes a name for a pattern; brackets in it must stand for themselves."""
    return re.sub(r"([*?\[\]])", r"[\1]", str(path))


def _hub_documents(name: str, subset: str | None, text_field: str) -> Iterator[Document]:
    try:
        rows = _load(name, subset)
        texts = _texts(rows, text_field, where=f"hub dataset `{name}`")
        for number, text in enumerate(texts):
            yield Document(text, name, f"{name}#{number}")
    except (OSError, ValueError) as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        hint = 'check the network and the name; `source = "found"` needs neither'
        raise CorpusError(f"hub dataset `{name}` cannot be reached: {first_line}", hint=hint) from None


def _load(*args: Any, **options: Any) -> Iterable[Mapping[str, object]]:
    """`datasets.load_dataset` as a stream, silent, and telling nobody that it was used."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import datasets  # a second or more, so only when a corpus needs it

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else it asks the hub to count even a local file, and waits
    datasets.disable_progress_bars()
    for name in ("datasets", "huggingface_hub", "fsspec"):  # they log what we raise
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="dipaco-corpus-") as cache:  # holds lock files that nobody needs later
        rows: Iterable[Mapping[str, object]] = datasets.load_dataset(
            *args, split="train", streaming=True, cache_dir=cache, **options
        )
    return rows


def _texts(rows: Iterable[Mapping[str, object]], field: str, *, where: str) -> Iterator[str]:
    for number, row in enumerate(rows, start=1):
        if field not in row:
            hint = f"it has {', '.join(f'`{name}`' for name in row)}; set `text_field` in [corpus]"
            raise CorpusError(f"no field `{field}` in {where}", hint=hint)
        text = row[field]
        if text is not None and not isinstance(text, str):
            raise CorpusError(f"field `{field}` of record {number} in {where} is {type(text).__name__}, not text")
        if text and text.strip():
            yield text


def _joined(paragraphs: Iterable[str]) -> Iterator[str]:
    """Consecutive paragraphs put together until they have `PARAGRAPHS_CHARS_MIN` characters."""
    group: list[str] = []
    for paragraph in paragraphs:
        group.append(paragraph)
        if sum(map(len, group)) >= PARAGRAPHS_CHARS_MIN:
            yield "\n\n".join(group)
            group = []
    if group:
        yield "\n\n".join(group)


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.name.lower().endswith(".gz") else path.open("rb")


def _is_empty(path: Path) -> bool:
    """Whether the file has no byte: `datasets` cannot tell the fields of such a file, and fails."""
    with _open(path) as file:
        return not file.read(1)


def _unreadable(path: Path, kind: str, error: Exception) -> CorpusError:
    if isinstance(error, UnicodeDecodeError):
        return CorpusError(f"`{path}` is not UTF-8 text: byte {error.start}")
    line = _bad_line(path) if kind == "json" else 0
    if line:
        return CorpusError(
            f"line {line} of `{path}` is not a JSON object", hint="a .jsonl file has one object per line"
        )
    return CorpusError(f"`{path}` cannot be read: {str(error).splitlines()[0] if str(error) else type(error).__name__}")


def _bad_line(path: Path) -> int:
    """The number of the first line that is no JSON object, which `datasets` does not tell; 0 if there is none."""
    try:
        with _open(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip() and not _is_object(line):
                    return number
    except (OSError, EOFError):
        pass
    return 0


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
