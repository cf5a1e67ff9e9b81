"""The one place where text that somebody else wrote becomes fit to be shown.

Escaping is left to the templates, which do it always; here goes what escaping leaves alone: control characters, marks
that turn the direction of reading around, invisible characters, piles of accents, and length.
"""

from __future__ import annotations

import re
import unicodedata
from itertools import groupby

CHARS_MAX = 512
"""What any single text on a page is cut to."""
WORD_CHARS_MAX = 64
"""What a word of a peer is cut to."""
ACCENTS_MAX = 2
"""Combining marks that one letter may carry; more of them paint over the lines around."""
ID_CHARS = 8

_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")
_SPACES = frozenset({"Zs", "Zl", "Zp"})
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def clean(text: str, chars_max: int = CHARS_MAX) -> str:
    """`text` on one line, without what cannot be seen, and cut to `chars_max` characters with an ellipsis."""
    # Cut first, generously, so that a huge text costs nothing; what is dropped below may make it shorter still.
    shown = "".join(_visible(unicodedata.normalize("NFC", text[: 4 * chars_max])))
    shown = " ".join(shown.split())
    return shown if len(shown) <= chars_max else shown[: chars_max - 1].rstrip() + "…"


def word(text: str) -> str:
    """A short text of a peer, such as what it says that it does."""
    return clean(text, WORD_CHARS_MAX)


def is_id(text: str) -> bool:
    """Whether `text` can name a page and a file: other ids get neither, though their rows are shown."""
    return _ID.fullmatch(text) is not None


def short_digest(digest: str) -> str:
    """The first characters of a digest, as tables show it."""
    return clean(digest)[:ID_CHARS]


def short_peer(peer: str) -> str:
    """The last characters of a peer id: the first ones are the same for all."""
    return clean(peer)[-ID_CHARS:]


def csv_cell(text: str) -> str:
    """`text` for a table that a spreadsheet may open: nothing in it is taken for a formula."""
    shown = clean(text)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown


def _visible(text: str) -> list[str]:
    """Of each run of characters of a kind what may be shown; spaces of all sorts become plain ones."""
    found: list[str] = []
    for category, run in groupby(text, unicodedata.category):
        if category in _SPACES or category == "Cc":
            found.append(" ")
        elif category[0] == "M":
            found.append("".join(run)[:ACCENTS_MAX])
        elif category[0] != "C":  # no format, surrogate, private or unassigned character
            found.extend(run)
    return found
