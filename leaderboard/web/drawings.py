"""Drawings: lines of losses and of credit, the grid and the heat of its paths, the graph of a version's lineage, and QR
codes. This file says where everything stands; the templates draw it, and colours come from the style sheet."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise

import segno
from markupsafe import Markup

from dipaco_p2p.topology import ModuleId

from ..model import ModuleRow, PathRow, PathState, ShareRow, VersionRow
from . import text
from .book import Book

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 14, 30
POINTS_MAX = 400
"""More points than this are thinned: each stretch keeps its least and its greatest value."""
TICKS = 5
MARKS_MAX = 200
BACK_MAX = 3
"""Rollbacks that stand in words below a drawing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value: a round, and a loss in nats per token or a credit in tokens."""

    x: float
    y: float
    name: str
    """Which round it is, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened in a round and has no value: work that was lost or rejected, or a rollback."""

    x: float
    kind: str
    """`lost`, `rejected` or `rollback`."""
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """One number beside an axis."""

    at: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A drawing of `WIDTH` by `HEIGHT`; numbers of the drawing are text that a template may take as it is."""

    title: str
    about: str
    """In words, for those who do not see it too."""
    line: Markup
    dots: tuple[tuple[str, str, str], ...]
    """x, y and label of points that stand out; of all where they are few."""
    best: tuple[str, str] | None
    marks: tuple[tuple[str, str, str], ...]
    """x, kind and label."""
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    borders: tuple[Tick, ...]
    """Where a stage begins."""

    width, height, left, right, top, bottom = WIDTH, HEIGHT, LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM


def loss_plot(
    points: Sequence[Point], marks: Sequence[Mark] = (), *, title: str, borders: Sequence[tuple[float, str]] = ()
) -> Plot | None:
    """The losses by round; None if there are fewer than two, which make no line."""
    if len(points) < 2:
        return None
    best = min(points, key=lambda point: point.y)
    about = _about(points, marks, best) + " In nats per token"
    return _plot(points, marks, best, title=title, about=about, borders=borders, figure=text.loss, tick="{:.4g}".format)


def credit_plot(points: Sequence[Point], *, borders: Sequence[tuple[float, str]] = ()) -> Plot | None:
    """All credit so far by round; None if there are fewer than two."""
    if len(points) < 2:
        return None
    last = points[-1]
    about = f"From {text.count(points[0].y)} at {points[0].name} to {text.count(last.y)} at {last.name}. In tokens"
    title = "Credit by round"
    return _plot(points, (), last, title=title, about=about, borders=borders, figure=text.count, tick=text.count)


