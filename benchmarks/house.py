"""`python -m benchmarks.house`: how the code is cut into files, and how many files one piece of work passes through.

Counts are of the Python files that git tracks. A function's lines go from its `def` to its last line. A file's
importers are the program's files that import it, in a function or for types alone too. A circle is a set of files, or
of rooms (folders), that import each other, directly or round some corners.

Traces are of the program's files of which some function runs. A simulated swarm of four volunteers without faults
trains for real, and the leaderboard's collector watches it. What runs in a part is what runs in its context: the
functions it calls and the tasks it starts, not what it makes other peers do. `PARTS` says where parts begin and end.
  outer gradient   one volunteer's second round. inner: its inner steps. contribute: from its outer gradients to its
                   receipts. admit: the next contribution at a leader. close: that leader's next closing of a round,
                   until the new version is announced
  path claim       from looking around to holding the path; of all claims the one that ran most files
  version's row    pulling a chain, writing what is new, making the snapshot, drawing the version's page: of each the
                   execution with most files. Only the leaderboard's own files count: the rest serves every trip
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import contextvars
import inspect
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

from bootstrap.genesis.prepare import _loop
from dipaco_p2p.owner.leader import Leader
from dipaco_p2p.protocol.signing import Signer
from leaderboard.collector import Collector, StagePull
from leaderboard.database import Database
from leaderboard.model import Snapshot
from leaderboard.web.book import Book
from leaderboard.web.links import Links
from leaderboard.web.site import Site
from peers.path.claiming import Claiming
from peers.path.trainer import PathTrainer
from peers.path.training import Training
from simulation import actors, training
from simulation.plan import make_plan
from simulation.virtual_time import VirtualClock
from simulation.world import World, perform

# The only place that knows where parts begin and end.
PARTS: dict[str, tuple[Any, str]] = {
    "inner": (Training, "_inner_steps"),
    "contribute": (Training, "_contribute"),
    "admit": (Leader, "contribute"),
    "close": (Leader, "_close"),
    "claim": (Claiming, "claim"),
    "pull": (StagePull, "_pull_chain"),
    "write": (Collector, "_write"),
    "snapshot": (Collector, "_take_snapshot"),
    "page": (Site, "version"),
}
ROOT = Path(__file__).parents[1]
PROGRAM = ("dipaco_p2p", "peers", "bootstrap", "leaderboard", "simulation")
SHORT, LONG = 60, 500
HEADINGS = ("files", "lines", "functions", "median", "classes", "1 importer", f"<{SHORT} and 1", f">{LONG}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One Python file: its path, its lines, those of each function, and the files of the project that it imports."""

    path: str
    lines: int
    functions: tuple[int, ...]
    classes: int
    imports: frozenset[str]

    @property
    def room(self) -> str:
        """The top folder; in dipaco_p2p/, and for benchmarks/gpu, the one below too."""
        folders = self.path.split("/")[:-1]
        return "/".join(folders[: 1 + (folders[:1] == ["dipaco_p2p"] or folders[:2] == ["benchmarks", "gpu"])])


