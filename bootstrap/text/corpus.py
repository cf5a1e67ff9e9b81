"""The run's text, from wherever `[corpus] source` says: found on this machine, local files, or a dataset of the hub.

Local files and the hub are read through `datasets`, as streams: nothing is copied to disk and reading stops at
`bytes_max`. A local file is a domain by its name, a folder's sub-folders are domains by theirs.

    .txt             one document; a corpus that is a single .txt file is split at blank lines into documents
                     of at least `PARAGRAPHS_CHARS_MIN` characters
    .jsonl .jsonl.gz one JSON object per line, the text in `text_field`
    .parquet         one row per document, the text in the column `text_field`

Every problem is a CorpusError of one line that names the file.

What is found on this machine is real text that every installation of this program already has, so nothing is
downloaded. Each of its domains is a kind of text of its own, because routing has to find clusters: see `DOMAINS`.

- Files are only read, never imported or run; packages are located with `importlib.util.find_spec`.
- Machine-written files, tables of numbers and near-copies of earlier text are left out. Near-copies matter most for
  licences: a copy in the validation part of a text in the training part would measure memory, not learning.
- The choice depends only on the seed and on what is installed; sources are names such as `stdlib/json/decoder.py`.
"""

from __future__ import annotations

import ast
import gzip
import importlib.util
import json
import logging
import os
import random
import re
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from dipaco_p2p.errors import CorpusError

from ..runfile import CorpusConfig
from .samples import Document, balanced

KINDS: Mapping[str, str] = {".txt": "text", ".jsonl": "json", ".jsonl.gz": "json", ".parquet": "parquet"}
"""Suffix of a file to the builder of `datasets` that reads it."""
PARAGRAPHS_CHARS_MIN = 2000
DOCUMENTS_MIN, DOCUMENTS_A_PATH = 16, 4
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


def documents_min(paths: int) -> int:
    """How many documents a run of so many paths needs."""
    return max(DOCUMENTS_MIN, DOCUMENTS_A_PATH * paths)


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
        if not _suffix(path):
            raise CorpusError(f"corpus file `{path}` is of an unknown kind", hint=f"files end in {', '.join(KINDS)}")
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
        return CorpusError(f"`{path}` is not UTF-8 text: byte {error.start}", hint="save it as UTF-8, or leave it out")
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


DOCUMENT_BYTES_MAX = 60_000
DOCUMENT_CHARS_MIN = 500
PARSED_BYTES_MAX = 200_000
"""Larger sources are not searched for docstrings: parsing them costs more than they give."""
DIGITS_MAX = 0.15
"""A text with a larger share of digits is a table of numbers."""
PIECE_CHARS_MIN = 24
"""Shorter pieces of a text say nothing about whether it is a copy."""

_WRITTEN_BY_MACHINE = re.compile(r"@generated|do not edit|auto-?generated|automatically generated|is generated", re.I)
_CPP = re.compile(r"^\s*(namespace\b|template\s*<|class\s+\w+|using\s+\w+)", re.M)
_PIECE_END = re.compile(r"[.;:,{}]\s|\n\s*\n")


def _start(path: Path) -> list[str]:
    """The first `DOCUMENT_BYTES_MAX` bytes, cut after a whole line."""
    with path.open("rb") as file:
        data = file.read(DOCUMENT_BYTES_MAX + 1)
    if len(data) > DOCUMENT_BYTES_MAX:
        data = data[: data.rfind(b"\n", 0, DOCUMENT_BYTES_MAX) + 1]
    return [data.decode()]


def _code(path: Path) -> list[str]:
    return [text for text in _start(path) if not _WRITTEN_BY_MACHINE.search(text[:2000])]


def _c(path: Path) -> list[str]:
    return [text for text in _code(path) if not _CPP.search(text)]


def _cpp(path: Path) -> list[str]:
    return [text for text in _code(path) if _CPP.search(text)]


def _docstrings(path: Path) -> list[str]:
    """All docstrings of a Python source, in order, as one text."""
    if path.stat().st_size > PARSED_BYTES_MAX:
        return []
    source = path.read_text("utf-8")
    if source.count('"""') < 4:
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in _statements(_parse(source)) if isinstance(node, documented))
    return ["\n\n".join(text for text in found if text).encode()[:DOCUMENT_BYTES_MAX].decode(errors="ignore")]


def _manual(path: Path) -> list[str]:
    """The chapters of Python's language reference, which `topics.py` holds as one dict of texts."""
    tables = [node.value for node in _parse(path.read_text("utf-8")).body if isinstance(node, ast.Assign)]
    return list(ast.literal_eval(tables[0]).values())


def _description(path: Path) -> list[str]:
    """What a distribution says about itself, without the header that names its authors."""
    return [text.partition("\n\n")[2] for text in _start(path)]


def _parse(source: str) -> ast.Module:
    with warnings.catch_warnings():  # an odd escape in a foreign file is not the user's business
        warnings.simplefilter("ignore")
        return ast.parse(source)


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that can hold a definition; expressions are most of a tree and hold none."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.stmt):
            yield from _statements(child)


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """Where one kind of text lies, and how it is read."""

    roots: tuple[str, ...]
    """`stdlib`, `headers` (of Python), `dist-info`, `system-licences`, or a package; `a/b` is the folder b in a."""
    match: str
    """A pattern that a file's name, from its root on and with `/`, must contain."""
    read: Callable[[Path], list[str]] = _code
    without: tuple[str, ...] = ()
    """Folders that are not entered."""


