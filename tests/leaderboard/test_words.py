"""What a coordinator says on its page: a sentence about its run, and what the model wrote after several rounds."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from web_harness import FROZEN, SMALL, site

from benchmarks.leaderboard.synthetic import ROUND_S
from dipaco_p2p.errors import ConfigError
from leaderboard.web.book import PACE_ROUNDS, Book
from leaderboard.web.site import earned_plot
from leaderboard.web.text import count
from leaderboard.words import (
    BYTES_MAX,
    FILE,
    PROMPT_CHARS_MAX,
    PROMPTS_MAX,
    ROUNDS_KEPT,
    Sample,
    Words,
    check_words,
    read_words,
    side_by_side,
    with_round,
    write_words,
)


def sample(round_: int, *, prompt: str = "It was", text: str = "a dark night", stage: str = "s") -> Sample:
    return Sample(stage=stage, round=round_, path="P0-0", prompt=prompt, text=text)


def overview(**words: object) -> str:
    with site(replace(SMALL, words=replace(Words(), **words))) as (client, _):  # type: ignore[arg-type]
        answer = client.get("/")
    assert answer.status_code == 200
    return answer.text


def test_of_any_number_of_rounds_the_first_the_newest_and_some_between_stay() -> None:
    kept: tuple[Sample, ...] = ()
    for round_ in range(1_000):
        kept = with_round(kept, [sample(round_), sample(round_, prompt="Once")])
        rounds = [each.round for each in kept if each.prompt == "Once"]
        assert rounds[0] == 0 and rounds[-1] == round_ and rounds == sorted(set(rounds)) and len(rounds) <= ROUNDS_KEPT
        assert len(kept) == 2 * len(rounds)
    assert len(rounds) > ROUNDS_KEPT / 2


@pytest.mark.parametrize(("count", "shown"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (9, [0, 4, 8])])
def test_the_first_the_middle_and_the_newest_stand_side_by_side(count: int, shown: list[int]) -> None:
    found = side_by_side([sample(number) for number in range(count)])
    assert [each.round for each in found["It was"]] == shown


@pytest.mark.parametrize(
    ("about", "prompts", "problem"),
    [
        ("x" * 301, (), "301 characters"),
        ("two\nlines", (), "one line"),
        (" padded", (), "one line"),
        ("turned \u202e around", (), "one line"),
        ("", ("x",) * 2, "one twice"),
        ("", ("",), "empty"),
        ("", tuple("abcde"), f"more than {PROMPTS_MAX}"),
        ("", ("x" * (PROMPT_CHARS_MAX + 1),), f"more than {PROMPT_CHARS_MAX}"),
        ("", ("a\x1b[2J",), "one line"),
    ],
)
def test_what_no_run_file_may_say_is_refused(about: str, prompts: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_words(about, prompts)


def test_what_was_written_is_read_and_anything_else_is_nothing(tmp_path: Path) -> None:
    assert read_words(tmp_path) == Words()
    words = Words(about="Zoë's model", samples=(sample(0), sample(3, text="ה\u0000")))
    write_words(tmp_path / "page", words)
    assert read_words(tmp_path / "page") == words
    path = tmp_path / FILE
    for data in (
        b"",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        json.dumps({"about": 3}).encode(),
        json.dumps({"samples": [{"stage": "s", "round": -1, "path": "", "prompt": "", "text": ""}]}).encode(),
        b" " * (BYTES_MAX + 1),
    ):
        path.write_bytes(data)
        assert read_words(tmp_path) == Words(), data[:40]


def test_the_overview_shows_a_sentence_and_texts_of_three_rounds() -> None:
    stage = SMALL.run.stage.id
    samples = tuple(sample(number, text=f"text {number}", stage=stage) for number in range(5))
    page = overview(about="For everybody.", samples=samples)
    assert "<bdi>For everybody.</bdi> Volunteers train this language model together" in page
    assert re.findall(r"<strong>It was</strong> (text \d)<", page) == ["text 0", "text 2", "text 4"]
    assert page.count("the newest</small>") == 1 and "before grid" in page


def test_without_words_the_overview_says_what_it_is_and_shows_no_texts() -> None:
    page = overview()
    assert "Volunteers train this language model together" in page and "What the model writes" not in page


def test_texts_are_in_the_data() -> None:
    with site(replace(SMALL, words=Words(about="Hello", samples=(sample(4),)))) as (client, _):
        [row] = client.get("/api/v1/samples.json").json()["rows"]
        [whole] = client.get("/api/v1/overview.json").json()["rows"]
    assert row == {"stage": "s", "round": 4, "path": "P0-0", "prompt": "It was", "text": "a dark night"}
    assert whole["about"] == "Hello"


# -- how fast, how long, how many


AT_ONCE = replace(SMALL, taken_s=SMALL.rounds[-1].at_s + 60)


def test_the_pace_is_that_of_the_last_rounds() -> None:
    book = Book(AT_ONCE)
    assert book.pace is not None and book.pace.round_s == pytest.approx(ROUND_S)
    stage = SMALL.run.stage
    judged = SMALL.rounds[-1].version
    last = range(judged - PACE_ROUNDS + 1, judged + 1)
    made = [row for row in SMALL.versions if row.stage == stage.id and row.version in last]
    tokens = sum(share.credit for row in made for share in row.shares)
    assert book.pace.tokens_per_s == pytest.approx(tokens / (PACE_ROUNDS * ROUND_S))
    assert book.time_left_s == pytest.approx((stage.rounds - book.round) * ROUND_S)


def test_a_round_that_takes_long_slows_the_pace_and_a_run_that_rests_has_none() -> None:
    late = replace(SMALL, taken_s=SMALL.taken_s + 40 * ROUND_S)
    slowed = Book(late).pace
    assert slowed is not None and slowed.round_s > 4 * ROUND_S
    for resting in (FROZEN, replace(SMALL, state="waiting"), replace(SMALL, state="complete")):
        assert Book(resting).pace is None and Book(resting).time_left_s is None
    assert Book(replace(SMALL, rounds=SMALL.rounds[:1])).pace is None


def test_during_the_warm_up_the_grid_counts_too() -> None:
    run = replace(SMALL.run, rounds_after=100)
    assert Book(replace(AT_ONCE, run=run)).time_left_s == pytest.approx(
        (SMALL.run.stage.rounds - Book(SMALL).round + 100) * ROUND_S
    )


def test_active_are_those_heard_of_in_a_day() -> None:
    first, *others = SMALL.contributors
    rows = [replace(first, last_s=SMALL.taken_s - 86_401), *(replace(row, last_s=SMALL.taken_s - 9) for row in others)]
    assert Book(replace(SMALL, contributors=tuple(rows))).active == len(others)


def test_the_page_of_a_contributor_draws_its_credit_by_round() -> None:
    row = max(SMALL.contributors, key=lambda each: each.credit)
    plot = earned_plot(Book(SMALL), row.peer)
    assert plot is not None and f" to {count(row.credit)} at grid round " in plot.about
    heights = [float(pair.split(",")[1]) for pair in plot.line.split()]
    assert heights == sorted(heights, reverse=True) and len(set(heights)) > 3, "it only rises"
    with site() as (client, _):
        assert plot.about in client.get(f"/contributors/{row.peer}").text
    assert earned_plot(Book(SMALL), "nobody") is None
