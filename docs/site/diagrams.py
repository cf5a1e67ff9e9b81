"""State diagrams as SVG: the site draws what pages write for mermaid, without a script and without asking anybody.

What is drawn: `stateDiagram-v2` with `[*] --> A` and `A --> B: what happens`. States stand below each other in the
order in which they are reached. Steps to the next one go straight down, those that skip one run on the left, those
back on the right.
"""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

KIND = "stateDiagram-v2"
LINE = re.compile(r"(\[\*\]|\w+) --> (\w+)(?:: (.+))?")

BOX_WIDTH, BOX_HEIGHT, ROW = 110.0, 34.0, 100.0
CHAR_WIDTH, LINE_HEIGHT = 7.0, 16.0
LABEL_CHARS = 14
HEAD = 'viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto"'
"""Of the marker that is an arrow's head."""
BULGE = 36.0
"""How far an arc goes out beyond what it must clear."""


class Unreadable(ValueError):
    """A diagram of a kind that is not drawn here."""


@dataclass(frozen=True, slots=True)
class Edge:
    """From one state to another, by any of some events."""

    start: str
    end: str
    label: str


@dataclass(slots=True)
class Drawing:
    """What is drawn so far, and how far it reaches."""

    parts: list[str] = field(default_factory=list)
    left: float = -BOX_WIDTH / 2
    right: float = BOX_WIDTH / 2

    def text(self, label: str, x: float, y: float, *, anchor: str) -> None:
        """A label beside a line: `anchor` is the side of it where `x` is."""
        lines = textwrap.wrap(label, LABEL_CHARS)
        width = CHAR_WIDTH * max(map(len, lines), default=0)
        self.left = min(self.left, x - width if anchor == "end" else x)
        self.right = max(self.right, x + width if anchor == "start" else x)
        top = y - (len(lines) - 1) * LINE_HEIGHT / 2 + 4
        for number, line in enumerate(lines):
            place = f'x="{x:g}" y="{top + number * LINE_HEIGHT:g}" text-anchor="{anchor}"'
            self.parts.append(f"<text {place}>{escape(line)}</text>")

    def line(self, path: str, marker: str) -> None:
        self.parts.append(f'<path d="{path}" marker-end="url(#{marker})"/>')


def svg(source: str) -> str:
    """The picture of one diagram; raises Unreadable for what it does not know."""
    start, edges = read(source)
    order = ranked(start, edges)
    place = {state: number * ROW for number, state in enumerate(order)}
    marker = "arrow-" + hashlib.sha256(source.encode()).hexdigest()[:8]
    drawing = Drawing()
    for edge in sorted(edges, key=lambda edge: abs(place[edge.end] - place[edge.start])):
        _draw(drawing, edge, place[edge.start], place[edge.end], marker)
    boxes = "".join(_box(state, place[state]) for state in order)
    top, bottom = -ROW / 2, place[order[-1]] + ROW / 2
    box = f"{drawing.left - 8:g} {top:g} {drawing.right - drawing.left + 16:g} {bottom - top:g}"
    said = "; ".join(f"from {edge.start} to {edge.end}: {edge.label}" for edge in edges)
    return (
        f'<svg viewBox="{box}" width="{drawing.right - drawing.left + 16:g}" role="img" '
        f'aria-label="{escape(f"States, beginning with {start}. {said}")}">'
        f'<defs><marker id="{marker}" {HEAD}>'
        f'<path d="M0 0 8 4 0 8z" class="head"/></marker></defs>{"".join(drawing.parts)}{boxes}</svg>'
    )


def read(source: str) -> tuple[str, list[Edge]]:
    """The first state, and the edges; events that lead from one state to the same other one are one edge."""
    kind, *lines = [line.strip() for line in source.strip().splitlines()]
    if kind != KIND:
        raise Unreadable(f"`{kind}` is not drawn, only `{KIND}`")
    start, found = "", dict[tuple[str, str], list[str]]()
    for line in lines:
        match = LINE.fullmatch(line)
        if match is None:
            raise Unreadable(f"`{line}` is no `A --> B: event`")
        if match[1] == "[*]":
            start = match[2]
        else:
            found.setdefault((match[1], match[2]), []).append(match[3] or "")
    if not start:
        raise Unreadable("no `[*] --> A` says where it starts")
    return start, [Edge(one, other, " or ".join(filter(None, labels))) for (one, other), labels in found.items()]


def ranked(start: str, edges: list[Edge]) -> list[str]:
    """All states, each behind those from which it is reached without going around in a circle."""
    order: list[str] = []

    def visit(state: str, above: tuple[str, ...]) -> None:
        for after in _after(state, edges):
            if after not in above and after != state and after not in order:
                visit(after, (*above, state))
        if state not in order:
            order.insert(0, state)

    visit(start, ())
    return order + sorted({state for edge in edges for state in (edge.start, edge.end)} - set(order))


def _after(state: str, edges: list[Edge]) -> Iterator[str]:
    return (edge.end for edge in edges if edge.start == state)


def _box(state: str, y: float) -> str:
    corner = f'x="{-BOX_WIDTH / 2:g}" y="{y - BOX_HEIGHT / 2:g}" width="{BOX_WIDTH:g}" height="{BOX_HEIGHT:g}" rx="8"'
    return f'<rect {corner}/><text class="state" x="0" y="{y + 5:g}" text-anchor="middle">{escape(state)}</text>'


def _draw(drawing: Drawing, edge: Edge, start_y: float, end_y: float, marker: str) -> None:
    side = BOX_WIDTH / 2
    if edge.start == edge.end:
        out = side + BULGE
        bend = f"C{out:g} {start_y - 24:g} {out:g} {start_y + 24:g} {side:g} {start_y + 9:g}"
        drawing.line(f"M{side:g} {start_y - 9:g}{bend}", marker)
        drawing.text(edge.label, side + BULGE * 0.8 + 4, start_y, anchor="start")
    elif end_y - start_y == ROW:
        drawing.line(f"M0 {start_y + BOX_HEIGHT / 2:g}V{end_y - BOX_HEIGHT / 2:g}", marker)
        drawing.text(edge.label, 8, (start_y + end_y) / 2, anchor="start")
    elif end_y > start_y:
        out = drawing.left - BULGE
        _arc(drawing, edge, -side, out, start_y, end_y, marker)
    else:
        _arc(drawing, edge, side, drawing.right + BULGE, start_y, end_y, marker)


def _arc(drawing: Drawing, edge: Edge, side: float, out: float, start_y: float, end_y: float, marker: str) -> None:
    """From one box around to another, reaching `out`; its label stands beyond it."""
    turn = 10 if end_y > start_y else -10
    control = side + (out - side) * 4 / 3
    bend = f"C{control:g} {start_y + 3 * turn:g} {control:g} {end_y - 3 * turn:g} {side:g} {end_y - turn / 2:g}"
    drawing.line(f"M{side:g} {start_y + turn / 2:g}{bend}", marker)
    is_left = out < 0
    drawing.left, drawing.right = min(drawing.left, out), max(drawing.right, out)
    drawing.text(
        edge.label, out - 6 if is_left else out + 6, (start_y + end_y) / 2, anchor="end" if is_left else "start"
    )