def _plot(
    points: Sequence[Point],
    marks: Sequence[Mark],
    best: Point,
    *,
    title: str,
    about: str,
    borders: Sequence[tuple[float, str]],
    figure: Callable[[float], str],
    tick: Callable[[float], str],
) -> Plot:
    """At least two points; `best` stands out. `figure` writes a value, `tick` one of the axis."""
    shown, frame = thinned(points), _Frame.around(points, marks)
    few = shown if len(shown) <= 60 else ()
    return Plot(
        title=title,
        about=f"{about}; rounds are counted through all stages." if borders else f"{about}.",
        line=Markup(" ".join(f"{frame.x(point.x)},{frame.y(point.y)}" for point in shown)),
        dots=tuple((frame.x(point.x), frame.y(point.y), f"{point.name}: {figure(point.y)}") for point in few),
        best=(frame.x(best.x), frame.y(best.y)),
        marks=tuple((frame.x(mark.x), mark.kind, mark.label) for mark in marks[-MARKS_MAX:]),
        x_ticks=tuple(Tick(at=frame.x(x), text=f"{x:g}") for x in _round_steps(frame.x0, frame.x1, is_whole=True)),
        y_ticks=tuple(Tick(at=frame.y(y), text=tick(y)) for y in _round_steps(frame.y0, frame.y1)),
        borders=tuple(Tick(at=frame.x(x), text=text) for x, text in borders),
    )


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most about `POINTS_MAX` points that look the same as all of them, in order."""
    if len(points) <= POINTS_MAX:
        return points
    length = -(-2 * len(points) // POINTS_MAX)
    chunks = (points[begin : begin + length] for begin in range(0, len(points), length))
    return [point for chunk in chunks for point in _ends(chunk)]


def _ends(chunk: Sequence[Point]) -> list[Point]:
    """The least and the greatest, in order."""
    least, most = min(chunk, key=lambda point: point.y), max(chunk, key=lambda point: point.y)
    return sorted({least, most}, key=lambda point: point.x)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """What stands at the edges of the drawing."""

    x0: float
    x1: float
    y0: float
    y1: float

    @classmethod
    def around(cls, points: Sequence[Point], marks: Sequence[Mark]) -> _Frame:
        xs = [point.x for point in points] + [mark.x for mark in marks]
        ys = [point.y for point in points]
        room = (max(ys) - min(ys)) * 0.08 or 0.5
        return cls(x0=min(xs), x1=max(xs), y0=min(ys) - room, y1=max(ys) + room)

    def x(self, value: float) -> str:
        part = (value - self.x0) / (self.x1 - self.x0 or 1)
        return f"{LEFT + part * (WIDTH - LEFT - RIGHT):.1f}"

    def y(self, value: float) -> str:
        part = (value - self.y0) / (self.y1 - self.y0)
        return f"{HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM):.1f}"


def _about(points: Sequence[Point], marks: Sequence[Mark], best: Point) -> str:
    first, last = points[0], points[-1]
    said = (
        f"From {text.loss(first.y)} at {first.name} to {text.loss(last.y)} at {last.name}; "
        f"the best is {text.loss(best.y)} at {best.name}."
    )
    lost, rejected = (sum(mark.kind == kind for mark in marks) for kind in ("lost", "rejected"))
    back = [mark.label for mark in marks if mark.kind == "rollback"]
    said += f" {lost} contributions lost, {rejected} rejected." if lost or rejected else ""
    said += f" By decree: {'; '.join(back[-BACK_MAX:])}." if back else ""
    return said + (f" {len(back) - BACK_MAX} earlier rollbacks." if len(back) > BACK_MAX else "")


def _round_steps(low: float, high: float, *, is_whole: bool = False) -> Iterator[float]:
    """Round numbers from `low` to `high`, about `TICKS` of them."""
    if high <= low:
        yield low
        return
    rough = (high - low) / TICKS
    power = 10 ** math.floor(math.log10(rough))
    step = min((power * factor for factor in (1, 2, 5, 10)), key=lambda each: abs(math.log(each / rough)))
    step = max(step, 1) if is_whole else step
    number = math.ceil(low / step)
    while number * step <= high:
        yield round(number * step, 10)
        number += 1


# -- the grid

CELL_WIDTH_MAX, CELL_HEIGHT, CELL_ROOM, LEVEL_HEIGHT = 72, 28, 4, 84
NARROW = 340
"""Of a grid that a phone shows as it is; a wider one gets as much for each module as that has room for."""
TEXT_WIDTH_MIN = 24
"""A narrower cell has no room for the number of a version."""
MODULES_MAX = 64
"""Of a level; a wider one is no picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One module."""

    row: ModuleRow
    kind: str
    """`newest`, `behind` (by one round), `late` (by more), or `alone`: it goes on, and nobody leads it."""
    x: float
    y: float
    width: float

    @property
    def middle(self) -> float:
        return self.x + self.width / 2

    @property
    def has_text(self) -> bool:
        return self.width >= TEXT_WIDTH_MIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The modules of the open stage, a level under the other, and the paths through them."""

    cells: tuple[Cell, ...]
    trained: Markup
    """Lines of paths that somebody trains, or that are done."""
    free: Markup
    """Lines with a path that nobody trains now."""
    about: str
    counts: Mapping[str, int]
    """Cells by their kind."""
    width: int
    height: int
    cell_height: int = CELL_HEIGHT


def grid(book: Book) -> Grid | None:
    """The grid as it is now; None where a level is too wide, or nothing is known."""
    levels = [list(rows) for _, rows in groupby(book.snapshot.modules, key=lambda row: row.module.level)]
    if not levels or max(map(len, levels)) > MODULES_MAX:
        return None
    newest, is_over = max(row.version for row in book.snapshot.modules), book.snapshot.state == "complete"
    width = min(WIDTH, max(NARROW, (CELL_WIDTH_MAX + CELL_ROOM) * max(map(len, levels))))
    cells = {
        cell.row.module: cell if cell.row.leader or is_over else replace(cell, kind="alone")
        for place, rows in enumerate(levels)
        for cell in _cells(rows, place, newest, width)
    }
    lines: dict[tuple[ModuleId, ModuleId], bool] = {}
    for row in book.snapshot.paths:
        for pair in pairwise(row.path.modules()):
            lines[pair] = lines.get(pair, False) or row.state is PathState.FREE
    drawn = {
        is_free: Markup("".join(_line(cells[a], cells[b]) for (a, b), found in lines.items() if found == is_free))
        for is_free in (False, True)
    }
    free = len(book.paths_by_state.get(PathState.FREE, ()))
    about = f"{len(levels)} levels of {', '.join(str(len(rows)) for rows in levels)} modules, {len(cells)} in all; "
    about += f"{len(book.snapshot.paths)} paths, {free} of them free"
    return Grid(
        cells=tuple(cells.values()),
        trained=drawn[False],
        free=drawn[True],
        about=about,
        counts=Counter(cell.kind for cell in cells.values()),
        width=width,
        height=LEVEL_HEIGHT * (len(levels) - 1) + CELL_HEIGHT + 2,
    )


