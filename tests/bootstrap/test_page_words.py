"""What the coordinator lets its model write, for the page of its run: all of it from the archive, again as it was."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stages_harness import Home
from virtual_time import eventually, play

from bootstrap.archives.writing import TOKENS, PageWords
from bootstrap.runfile import LeaderboardConfig
from bootstrap.use.generate import Request, write_on
from dipaco_p2p.use.folder import GRID, WARMUP, RunFolder
from dipaco_p2p.use.served import FolderPlace
from leaderboard.places import IN_RUN_FOLDER
from leaderboard.words import Sample, Words, read_words, write_words

[PROMPT] = LeaderboardConfig().prompts


@pytest.fixture
def words(made: Home) -> Words:
    return read_words(made.folder / IN_RUN_FOLDER)


def newest(words: Words) -> Sample:
    return words.samples[-1]


def test_each_stage_of_a_run_has_written_and_the_last_round_is_the_newest(made: Home, words: Words) -> None:
    stages = [run.id for name in (WARMUP, GRID) if (run := RunFolder(made.folder).open(name)) is not None]
    assert list(dict.fromkeys(each.stage for each in words.samples)) == stages
    assert newest(words).round == 3 and {each.prompt for each in words.samples} == {PROMPT}
    assert any(each.text for each in words.samples)


async def test_generate_writes_the_same_again(made: Home, words: Words) -> None:
    found = newest(words)
    served = FolderPlace(RunFolder(made.folder, is_read_only=True)).open()
    request = Request(prompt=PROMPT, tokens_max=TOKENS, version=found.round, path=found.path)
    said: list[str] = []
    await write_on(served, request, write=said.append, say=lambda line: None)
    assert "".join(said).startswith(found.text) and found.text


def test_a_prompt_that_is_left_out_hides_what_was_written(made: Home, words: Words, tmp_path: Path) -> None:
    folder = tmp_path / IN_RUN_FOLDER
    write_words(folder, words)
    PageWords(LeaderboardConfig(about="New.", prompts=(PROMPT, "Once upon a time")), tmp_path)
    assert read_words(folder) == Words(about="New.", samples=words.samples)
    for hiding in (LeaderboardConfig(prompts=()), LeaderboardConfig(serve=False), LeaderboardConfig(prompts=("Once",))):
        write_words(folder, words)
        PageWords(hiding, tmp_path)
        assert read_words(folder) == Words()


def test_texts_that_cannot_be_written_keep_no_round_from_being_judged(
    made: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The last round is judged again, as after a crash before it was noted."""

    def broken(*args: Any) -> None:
        raise RuntimeError("no text today")

    monkeypatch.setattr(PageWords, "add", broken)
    home = Home(tmp_path, made.file)
    shutil.copytree(made.folder, home.folder)
    path = home.folder / GRID / "evaluations.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))

    async def scenario() -> None:
        home.start()
        await eventually(lambda: path.read_text() == "".join(lines))
        await home.close()

    with caplog.at_level(logging.ERROR, logger="bootstrap.coordinator.stage"):
        play(scenario)
    assert "no text of round 3 is shown" in caplog.text


def test_without_prompts_nothing_is_asked_of_the_model(tmp_path: Path) -> None:
    words = PageWords(replace(LeaderboardConfig(), prompts=()), tmp_path)
    words.add(None, None)  # type: ignore[arg-type] # they are not looked at
    assert read_words(tmp_path / IN_RUN_FOLDER) == Words()
