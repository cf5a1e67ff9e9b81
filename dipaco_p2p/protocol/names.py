"""The name and the team that a volunteer may give itself: which texts are valid, and how they are shown.

Both are their author's word, signed with its heartbeat. Several peers may say the same, so whoever shows a name shows
the peer's id before it. An invalid name is left out, and never makes a heartbeat unreadable: which characters can be
seen depends on the tables of Unicode that a machine has, and peers must agree on who lives.
"""

from __future__ import annotations

import re
import unicodedata

from ..errors import ConfigError

NAME_CHARS_MAX = 32
"""Of a name, and of a team."""
MARKS_MAX = 2
"""Accents and other combining marks in a row: more of them paint over the lines around."""
BLANK = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Letters and symbols, by Unicode, of which nothing can be seen."""
_LIKE_ID = re.compile(r"(?i)12D3KooW|^(\.\.|…)")
"""A peer id begins so, and a short one in a terminal."""
HINT = f"take up to {NAME_CHARS_MAX} letters, digits, signs and single spaces; without one, others see your id alone"


def read_name(text: str, *, what: str = "name") -> str:
    """`text` as it is signed and shown: composed (NFC), with single spaces between words; empty for no name. Raises
    ConfigError, which does not repeat the text: it may not be fit for a terminal."""
    if not text:
        return ""
    if len(text) > 4 * NAME_CHARS_MAX:  # before any work: composing makes it four times shorter at the most
        raise ConfigError(f"a {what} has at most {NAME_CHARS_MAX} characters, not {len(text)}", hint=HINT)
    composed = "".join(" " if unicodedata.category(char) == "Zs" else char for char in text.strip())
    shown = unicodedata.normalize("NFC", re.sub(" +", " ", composed))
    problem = _problem(shown)
    if problem:
        raise ConfigError(f"a {what} {problem}", hint=HINT)
    return shown


def clean_name(text: str) -> str:
    """What a peer said, in the same form; empty if it is not valid."""
    try:
        return read_name(text)
    except ConfigError:
        return ""


def name_words(name: str, team: str) -> str:
    """`Ada, team Analysts`, for people; empty without either."""
    return ", ".join([*([name] if name else []), *([f"team {team}"] if team else [])])


def _problem(text: str) -> str:
    """What is wrong with a name, in words that follow on it; empty if nothing is."""
    if not text:
        return "is more than spaces"
    if len(text) > NAME_CHARS_MAX:
        return f"has at most {NAME_CHARS_MAX} characters, not {len(text)}"
    unseen = next((char for char in text if char in BLANK or not char.isprintable()), "")
    if unseen:
        return f"is one line of visible characters, without U+{ord(unseen):04X}"
    if _has_piles(text):
        return f"does not begin with an accent, and has at most {MARKS_MAX} on a letter"
    return "does not look like a peer id: that is always shown beside it" if _LIKE_ID.search(text) else ""


def _has_piles(text: str) -> bool:
    """Whether a mark stands on nothing, or on too many others."""
    marks = "".join("m" if unicodedata.category(char)[0] == "M" else "." for char in text)
    return marks.startswith("m") or "m" * (MARKS_MAX + 1) in marks