def _cells(rows: Sequence[ModuleRow], place: int, newest: int, picture: int) -> Iterator[Cell]:
    room = picture / len(rows)
    width = min(room - CELL_ROOM, CELL_WIDTH_MAX)
    for number, row in enumerate(rows):
        kind = ("newest", "behind", "late")[min(newest - row.version, 2)]
        x = room * (number + 0.5) - width / 2
        yield Cell(row=row, kind=kind, x=round(x, 1), y=1 + place * LEVEL_HEIGHT, width=round(width, 1))


def _line(upper: Cell, lower: Cell) -> str:
    return f"M{upper.middle:.1f} {upper.y + CELL_HEIGHT:.0f}L{lower.middle:.1f} {lower.y:.0f}"


FIFTHS = 5
HEAT_FROM = 33
"""Paths from which on a list of them is too long to see where the loss is high."""


def heat(rows: Sequence[PathRow]) -> list[tuple[PathRow, int]]:
    """The paths in their order, with the fifth of the known losses that theirs is in: 1 the least, and 0 for a path
    without one. Nothing where they are few."""
    if len(rows) < HEAT_FROM:
        return []
    ranks = sorted(row.loss for row in rows if row.loss is not None)
    return [(row, 0 if row.loss is None else 1 + bisect_left(ranks, row.loss) * FIFTHS // len(ranks)) for row in rows]


# -- lineage

AROUND = 3
"""Versions shown before and after the one in question."""
SHARES_MAX = 12
"""Contributions drawn of one version; the rest are counted."""
GRAPH_WIDTH, GRAPH_ROW, TRUNK, BRANCH = 340, 30, 16, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionNode:
    """One version on the line."""

    row: VersionRow
    y: int
    is_asked: bool
    """Whether the graph is about this one."""
    is_parent: bool
    """Whether a version above names it as its parent; the line ends at the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareNode:
    """One contribution on its branch, or the count of those that are not drawn."""

    y: int
    into_y: int
    share: ShareRow | None
    more: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Everything at its place."""

    versions: tuple[VersionNode, ...]
    shares: tuple[ShareNode, ...]
    height: int
    width: int = GRAPH_WIDTH
    trunk: int = TRUNK
    branch: int = BRANCH


def lineage(book: Book, row: VersionRow) -> Graph:
    """The versions around `row`, and what went into each: one line of versions, the newest at the top, with the
    contributions of each on a branch that joins it; narrow enough for a phone."""
    chain = [*reversed(list(_steps(row, book.child))), row, *_steps(row, book.parent)]
    versions, shares, y = [], [], GRAPH_ROW // 2
    for place, version in enumerate(chain):
        is_last = place == len(chain) - 1
        versions.append(VersionNode(row=version, y=y, is_asked=version is row, is_parent=not is_last))
        into_y, y = y, y + GRAPH_ROW
        for node in _shares(version, y, into_y):
            shares.append(node)
            y += GRAPH_ROW
    return Graph(versions=tuple(versions), shares=tuple(shares), height=y - GRAPH_ROW // 2)


def _steps(row: VersionRow, step: Callable[[VersionRow], VersionRow | None]) -> Iterator[VersionRow]:
    """`AROUND` versions, each the one that `step` finds from the one before it; fewer where it finds none."""
    for _ in range(AROUND):
        found = step(row)
        if found is None:
            return
        yield found
        row = found


def _shares(version: VersionRow, y: int, into_y: int) -> Iterator[ShareNode]:
    shown = version.shares[:SHARES_MAX]
    for place, share in enumerate(shown):
        yield ShareNode(y=y + place * GRAPH_ROW, into_y=into_y, share=share)
    if more := len(version.shares) - len(shown):
        yield ShareNode(y=y + len(shown) * GRAPH_ROW, into_y=into_y, share=None, more=more)


QUIET = 4
"""Modules around a code that stay light: ISO/IEC 18004 asks for as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A QR code: a square of `size` modules, those of the quiet zone included."""

    size: int
    dark: Markup
    """A path around all dark modules."""


@lru_cache(maxsize=8)
def qr_code(text: str) -> Code:
    """What a camera reads as `text`. Kept, since a code takes longer to find than a page to draw."""
    rows = [list(row) for row in segno.make_qr(text).matrix_iter(border=QUIET)]
    return Code(size=len(rows), dark=Markup("".join(_bars(rows))))


def _bars(rows: Sequence[Sequence[int]]) -> Iterator[str]:
    """A rectangle for each stretch of dark modules."""
    for y, row in enumerate(rows):
        x = 0
        for is_dark, stretch in groupby(row):
            width = len(list(stretch))
            if is_dark:
                yield f"M{x} {y}h{width}v1h-{width}z"
            x += width