def sources(root: Path) -> list[Source]:
    """All tracked Python files under `root`, sorted by path."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=root, check=True, capture_output=True, text=True)
    paths = [path for path in sorted(listed.stdout.splitlines()) if (root / path).is_file()]
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in paths}
    return [_source(path, (root / path).read_text(encoding="utf-8"), modules) for path in paths]


def _source(path: str, text: str, modules: Mapping[str, str]) -> Source:
    nodes = list(ast.walk(ast.parse(text)))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    names = {name for node in nodes for name in _imported(node, path.split("/")[:-1])}
    files = {modules.get(name) or modules.get(name.rpartition(".")[0]) for name in names}
    return Source(
        path=path,
        lines=text.count("\n"),
        functions=tuple((node.end_lineno or node.lineno) - node.lineno + 1 for node in functions),
        classes=sum(isinstance(node, ast.ClassDef) for node in nodes),
        imports=frozenset(filter(None, files - {path})),
    )


def _imported(node: ast.AST, package: list[str]) -> Iterator[str]:
    """The dotted names that `node` imports; `package` is that of its file."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        start = package[: len(package) - node.level + 1] if node.level else []
        yield from (".".join([*start, *filter(None, [node.module]), alias.name]) for alias in node.names)


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The strongly connected components of two nodes or more, sorted."""
    reached: dict[str, set[str]] = {}
    for node in graph:
        seen, ahead = reached.setdefault(node, set()), [node]
        while ahead:
            ahead += (new := set(graph.get(ahead.pop(), ())) - seen)
            seen |= new
    found = {frozenset(other for other in reached[node] if node in reached.get(other, ())) for node in graph}
    return sorted(sorted(each) for each in found if len(each) > 1)


def report(found: list[Source]) -> Iterator[str]:
    """The counts, as lines of text."""
    of_program = [one for one in found if one.path.split("/")[0] in PROGRAM]
    imported = Counter(path for one in of_program for path in one.imports)
    groups = {room: [one for one in found if one.room == room] for room in sorted({one.room for one in found})}
    groups["outside tests"] = [one for one in found if one.room != "tests"]
    groups["outside tests, benchmarks"] = [one for one in groups["outside tests"] if "benchmarks" not in one.room]
    yield " " * 26 + "  ".join(HEADINGS)
    for name, members in groups.items():
        lengths = [length for one in members for length in one.functions]
        alone = [one for one in members if one in of_program and imported[one.path] == 1]
        row = [len(members), sum(one.lines for one in members), len(lengths), round(statistics.median(lengths or [0]))]
        row += [sum(one.classes for one in members), len(alone), sum(one.lines < SHORT for one in alone)]
        row += [sum(one.lines > LONG for one in members)]
        yield f"{name:26}" + "  ".join(f"{value:{len(head)}}" for head, value in zip(HEADINGS, row, strict=True))
    rooms, room_of = defaultdict[str, set[str]](set), {one.path: one.room for one in found}
    for one in of_program:
        rooms[one.room] |= {room_of[path] for path in one.imports}
    yield from (f"circle of files: {' '.join(each)}" for each in circles({one.path: one.imports for one in found}))
    yield from (f"circle of rooms: {' '.join(each)}" for each in circles(rooms))


@dataclass(slots=True, eq=False)
class Call:
    """One execution of a part, by the `id` of the object whose method it is."""

    part: str
    of: int
    codes: set[CodeType] = field(default_factory=set)

    @property
    def files(self) -> set[str]:  # those of the simulation aside
        names = {code.co_filename.removeprefix(f"{ROOT}/") for code in self.codes if code.co_name != "<module>"}
        return {name for name in names if name.endswith(".py") and name.partition("/")[0] in PROGRAM[:-1]}


inside: contextvars.ContextVar[tuple[Call, ...]] = contextvars.ContextVar("inside", default=())


def profile(frame: FrameType, event: str, argument: object) -> None:
    for call in inside.get():
        call.codes.add(frame.f_code)


def traced(part: str, function: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    """`function`, noted in `calls`; in a context of its own, since all that a node is asked for shares one."""

    def begun(self: object) -> contextvars.Context:
        calls.append(Call(part, id(self)))
        context = contextvars.copy_context()
        context.run(inside.set, (*inside.get(), calls[-1]))
        return context

    async def wait(self: object, *arguments: Any, **named: Any) -> Any:
        return await asyncio.create_task(function(self, *arguments, **named), context=begun(self))

    def run(self: object, *arguments: Any, **named: Any) -> Any:
        return begun(self).run(function, self, *arguments, **named)

    return wait if inspect.iscoroutinefunction(function) else run


def played() -> list[Call]:
    """Play a run with a collector, and draw the page of its newest version; every execution of a part, in order."""
    plan, snapshots, calls = make_plan(1, (), volunteers=4), list[Snapshot](), list[Call]()

    class Trainer(PathTrainer):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            known = inspect.signature(PathTrainer).parameters  # the simulation's trainer takes more
            super().__init__(*arguments, **{name: value for name, value in settings.items() if name in known})

    class Watched(World):
        async def play(self) -> None:
            swarm, database = self.network.join(Signer(b"collector of a traced run.......")), self.folder / "account"
            with contextlib.closing(Database.open(database)) as opened:
                known: dict[str, Any] = {"expected": None, "on_snapshot": snapshots.append}
                watching = asyncio.create_task(Collector(swarm, self.seed.peer, VirtualClock(), opened, **known).run())
                await super().play()
                watching.cancel()
                await asyncio.wait([watching])

    with contextlib.ExitStack() as stack:
        for part, (owner, name) in PARTS.items():
            stack.enter_context(mock.patch.object(owner, name, traced(part, getattr(owner, name), calls)))
        stack.enter_context(mock.patch.object(actors, "FakeTrainer", Trainer))
        stack.enter_context(mock.patch.object(training, "NoLoop", lambda: _loop(plan.config)))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.callback(sys.setprofile, None)
        sys.setprofile(profile)  # this thread is enough: a simulated run has no other
        perform(Watched(plan, folder))
        [*_, newest] = (row for row in snapshots[-1].versions if row.version)
        Site(Book(snapshots[-1]), Links(), now_s=snapshots[-1].taken_s).version(newest.digest)
    return calls


def trips(calls: list[Call]) -> Iterator[str]:
    """The files that the three pieces of work ran, as lines of text."""

    def following(before: Call, part: str) -> Iterator[Call]:
        return (call for call in calls[calls.index(before) + 1 :] if call.part == part)

    def longest(part: str) -> Call:
        return max((call for call in calls if call.part == part), key=lambda call: len(call.files))

    first = next(call for call in calls if call.part == "contribute")
    inner = next(call for call in following(first, "inner") if call.of == first.of)
    contribute = next(call for call in following(inner, "contribute") if call.of == first.of)
    # The first that is admitted where a round is closed afterwards: a peer that no longer leads admits nothing.
    closings = ((admit, close) for admit in following(contribute, "admit") for close in following(admit, "close"))
    admit, close = next((admit, close) for admit, close in closings if admit.of == close.of)
    yield _trip("outer gradient", [inner, contribute, admit, close])
    yield _trip("path claim", [longest("claim")])
    yield _trip("version's row", list(map(longest, ("pull", "write", "snapshot", "page"))), folder="leaderboard/")


def _trip(name: str, calls: Sequence[Call], folder: str = "") -> str:
    found = {path for call in calls for path in call.files if path.startswith(folder)}
    parts = ", ".join(f"{call.part} {len(call.files & found)}" for call in calls)
    return f"{name}: {len(found)} files ({parts}): {' '.join(sorted(found))}"


if __name__ == "__main__":
    print(*report(sources(ROOT)), *trips(played()), sep="\n")
