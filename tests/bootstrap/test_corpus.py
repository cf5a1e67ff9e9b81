"""Corpora of all kinds give the same documents each time, and each way to go wrong gives one line."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from bootstrap.runfile import CorpusConfig
from bootstrap.text import corpus as found
from bootstrap.text.corpus import (
    DOCUMENT_BYTES_MAX,
    DOMAINS,
    PARAGRAPHS_CHARS_MIN,
    found_documents,
    load_corpus,
    require_documents,
)
from bootstrap.text.samples import Document, balanced
from dipaco_p2p.errors import CorpusError


def read(path: Path, **options: object) -> list[Document]:
    return load_corpus(CorpusConfig(source=str(path), **options), seed=0)  # type: ignore[arg-type]


def texts(path: Path, **options: object) -> list[str]:
    return [document.text for document in read(path, **options)]


def refusal(path: Path, **options: object) -> CorpusError:
    with pytest.raises(CorpusError) as caught:
        read(path, **options)
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)
    return caught.value


def lines(records: Iterable[object]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def test_jsonl_gives_its_texts_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines({"text": f"text {i}", "n": i} for i in range(100)))
    documents = read(path)
    assert [document.text for document in documents] == [f"text {i}" for i in range(100)]
    assert documents[7] == Document("text 7", "a", "a.jsonl#7")


def test_compressed_jsonl_and_parquet_give_the_same_as_jsonl(tmp_path: Path) -> None:
    records = [{"body": text} for text in ("eins", "zwei", "drei ü")]
    (tmp_path / "a.jsonl").write_text(lines(records))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines(records).encode()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "c.parquet")
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        assert texts(tmp_path / name, text_field="body") == ["eins", "zwei", "drei ü"]


def test_rows_without_text_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines([{"text": "a"}, {"text": None}, {"text": " \n"}, {"text": "b"}]))
    assert texts(path) == ["a", "b"]


def test_a_single_text_file_is_split_at_blank_lines_without_loss(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    paragraphs = [f"Paragraph {i}. " + "word " * 60 for i in range(100)]
    path.write_text("\n\n".join(paragraphs))
    found = texts(path)
    assert len(found) > 5
    assert all(len(text) >= PARAGRAPHS_CHARS_MIN for text in found[:-1])
    assert "\n\n".join(found).split("\n\n") == paragraphs


def test_a_folder_gives_one_document_per_text_file_and_domains_by_name(tmp_path: Path) -> None:
    for name, text in {
        "fr/a.txt": "un\n\ndeux",
        "fr/deep/b.txt": "trois",
        "de/a.txt": "eins",
        "top.txt": "one",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "notes.pdf").write_bytes(b"%PDF")
    documents = {document.source: (document.domain, document.text) for document in read(tmp_path)}
    assert documents == {
        "fr/a.txt#0": ("fr", "un\n\ndeux"),
        "fr/deep/b.txt#0": ("fr", "trois"),
        "de/a.txt#0": ("de", "eins"),
        "top.txt#0": ("top", "one"),
    }


def test_reading_twice_gives_the_same(tmp_path: Path) -> None:
    for name in "cab":
        (tmp_path / f"{name}.jsonl").write_text(lines({"text": f"{name} {i}"} for i in range(20)))
    assert read(tmp_path) == read(tmp_path)


def test_limits_share_the_room_between_domains(tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(lines({"text": "l" * 100} for _ in range(50)))
    (tmp_path / "short.jsonl").write_text(lines({"text": "s" * 10} for _ in range(500)))
    by_bytes = read(tmp_path, bytes_max=2000)
    assert {name: sum(d.size_bytes for d in by_bytes if d.domain == name) for name in ("long", "short")} == {
        "long": 1000,
        "short": 1000,
    }
    assert len(read(tmp_path, documents_max=7)) == 7


def test_a_poor_domain_leaves_its_room_to_the_others() -> None:
    streams = {name: [Document("x" * 10, name, "")] * count for name, count in {"poor": 2, "rich": 99}.items()}
    taken = [document.domain for document in balanced(streams, bytes_max=100)]
    assert (taken.count("poor"), taken.count("rich")) == (2, 8)


def test_names_that_look_like_patterns_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("right")
    (tmp_path / "a1.txt").write_text("wrong")
    assert texts(tmp_path / "a[1].txt") == ["right"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("content", ["", "\n \n"], ids=["empty", "blank"])
def test_a_file_without_text_is_refused(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(content.encode()) if name.endswith("gz") else content.encode())
    assert "no document with text" in str(refusal(path))


def test_an_empty_folder_is_refused_with_the_suffixes(tmp_path: Path) -> None:
    assert ".parquet" in refusal(tmp_path).hint


FINE = b'{"text": "fine"}\n'
UNREADABLE: dict[str, tuple[str, bytes | None, str, str]] = {
    "missing": ("none.jsonl", None, "does not exist", ""),
    "of an unknown kind": ("a.pdf", b"%PDF", "unknown kind", ".jsonl.gz"),
    "a line that is no JSON": ("a.jsonl", FINE + b"nope\n", "line 2 of", ""),
    "a line that is no object": ("a.jsonl", FINE + b"3\n", "line 2 of", ""),
    "a line that is cut off": ("a.jsonl", FINE + b'{"text": "open\n', "line 2 of", ""),
    "without the field": ("a.jsonl", b'{"body": "x", "title": "y"}\n', "no field `text`", "`body`, `title`"),
    "a field that is no text": ("a.jsonl", b'{"text": 3}\n', "is int, not text", ""),
    "no UTF-8": ("a.txt", b"caf\xe9 " * 10, "not UTF-8", ""),
    "damaged Parquet": ("a.parquet", b"not what the name says" * 10, "cannot be read", ""),
    "damaged gzip": ("a.jsonl.gz", b"not what the name says" * 10, "cannot be read", ""),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_file_that_cannot_be_read_is_refused_by_what_is_wrong_with_it(tmp_path: Path, case: str) -> None:
    name, data, words, hint = UNREADABLE[case]
    if data is not None:
        (tmp_path / name).write_bytes(data)
    error = refusal(tmp_path / name)
    assert words in str(error) and hint in error.hint


def test_too_few_documents_are_refused_with_both_numbers() -> None:
    documents = [Document("x", "d", "s")] * 3
    require_documents(documents, 3)
    with pytest.raises(CorpusError, match=r"has 3 documents, but the run needs at least 4"):
        require_documents(documents, 4)


def test_reading_local_files_asks_no_network_and_leaves_nothing_in_the_home_folder(tmp_path: Path) -> None:
    corpus, home = tmp_path / "a.jsonl", tmp_path / "home"
    corpus.write_text(lines([{"text": "a"}]))
    home.mkdir()
    program = (
        "from bootstrap.text.corpus import load_corpus; from bootstrap.runfile import CorpusConfig\n"
        "import sys; asked = []\n"
        "sys.addaudithook(lambda event, _: asked.append(event) if event.startswith('socket.') else None)\n"
        f"print(len(load_corpus(CorpusConfig(source={str(corpus)!r}), seed=0)), asked)"
    )
    environment = {**os.environ, "HOME": str(home), "HF_HOME": str(home / "hf")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1 []\n", "")
    assert list(home.rglob("*")) == []


def test_a_hub_name_without_network_is_one_line_and_nothing_else_is_printed(tmp_path: Path) -> None:
    program = (
        "from bootstrap.text.corpus import load_corpus; from bootstrap.runfile import CorpusConfig\n"
        "try: load_corpus(CorpusConfig(source='nobody/nothing'), seed=0)\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path), "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("CorpusError hub dataset `nobody/nothing` cannot be reached")
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


BYTES_MAX = 1_500_000


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return found_documents(bytes_max=BYTES_MAX, seed=3)


def test_every_domain_has_text_in_near_equal_shares(documents: list[Document]) -> None:
    taken_bytes = Counter[str]()
    for document in documents:
        taken_bytes[document.domain] += document.size_bytes
    share_bytes = BYTES_MAX / len(DOMAINS)
    assert set(taken_bytes) == set(DOMAINS)
    assert max(taken_bytes.values()) < share_bytes + DOCUMENT_BYTES_MAX
    assert min(taken_bytes.values()) > share_bytes - DOCUMENT_BYTES_MAX
    assert 0.9 * BYTES_MAX < taken_bytes.total() <= BYTES_MAX


def test_the_same_seed_gives_the_same_and_another_gives_other_documents(documents: list[Document]) -> None:
    assert found_documents(bytes_max=BYTES_MAX, seed=3) == documents
    others = {document.source for document in found_documents(bytes_max=BYTES_MAX, seed=4)}
    assert len(others - {document.source for document in documents}) > len(others) / 4


def test_the_same_seed_gives_the_same_in_another_process(documents: list[Document]) -> None:
    program = (
        "import sys; from bootstrap.text.corpus import found_documents\n"
        f"print(*[d.source for d in found_documents(bytes_max={BYTES_MAX}, seed=3)], sep='\\n')\n"
        "print([name for name in ('torch', 'numpy', 'pandas', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *sources, foreign_imports = done.stdout.splitlines()
    assert sources == [document.source for document in documents]
    assert foreign_imports == "[]", "packages must be read, not imported"


def test_sources_are_relative_names(documents: list[Document]) -> None:
    for document in documents:
        assert not Path(document.source).is_absolute()
        assert str(Path.home()) not in document.source
        assert "site-packages" not in document.source


def test_documents_have_a_bounded_size(documents: list[Document]) -> None:
    assert all(found.DOCUMENT_CHARS_MIN <= len(document.text) for document in documents)
    assert all(document.size_bytes <= DOCUMENT_BYTES_MAX for document in documents)


def test_no_document_is_there_twice(documents: list[Document]) -> None:
    assert len({" ".join(document.text.split()) for document in documents}) == len(documents)


def test_a_copy_with_other_line_breaks_and_another_owner_is_not_new() -> None:
    novelty = found.Novelty()
    sentences = [
        f"Clause {i} grants you the right to use the software in way {i} " + "and so on " * i for i in range(9)
    ]
    licence = ". ".join(sentences) + "."
    assert novelty.admit("Copyright one. " + licence)
    assert not novelty.admit("Copyright another. " + licence.replace(" and", "\nand"))
    assert novelty.admit(
        " ".join(f"Something else altogether, said for the {i}th time in new words {i}." for i in range(9))
    )


def test_tables_of_numbers_and_machine_written_sources_are_left_out(tmp_path: Path) -> None:
    assert found._is_table("0x3f, 0x41, 17, 4711,\n" * 100)
    assert not found._is_table("for i in range(10): print(i + 1)\n" * 100)
    generated = tmp_path / "ops.h"
    generated.write_text("// @generated by a program\nint f();\n")
    assert found._code(generated) == []


def test_docstrings_are_extracted_without_running_the_file(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(
        '"""Top."""\nraise SystemExit("run!")\nclass A:\n    """Of A."""\n    def f(self):\n        """Of f."""\n'
    )
    assert found._docstrings(source) == ["Top.\n\nOf A.\n\nOf f."]


def test_c_and_cpp_headers_are_told_apart(tmp_path: Path) -> None:
    c, cpp = tmp_path / "c.h", tmp_path / "cpp.h"
    c.write_text("#include <stdio.h>\nint main(void);\n")
    cpp.write_text("namespace a {\ntemplate <class T> struct B {};\n}\n")
    assert found._c(c) and not found._cpp(c)
    assert found._cpp(cpp) and not found._c(cpp)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"def broken(:\n" + b'"""\n"""\n' * 4], ids=["no text", "no Python"])
def test_a_file_that_is_not_what_its_name_says_is_passed_over(tmp_path: Path, content: bytes) -> None:
    source = tmp_path / "module.py"
    source.write_bytes(content)
    assert list(found._texts_of(DOMAINS["docs"], source)) == []


def test_a_long_file_is_cut_after_a_whole_line(tmp_path: Path) -> None:
    source = tmp_path / "long.py"
    source.write_text("überlang = 1\n" * 10_000)
    (text,) = found._start(source)
    assert DOCUMENT_BYTES_MAX - 20 < len(text.encode()) <= DOCUMENT_BYTES_MAX
    assert text.endswith("= 1\n")
