"""Names and teams: which texts are valid, in one form, and a line fit for a terminal about those that are not."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco_p2p.errors import ConfigError
from dipaco_p2p.protocol.names import BLANK, MARKS_MAX, NAME_CHARS_MAX, clean_name, name_words, read_name
from leaderboard.web.text import clean


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("Ada", "Ada"),
        ("  Ada \n", "Ada"),
        ("Ada   Lovelace", "Ada Lovelace"),
        ("日本\u3000太郎", "日本 太郎"),
        ("Zoe\u0308", "Zo\u00eb"),
        ("e\u0301" * NAME_CHARS_MAX, "\u00e9" * NAME_CHARS_MAX),
        ("नमस्ते", "नमस्ते"),
        ("שלום", "שלום"),
        ("🇳🇱 1\ufe0f\u20e3", "🇳🇱 1\ufe0f\u20e3"),
        ("<b>&amp; [bold] `x` {{ 7 }}", "<b>&amp; [bold] `x` {{ 7 }}"),
        ("8VhWqZ", "8VhWqZ"),  # six letters are also a word: the id before it tells
        (".", "."),
        ("x" * NAME_CHARS_MAX, "x" * NAME_CHARS_MAX),
    ],
)
def test_a_name_has_one_form(text: str, shown: str) -> None:
    assert read_name(text) == read_name(shown) == clean_name(text) == shown


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (" ", "more than spaces"),
        ("\u00a0\u3000\n", "more than spaces"),
        ("x" * (NAME_CHARS_MAX + 1), "at most 32 characters, not 33"),
        ("x" * 10_240, "at most 32 characters, not 10240"),
        ("two\nlines", r"without U\+000A"),
        ("two\u2028lines", r"without U\+2028"),
        ("a\tb", r"without U\+0009"),
        ("\x1b[31mred", r"without U\+001B"),
        ("\x9b31m", r"without U\+009B"),
        ("\u202egnp.exe", r"without U\+202E"),
        ("a\u2066b", r"without U\+2066"),
        ("a\u200bb", r"without U\+200B"),
        ("\ufeff", r"without U\+FEFF"),
        ("\u3164", r"without U\+3164"),
        ("\u2800" * 3, r"without U\+2800"),
        ("\ue000", r"without U\+E000"),
        ("\udcff", r"without U\+DCFF"),
        ("\U000e0067", r"without U\+E0067"),
        ("\u0301a", "does not begin with an accent"),
        ("Z" + "\u0335" * (MARKS_MAX + 1), "at most 2 on a letter"),
        ("12D3KooWAbCd", "look like a peer id"),
        ("not 12d3koow", "look like a peer id"),
        ("...8VhWqZ", "look like a peer id"),
        ("…8VhWqZ", "look like a peer id"),
    ],
    ids=ascii,
)
def test_an_invalid_name_is_refused_without_being_repeated(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        read_name(text, what="team")
    assert str(caught.value).startswith("a team ") and caught.value.hint
    assert f"{caught.value}{caught.value.hint}".isprintable() and len(str(caught.value)) < 100
    assert clean_name(text) == ""


@given(st.text(max_size=NAME_CHARS_MAX + 4) | st.text("ab .\u0301\u0308\u1100\u1161\u11a8\u00a0\u202e", max_size=40))
def test_whatever_is_said_is_shown_as_one_short_visible_line_or_not_at_all(text: str) -> None:
    shown = clean_name(text)
    assert len(shown) <= NAME_CHARS_MAX and shown.isprintable() and shown == shown.strip()
    assert clean_name(shown) == shown == unicodedata.normalize("NFC", shown)
    assert not BLANK & set(shown) and "  " not in shown and ".." not in shown[:2]
    assert clean(shown) == shown, "pages show it as it is"
    shown.encode()


def test_name_and_team_in_words() -> None:
    assert [name_words(*both) for both in (("Ada", "X"), ("Ada", ""), ("", "X"), ("", ""))] == [
        "Ada, team X",
        "Ada",
        "team X",
        "",
    ]
