"""The default corpus: real text that every installation of this program already has, so nothing is downloaded.

Each domain is a kind of text of its own, because routing has to find clusters: see `DOMAINS`. Rules:

- Files are only read, never imported or run; packages are located with `importlib.util.find_spec`.
- Machine-written files, tables of numbers and near-copies of earlier text are left out. Near-copies matter most for
  licences: a copy in the validation part of a text in the training part would measure memory, not learning.
- The choice depends only on the seed and on what is installed; sources are names such as `stdlib/json/decoder.py`.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import random
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .samples import Document, balanced

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
    novelty = _Novelty()
    return balanced({name: _documents(name, seed, novelty) for name in DOMAINS}, bytes_max=bytes_max)


def _documents(name: str, seed: int, novelty: _Novelty) -> Iterator[Document]:
    domain = DOMAINS[name]
    files = sorted(_files(domain))
    random.Random(f"{seed}/{name}").shuffle(files)
    for source, path in files:
        for text in _texts(domain, path):
            if len(text) >= DOCUMENT_CHARS_MIN and not _is_table(text) and novelty.admit(text):
                yield Document(text, name, source)


def _texts(domain: Domain, path: Path) -> Iterable[str]:
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


class _Novelty:
    """Admits a text unless half of it or more was in texts admitted before, however the lines were broken."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def admit(self, text: str) -> bool:
        pieces = ["".join(piece.split()).lower() for piece in _PIECE_END.split(text)]
        pieces = [piece for piece in pieces if len(piece) >= PIECE_CHARS_MIN]
        seen_chars = sum(len(piece) for piece in pieces if hash(piece) in self._seen)
        if 2 * seen_chars >= max(sum(map(len, pieces)), 1):
            return False
        self._seen.update(map(hash, pieces))
        return True