_TESTS = ("tests", "test", "idle_test")
_CPP_FOLDERS = ("ATen", "c10", "torch", "caffe2", "google", "pybind11", "fmt", "kineto", "tensorpipe", "fbgemm")

DOMAINS: Mapping[str, Domain] = {
    "python": Domain(roots=("stdlib",), match=r"\.py$", without=(*_TESTS, "site-packages", "encodings", "pydoc_data")),
    "mathematics": Domain(roots=("sympy", "mpmath"), match=r"\.py$", without=(*_TESTS, "benchmarks")),
    "tests": Domain(roots=("pandas", "scipy", "numpy", "networkx"), match=r"/tests/.*\.py$"),
    "docs": Domain(roots=("numpy", "scipy", "pandas", "networkx"), match=r"\.py$", read=_docstrings, without=_TESTS),
    "manual": Domain(roots=("stdlib/pydoc_data",), match=r"/topics\.py$", read=_manual),
    "readme": Domain(roots=("dist-info",), match=r"/METADATA$", read=_description),
    "licence": Domain(
        roots=("dist-info", "system-licences"), match=r"(?i)^system-|/[^/]*(licen[cs]e|copying)[^/]*$", read=_start
    ),
    "stubs": Domain(roots=("numpy", "pandas", "torch", "cryptography", "tokenizers"), match=r"\.pyi$"),
    "cython": Domain(roots=("pyarrow", "pandas", "scipy", "numpy"), match=r"\.(pyx|pxd|pxi)$", without=_TESTS),
    "c": Domain(roots=("headers", "numpy", "torch/include"), match=r"\.[ch]$", read=_c, without=_CPP_FOLDERS),
    "cpp": Domain(roots=("torch/include",), match=r"\.(h|hpp|cuh)$", read=_cpp, without=("ops", "google", "oneapi")),
}
"""The order breaks ties; the names appear in reports only."""


def found_documents(*, bytes_max: int = 12_000_000, seed: int = 0) -> list[Document]:
    """At most `bytes_max` of text in near-equal shares per domain; the seed decides which files of each."""
    novelty = Novelty()
    return balanced({name: _documents(name, seed, novelty) for name in DOMAINS}, bytes_max=bytes_max)


def _documents(name: str, seed: int, novelty: Novelty) -> Iterator[Document]:
    domain = DOMAINS[name]
    files = sorted(_files(domain))
    random.Random(f"{seed}/{name}").shuffle(files)
    for source, path in files:
        for text in _texts_of(domain, path):
            if len(text) >= DOCUMENT_CHARS_MIN and not _is_table(text) and novelty.admit(text):
                yield Document(text, name, source)


def _texts_of(domain: Domain, path: Path) -> Iterable[str]:
    try:
        return domain.read(path)
    except (OSError, ValueError, SyntaxError, RecursionError, IndexError):
        return ()  # a file that is not what its name says is no text for us


def _files(domain: Domain) -> Iterator[tuple[str, Path]]:
    """The files of a domain, each with its source name."""
    for root in domain.roots:
        for prefix, folder in _folders(root):
            for parent, folders, names in os.walk(folder):
                folders[:] = [name for name in folders if name not in domain.without]
                place = "/".join((prefix, *Path(parent).relative_to(folder).parts))
                yield from (
                    (f"{place}/{name}", Path(parent, name))
                    for name in names
                    if re.search(domain.match, f"{place}/{name}")
                )


def _folders(root: str) -> list[tuple[str, Path]]:
    """The folders that a root stands for, with the names they have in sources; none if this machine has none."""
    paths = sysconfig.get_paths()
    if root == "dist-info":
        return [(folder.name, folder) for folder in sorted(Path(paths["purelib"]).glob("*.dist-info"))]
    own = {"stdlib": paths["stdlib"], "headers": paths["include"], "system-licences": "/usr/share/common-licenses"}
    first, _, rest = root.partition("/")
    if first in own:
        return [(root, Path(own[first], rest))]
    spec = importlib.util.find_spec(first)
    return [(root, Path(place, rest)) for place in (spec.submodule_search_locations or ())] if spec else []


def _is_table(text: str) -> bool:
    return sum(map(text.count, "0123456789")) > DIGITS_MAX * len(text)


class Novelty:
    """Admits a text unless half of it or more was in texts admitted before, however the lines were broken."""

    def __init__(self, seen: Iterable[int] = ()) -> None:
        """`seen` are pieces, as `pieces` gives them, of texts that are there already."""
        self._seen: set[int] = set(seen)

    def admit(self, text: str) -> bool:
        found = list(_pieces(text))
        seen_chars = sum(len(piece) for piece in found if hash(piece) in self._seen)
        if 2 * seen_chars >= max(sum(map(len, found)), 1):
            return False
        self._seen.update(map(hash, found))
        return True


def pieces(text: str) -> Iterator[int]:
    """What `Novelty` knows a text by, the same within one process."""
    return map(hash, _pieces(text))


def _pieces(text: str) -> Iterator[str]:
    found = ("".join(piece.split()).lower() for piece in _PIECE_END.split(text))
    return (piece for piece in found if len(piece) >= PIECE_CHARS_MIN)
