"""The experiment's text: no document in two parts, parts that show every domain, and the same split for everyone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.methods import data as methods_data
from benchmarks.methods.data import PARTS, Data, read_documents, split_sequences
from dipaco_p2p.config import PREFIX_TOKENS
from dipaco_p2p.errors import CorpusError

CONTEXT = 64
LENGTHS = np.arange(1, 1001)


def corpus(**documents: int) -> tuple[list[str], list[np.ndarray]]:
    """Documents of four sequences each; the first token of every sequence tells its document."""
    names, arrays = [], []
    for name, count in documents.items():
        for _ in range(count):
            names.append(name)
            arrays.append(np.full(4 * CONTEXT, len(arrays), dtype=np.int32))
    return names, arrays


def split(**documents: int) -> Data:
    return split_sequences(*corpus(**documents), LENGTHS, context=CONTEXT)


def test_no_document_is_in_two_parts():
    data = split(law=120, novels=80)
    seen = [set(getattr(data, part).tokens[:, 0].tolist()) for part in PARTS]
    assert len(set.union(*seen)) == sum(map(len, seen)) == 200
    numbers = [set(getattr(data, part).documents.tolist()) for part in PARTS]
    assert len(set.union(*numbers)) == sum(map(len, numbers)) == 200


def test_of_few_long_documents_pieces_count_as_documents():
    names, arrays = ["novels"] * 6, [np.full(64 * 50, n, dtype=np.int32) for n in range(6)]
    data = split_sequences(names, arrays, LENGTHS, context=CONTEXT)
    assert all(len(getattr(data, part)) for part in PARTS)
    assert np.bincount(data.train.documents).max() == methods_data.PIECE_SEQUENCES


def test_no_document_makes_up_what_is_reported():
    names = ["law"] * 200
    arrays = [np.full(64 * (100 if number % 5 else 2), number, dtype=np.int32) for number in range(200)]
    data = split_sequences(names, arrays, LENGTHS, context=CONTEXT)
    for part in ("router", "tune", "report"):
        sizes = np.bincount(getattr(data, part).documents)
        assert set(sizes[sizes > 0].tolist()) == {2, methods_data.PER_DOCUMENT}
    assert np.bincount(data.train.documents).max() == 100


def test_reported_parts_have_equal_numbers_of_each_domain_as_far_as_it_goes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(methods_data, "SEQUENCES_MAX", {"router": 60, "tune": 30, "report": 60})
    data = split(large=400, middle=200, small=50)
    assert data.domains == ("large", "middle", "small")
    of_domain = np.bincount(data.report.domains)
    assert of_domain.sum() == 60 and of_domain[0] == of_domain[1] and of_domain[2] == min(16, 20)


def test_bytes_are_those_of_the_tokens_that_count():
    data = split(law=100)
    expected = [LENGTHS[row[PREFIX_TOKENS:]].sum() for row in data.report.tokens]
    assert data.report.bytes.tolist() == expected


def test_the_file_gives_back_the_same(tmp_path: Path):
    data = split(law=100, novels=60)
    data.save(tmp_path / "data.npz")
    again = Data.load(tmp_path / "data.npz")
    assert again.domains == data.domains and len(list(tmp_path.iterdir())) == 1
    for part in PARTS:
        for field in ("tokens", "documents", "domains", "bytes"):
            assert (getattr(getattr(again, part), field) == getattr(getattr(data, part), field)).all()


def test_too_little_text_is_one_clear_line():
    with pytest.raises(CorpusError, match="only 2 documents of 64 tokens"):
        split(law=2)


def test_several_corpora_get_near_equal_shares(tmp_path: Path):
    for name, size in (("many", 40), ("few", 8)):
        lines = ['{"text": "' + f"{name} {number} " * 20 + '"}' for number in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), "utf-8")
    sources = [str(tmp_path / f"{name}.jsonl") for name in ("many", "few")]
    found = read_documents(sources, bytes_max=4000)
    counts = {name: sum(document.domain == name for document in found) for name in ("many", "few")}
    assert counts["few"] == 8 and 8 < counts["many"] < 40
