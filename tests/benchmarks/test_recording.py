"""The recording of a terminal: what is written down plays back as it was."""

from __future__ import annotations

import json

import pyte

from benchmarks.recording import COLUMNS, LINES, WAIT_MAX_S, Frame, cast, plain


def frame(**lines: str) -> Frame:
    """A screen with these lines, by number."""
    return tuple(lines.get(f"n{number}", "") for number in range(LINES))


FRAMES = [
    (0.5, frame(n0="joining", n1="\x1b[0;1;32m●\x1b[0m alive")),
    (1.0, frame(n0="joining", n1="gone")),
    (90.0, frame(n1="longer than before it was", n29="the last line")),
    (90.5, frame(n1="short")),
]


def played(lines: list[str]) -> list[tuple[float, list[str]]]:
    screen = pyte.Screen(COLUMNS, LINES)
    stream, found = pyte.Stream(screen), []
    for at_s, kind, data in map(json.loads, lines[1:]):
        assert kind == "o"
        stream.feed(data)
        found.append((at_s, [line.rstrip() for line in screen.display]))
    return found


def test_a_cast_plays_what_was_on_the_screen_and_cuts_the_waiting() -> None:
    lines = list(cast(FRAMES))
    assert json.loads(lines[0])["version"] == 2
    found = played(lines)
    assert [shown for _, shown in found] == [[plain(line) for line in each] for _, each in FRAMES]
    assert [at_s for at_s, _ in found] == [0.5, 1.0, 1.0 + WAIT_MAX_S, 1.5 + WAIT_MAX_S]


def test_only_lines_that_changed_are_written() -> None:
    second = json.loads(list(cast(FRAMES))[2])[2]
    assert "gone" in second and "joining" not in second
