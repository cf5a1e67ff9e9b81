"""A grid that grows with a second corpus: new paths get the new text, the others keep theirs, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stages_harness import Home, run_file
from test_growth import ROUNDS, decreed, ended_by_growth, problems
from tiny_run import SEED_NUMBER, signer
from virtual_time import eventually, play

from bootstrap.control.decrees import source_here, told_all
from bootstrap.control.requests import Control, Request
from bootstrap.coordinator.stage import INCOMPARABLE
from bootstrap.folder import write_stage
from bootstrap.genesis.growth import grow
from bootstrap.recovery.backup import back_up, restore
from bootstrap.runfile import RunFile
from bootstrap.text.added import joined, texts_of
from dipaco_p2p.config import RoutingConfig
from dipaco_p2p.core.model.shards import decode_held_out, decode_shard, encode_held_out
from dipaco_p2p.core.routing.grown import continued, opened
from dipaco_p2p.errors import ConfigError, CorpusError, DipacoError, IntegrityError
from dipaco_p2p.node.run import Run
from dipaco_p2p.protocol.documents import BlobRef, seal
from dipaco_p2p.swarm.identity import write as write_key
from dipaco_p2p.use.best_rounds import read_evaluations
from dipaco_p2p.use.folder import GRID, RunFolder

PLAIN = RoutingConfig()


def write_other(path: Path, *, documents: int = 60, words: int = 200) -> Path:
    """Text in letters that `write_corpus` does not use, in two vocabularies, as JSONL."""
    chance = random.Random(2)
    topics = [["".join(chance.choices(letters, k=3)) for _ in range(40)] for letters in ("hjkq", "vwxz")]
    texts = (" ".join(chance.choices(topics[number % 2], k=words)) for number in range(documents))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def rows(folder: RunFolder, run: Run, ref: BlobRef, *, is_shard: bool) -> list[bytes]:
    data, model = folder.store(run.manifest.stage).get(ref.digest), run.config.model
    assert data is not None
    read: Callable[..., Any] = decode_shard if is_shard else decode_held_out
    return [row.tobytes() for row in read(data, vocab_size=model.vocab_size, context=model.context).tokens]


def shards(folder: RunFolder, run: Run) -> list[set[bytes]]:
    return [set(rows(folder, run, shard.blob, is_shard=True)) for shard in run.manifest.shards]


def test_a_run_grows_with_a_second_corpus_though_its_coordinator_dies_and_the_source_has_gone(
    tmp_path: Path, corpus: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = run_file(corpus, rounds=ROUNDS, routing=RoutingConfig(reshard_rounds=(11,)))
    home, other = Home(tmp_path, file), write_other(tmp_path / "other.jsonl")

    async def scenario() -> None:
        home.start()
        await home.join(1, 2, 3)
        await eventually(lambda: min(home.heads(GRID).values(), default=0) >= 2)
        row = await decreed(home, "1,4", corpus=str(other))
        first, second = told_all(row).splitlines()
        assert first == f"decree 1: grow to 1x4 after round {row['to']}, with the text {row['corpus'][:8]}"
        assert second.startswith("the new text: 60 documents; ") and "for 2 new paths" in second
        await home.die()
        other.unlink()
        home.start()
        await eventually(lambda: min(home.heads("grid-2").values(), default=0) >= 1)
        await home.die()
        home.start()
        await eventually((home.folder / "grid-2" / "finished.json").exists, limit_s=4000)
        await home.close()

    play(scenario)
    folder = RunFolder(home.folder)
    _, grid, grown = folder.stages()
    assert str(grown.topology) == "1x4" and problems(folder) == []
    signed = [path.read_bytes() for path in (home.folder / "decrees").rglob("*.json")]
    signed += [path.read_bytes() for path in home.folder.glob("*/documents/*.json")]
    assert signed and not any(b"other" in each for each in signed), "where it came from is nobody's business"
    for row in read_evaluations(home.folder / "grid-2" / "evaluations.jsonl"):
        first, second = row["texts"]
        assert first["tokens"] + second["tokens"] == row["tokens"]
        whole = first["loss"] * first["tokens"] + second["loss"] * second["tokens"]
        assert whole == pytest.approx(row["loss"] * row["tokens"])
    assert not any("texts" in row for row in read_evaluations(home.folder / GRID / "evaluations.jsonl"))
    said = capfd.readouterr().out
    assert INCOMPARABLE in said and "(the run's first text " in said
    resharded = grown.shardings[-1].document
    texts = texts_of(file, folder, "grid-2")[1]
    assert sum(ref.sequences for ref in resharded.shards) == sum(len(text.train) for text in texts), "of both texts"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunFile]:
    """The folder of a coordinator whose grid has just ended by a decree that brings text, and its run file."""
    folder = tmp_path_factory.mktemp("with-text")
    return ended_by_growth(folder, corpus=str(write_other(folder / "other.jsonl")))


def copied(ended: tuple[Path, RunFile], to: Path) -> tuple[RunFolder, RunFile]:
    shutil.copytree(ended[0], to)
    return RunFolder(to), ended[1]


def test_the_new_paths_get_the_new_text_and_each_old_one_keeps_its_own(
    ended: tuple[Path, RunFile], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, file = copied(ended, tmp_path / "run")
    grown, grid = grow(file, folder, signer(SEED_NUMBER)), folder.open(GRID)
    assert grid is not None
    own = continued(before=grid.topology, after=grown.topology)
    new = opened(before=grid.topology, after=grown.topology)
    assert (own.tolist(), new.tolist()) == ([0, 2], [1, 3])
    first, second = ({row.tobytes() for row in text.train.tokens} for text in texts_of(file, folder, "grid-2")[1])
    before, after = shards(folder, grid), shards(folder, grown)
    assert set().union(*(after[number] for number in new)) == second
    assert set().union(*(after[number] for number in own)) == first
    kept = [len(before[place] & after[number]) / len(before[place]) for place, number in enumerate(own)]
    assert kept == [1.0, 1.0], "to the last sequence"
    assert min(len(after[number]) for number in new) > 8
    for name in ("validation", "holdout", "router"):
        ref = grown.manifest.router_split if name == "router" else getattr(grown.manifest, name)
        found = rows(folder, grown, ref, is_shard=False)
        texts = [getattr(text, name).tokens for text in texts_of(file, folder, "grid-2")[1]]
        assert found == [row.tobytes() for row in np.concatenate(texts)]
        assert not set(found) & (first | second), "what is held out is not trained on"
    words = "the router sends 100% of the new held-out text to the 2 paths opened for it, and "
    line = next(line for line in capfd.readouterr().out.splitlines() if line.startswith(words))
    assert int(line.removeprefix(words).split("%")[0]) >= 90, line


def test_whoever_makes_it_again_makes_the_same_also_from_a_backup(ended: tuple[Path, RunFile], tmp_path: Path) -> None:
    folder, file = copied(ended, tmp_path / "run")
    write_key(folder.root / "identity.key", bytes([SEED_NUMBER]) * 32)
    back_up(folder.root, tmp_path / "backup.tar", now_s=1.0)
    restore(tmp_path / "backup.tar", tmp_path / "again")
    made = [grow(file, each, signer(SEED_NUMBER)) for each in (folder, RunFolder(tmp_path / "again"))]
    assert made[0].id == made[1].id


def test_a_text_that_was_lost_or_changed_on_disk_is_told_in_one_line(
    ended: tuple[Path, RunFile], tmp_path: Path
) -> None:
    folder, file = copied(ended, tmp_path / "run")
    [path] = folder.root.glob("text-*.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"\7")
    with pytest.raises(IntegrityError, match="was damaged on disk"):
        grow(file, folder, signer(SEED_NUMBER))
    path.unlink()
    with pytest.raises(IntegrityError, match="cannot be read"):
        grow(file, folder, signer(SEED_NUMBER))
    assert not folder.has("grid-2")


@pytest.mark.parametrize("change", ["added", "first", "missing"])
def test_held_out_text_that_is_not_what_was_decreed_is_found_by_verify(
    ended: tuple[Path, RunFile], tmp_path: Path, change: str
) -> None:
    folder, file = copied(ended, tmp_path / "run")
    grown = grow(file, folder, signer(SEED_NUMBER))
    assert problems(RunFolder(folder.root)) == []
    data = folder.store("grid-2").get(grown.manifest.validation.digest)
    model = grown.config.model
    assert data is not None
    part = decode_held_out(data, vocab_size=model.vocab_size, context=model.context)
    tokens = part.tokens.copy()
    tokens[0 if change == "first" else -1] = tokens[len(tokens) // 2]
    ref = folder.store("grid-2").put(encode_held_out(replace(part, tokens=tokens)))
    write_stage(folder.store("grid-2"), seal(signer(SEED_NUMBER), replace(grown.manifest, validation=ref)))
    if change == "missing":  # as at a further seed node, which can only say that nothing was taken away
        next(folder.root.glob("text-*")).unlink()
    found = problems(RunFolder(folder.root))
    assert len(found) == (change != "missing"), found
    assert all("its validation sequences are not those of the grid and of the decreed text" in each for each in found)


def bad_sources(folder: Path, corpus: Path) -> list[tuple[str, str]]:
    """Sources that cannot be had, with words of what is said of each."""
    few = write_other(folder / "few.jsonl", documents=4, words=30)
    (folder / "empty.jsonl").write_text("")
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 1000)
    (folder / "binary.txt").write_bytes(bytes(range(256)) * 20)
    (folder / "binary.jsonl").write_bytes(bytes(range(256)) * 20)
    (folder / "picture.png").write_bytes(b"\x89PNG" * 100)
    (folder / "none").mkdir()
    return [
        (str(folder / "missing.jsonl"), "does not exist"),
        (str(folder / "empty.jsonl"), "no document with text"),
        (str(folder / "latin.txt"), "is not UTF-8 text"),
        (str(folder / "binary.txt"), "is not UTF-8 text"),
        (str(folder / "binary.jsonl"), "is not a JSON object|is not UTF-8 text|cannot be read"),
        (str(folder / "picture.png"), "is of an unknown kind"),
        (str(folder / "none"), "holds no corpus file"),
        (str(few), "the new text has . sequences|only . documents have"),
        (str(corpus), "all 160 documents of the new text are in the run already"),
    ]


def test_bad_text_and_repeated_decrees_get_one_line_and_leave_nothing_behind(tmp_path: Path, corpus: Path) -> None:
    home = Home(tmp_path, run_file(corpus, rounds=ROUNDS, routing=PLAIN))
    other = write_other(tmp_path / "other.jsonl")

    def kept() -> list[Path]:
        return sorted(home.folder.glob("text-*")) + sorted((home.folder / "decrees").rglob("*.json"))

    async def scenario() -> None:
        home.start()
        await home.join(1, 2)
        await eventually(lambda: min(home.heads(GRID).values(), default=0) >= 1)
        for source, words in bad_sources(tmp_path, corpus):
            with pytest.raises(CorpusError, match=words) as caught:
                await decreed(home, "1,4", corpus=source)
            assert caught.value.exit_code == 2 and "\n" not in str(caught.value), source
            assert kept() == [], source
        with pytest.raises(ConfigError, match="the grid is 1x2 already: no path would be opened for the new text"):
            await decreed(home, "1,2", corpus=str(other))
        with pytest.raises(CorpusError, match=r"sequences to train on, but the new paths need 1584"):
            await decreed(home, "1,200", corpus=str(other))
        assert kept() == []
        # Half of what comes is in the run already, and some of it twice.
        both = tmp_path / "both.jsonl"
        both.write_text(corpus.read_text() + 2 * other.read_text())
        row = await decreed(home, "1,4", version=6, corpus=str(both))
        assert "60 documents, left out: 220 duplicates; " in told_all(row)
        before = kept()
        assert len(before) == 2
        for again in (str(both), str(other), str(tmp_path / "missing.jsonl")):
            with pytest.raises(ConfigError, match="a growth to 1x4 after round 6 is decreed already"):
                await decreed(home, "1,4", corpus=again)
            assert kept() == before
        await home.close()

    play(scenario)


def test_what_was_read_for_a_growth_that_came_too_late_is_removed(tmp_path: Path, corpus: Path) -> None:
    home = Home(tmp_path, run_file(corpus, rounds=ROUNDS, routing=PLAIN))
    other = write_other(tmp_path / "other.jsonl")

    async def scenario() -> None:
        home.start()
        await home.join(1, 2)
        await eventually(lambda: min(home.heads(GRID).values(), default=0) >= 1)
        left = home.folder / f"text-{'ab' * 32}.safetensors"
        left.write_bytes(b"of a coordinator that died before it signed")
        late, first = await asyncio.gather(
            decreed(home, "1,4", version=6, corpus=str(other)), decreed(home, "1,3", version=6), return_exceptions=True
        )
        assert isinstance(first, dict) and first["corpus"] is None
        assert isinstance(late, ConfigError) and "a growth to 1x3 after round 6 is decreed already" in str(late)
        assert list(home.folder.glob("text-*")) == []
        await home.close()

    play(scenario)


def test_only_a_growth_brings_text(tmp_path: Path, corpus: Path) -> None:
    home = Home(tmp_path, run_file(corpus, rounds=ROUNDS, routing=PLAIN))

    async def scenario() -> None:
        home.start()
        await eventually(lambda: home.seed is not None and home.seed.stage() is not None)
        control = Control()
        assert home.seed is not None
        home.seed.add_verbs(control)
        with pytest.raises(DipacoError, match="`freeze` brings no text"):
            answer = control.answer(Request(ask="freeze", reason="x", corpus="found"))
            assert not isinstance(answer, dict)
            await answer
        await home.close()

    play(scenario)


def test_a_source_is_meant_from_where_the_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new.txt").write_text("text")
    assert source_here("new.txt") == str(tmp_path / "new.txt")
    assert [source_here(each) for each in ("", "found", "org/name")] == ["", "found", "org/name"]


def test_documents_of_all_texts_keep_different_numbers(ended: tuple[Path, RunFile], tmp_path: Path) -> None:
    folder, file = copied(ended, tmp_path / "run")
    texts = texts_of(file, folder, "grid-2")[1]
    both = joined(texts)
    parts = [getattr(both, name).documents for name in ("train", "validation", "holdout", "router")]
    apart = [getattr(text, name).documents for text in texts for name in ("train", "validation", "holdout", "router")]
    assert len(np.unique(np.concatenate(parts))) == sum(len(np.unique(each)) for each in apart)
    assert texts_of(file, folder, GRID)[1][1:] == [], "the stage before has its own text alone"
