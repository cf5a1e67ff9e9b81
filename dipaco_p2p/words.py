"""Others' words, as they may stand on a terminal and in a log."""

from __future__ import annotations

LINE_CHARS = 1000
"""Of an error; our own longest one lists all the keys of a table."""


def printable(text: str) -> str:
    """Without line breaks and what would move a terminal's cursor: some words are other peers'."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def printable_line(text: str) -> str:
    """The same, not longer than `LINE_CHARS`: nobody's words push others' off the screen."""
    return printable(text if len(text) <= LINE_CHARS else f"{text[:LINE_CHARS]}...")
