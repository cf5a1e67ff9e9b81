"""`plan --probe`: text of several kinds asks for a grid, text of one kind for DiLoCo; its figures are what they say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from e2e_harness import write_corpus, write_run
from typer.testing import CliRunner

from bootstrap.cli import app
from bootstrap.planning.probe import BY_LOT, WHOLE, Kind, Probe, by_document, over_documents, probe
from bootstrap.runfile import load_run_file
from dipaco_p2p.core.model.shards import HeldOut


def held_out(*documents: list[list[int]]) -> HeldOut:
    """Documents of sequences of 40 tokens, each sequence of a few tokens over and over."""
    rows = [np.resize(np.array(sequence, dtype=np.int32), 40) for document in documents for sequence in document]
    numbers = [number for number, document in enumerate(documents) for _ in document]
    return HeldOut(tokens=np.stack(rows), documents=np.array(numbers, dtype=np.int32))


def test_sequences_of_a_document_share_a_cluster_with_documents_of_the_same_words() -> None:
    pears, ships = [[1, 2, 3], [3, 4, 1]], [[7, 8, 9], [9, 6, 8]]
    train = held_out(*(kind for _ in range(4) for kind in (pears, ships)))
    own, other = by_document(train, held_out(ships, pears, [[6, 7]]), clusters=2, seed=0)
    assert len(set(own[:2])) == 1 and np.array_equal(own, np.resize(own[:4], 16)) and own[0] != own[2]
    assert other.tolist() == [own[2], own[2], own[0], own[0], own[2]]


def test_the_error_is_that_of_documents_not_of_their_sequences() -> None:
    values, each = np.array([1.0, 1.0, 0.0, 0.0, 1.0, 0.0]), np.arange(6, dtype=np.int32)
    mean, error = over_documents(values, each)
    assert mean == pytest.approx(0.5) and error == pytest.approx(values.std(ddof=1) / np.sqrt(6))
    together = np.array([0, 0, 1, 1, 2, 3], dtype=np.int32)
    assert over_documents(values, together)[1] > error
    assert over_documents(values, np.zeros(6, dtype=np.int32))[1] == np.inf


def test_what_is_not_surely_ahead_is_diloco() -> None:
    kinds = (
        Kind(name="a", seen=32, routed=3.0, best=2.9, random=3.4),
        Kind(name=BY_LOT, seen=32, routed=2.5, best=2.5, random=2.5),
    )
    whole = Kind(name=WHOLE, seen=32, routed=1.0, best=1.0, random=9.0)
    kinds = (*kinds[:1], whole, kinds[1])
    one = Probe(clusters=2, warmup_steps=9, steps=9, sequences=9, kinds=kinds, diloco=3.1, ahead=0.1, error=0.06)
    assert one.best.name == "a" and not one.is_grid and list(one.lines())[-1].startswith("DiLoCo: a gains 0.100 nats")
    assert kinds[0].gap == pytest.approx(0.5) and kinds[0].gain == pytest.approx(0.4)
    assert replace(one, error=0.03).is_grid and not replace(one, error=0.0, ahead=0.009).is_grid


def mixed(folder: Path) -> Path:
    """A run file on text of four made-up vocabularies."""
    path = write_run(folder / "run.toml", write_corpus(folder / "corpus.jsonl"), rounds=4, min_paths=2)
    path.write_text(path.read_text().replace("steps = 2", "steps = 2\nlr = 0.01").replace("modules = 2", "modules = 4"))
    return path


def test_text_of_four_vocabularies_asks_for_a_grid(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["plan", str(mixed(tmp_path)), "--probe", "--probe-steps", "80", "--json"])
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)["probe"]
    kinds = {kind["name"]: kind for kind in found["kinds"]}
    assert list(kinds)[-1] == BY_LOT and {"k-means, 32 tokens", "tiny models, 32 tokens"} < set(kinds)
    assert "k-means, 128 tokens" not in kinds, "the sequences have 72"
    assert all(kind["best"] <= kind["routed"] for kind in kinds.values())
    assert kinds[found["best"]]["gap"] > 3 * kinds[BY_LOT]["gap"]
    assert found["says"] == "grid" and found["ahead"] > 3 * found["error"] > 0
    assert kinds[found["best"]]["gain"] > 0.05 > abs(kinds[BY_LOT]["gain"])


def test_text_of_one_vocabulary_asks_for_diloco(tmp_path: Path) -> None:
    path = mixed(tmp_path)
    texts = [json.loads(line)["text"] for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    lots = np.random.default_rng(0)
    words = lots.permutation(" ".join(texts).split())
    parts = np.array_split(words, len(texts))
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": " ".join(part)}) + "\n" for part in parts))
    found = probe(load_run_file(path), steps=80)
    assert not found.is_grid, list(found.lines())
    assert len(list(found.lines())) == len(found.kinds) + 4
