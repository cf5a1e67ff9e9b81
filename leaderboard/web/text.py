"""How words and numbers are shown: the one place where text that somebody else wrote becomes fit to be shown.

Escaping is left to the templates, which do it always; here goes what escaping leaves alone: control characters, marks
that turn the direction of reading around, invisible characters, piles of accents, and length. Figures are written as
people read them; each of their functions takes None for what is not known.
"""

from __future__ import annotations

import math
import re
import unicodedata
from datetime import UTC, datetime
from itertools import groupby

from dipaco_p2p.protocol.signing import PeerId, short

CHARS_MAX = 512
"""What any single text on a page is cut to."""
WORD_CHARS_MAX = 64
"""What a word of a peer is cut to."""
ACCENTS_MAX = 2
"""Combining marks that one letter may carry; more of them paint over the lines around."""
DIGEST_CHARS = 8

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
    return clean(digest)[:DIGEST_CHARS]


def short_peer(peer: str) -> str:
    """As every command writes it, so that one can be found by the other: `...W7HCKx`."""
    return f"...{short(PeerId(clean(peer)))}"


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


# -- figures

UNKNOWN = "–"
_STEPS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_AGES = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"))


def count(value: float | None) -> str:
    """Three figures and a letter, as in `12.3 M`; whole numbers below ten thousand as they are."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    for step, letter in _STEPS:
        if abs(value) >= step * (10 if step == 1e3 else 1):
            return f"{_three(value / step)} {letter}"
    return f"{value:.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.1f}"


def whole(value: float | None) -> str:
    """All its figures, in groups of three."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:,.0f}"


def size(value: float | None) -> str:
    """Bytes, in the unit that leaves three figures."""
    if value is None:
        return UNKNOWN
    for step, unit in _BYTES:
        if value >= step:
            return f"{_three(value / step)} {unit}"
    return f"{value:.0f} B"


def loss(value: float | None) -> str:
    """Nats per token."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:.4f}"


def gain(value: float | None) -> str:
    """A difference of losses, with its sign; a true minus is as wide as a plus."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:+.4f}".replace("-", "−")


def perplexity(value: float | None) -> str:
    """That of a loss in nats per token."""
    return UNKNOWN if value is None or not value < 50 else _three(math.exp(value))


def share(value: float | None) -> str:
    """A part of one, in percent."""
    return UNKNOWN if value is None else f"{100 * value:.1f} %"


def span(then_s: float | None, now_s: float) -> str:
    """How long since, in one unit; below a minute says so, so that a page stays the same between two minutes."""
    if then_s is None:
        return UNKNOWN
    past_s = now_s - then_s
    return next((f"{past_s // step_s:.0f} {unit}" for step_s, unit in _AGES if past_s >= step_s), "< 1 min")


def age(then_s: float | None, now_s: float) -> str:
    """How long ago; the same units."""
    if then_s is None:
        return UNKNOWN
    return f"{span(then_s, now_s)} ago" if now_s - then_s >= 60 else "just now"


def age_exact(then_s: float | None, now_s: float) -> str:
    """The same with seconds."""
    if then_s is None:
        return UNKNOWN
    return age(then_s, now_s) if now_s - then_s >= 60 else f"{max(now_s - then_s, 0):.0f} s ago"


def lasting(seconds: float | None) -> str:
    """A time that something takes, in one unit."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    return span(0.0, seconds) if seconds >= 120 else f"{seconds:.0f} s"


def moment(at_s: float | None) -> str:
    """A time of day and date, in UTC, to the minute."""
    return UNKNOWN if (when := _utc(at_s)) is None else f"{when:%Y-%m-%d %H:%M} UTC"


def machine_time(at_s: float | None) -> str:
    """The same for programs (ISO 8601)."""
    return "" if (when := _utc(at_s)) is None else f"{when:%Y-%m-%dT%H:%M:%SZ}"


def _utc(at_s: float | None) -> datetime | None:
    """None for what no calendar has: the time may be a peer's word."""
    if at_s is None or not 0 <= at_s < 253_402_300_800:
        return None
    return datetime.fromtimestamp(at_s, UTC)


def _three(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"
