"""Others on the same GPU: a second volunteer, and whether each keeps its share of the memory; and a game."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from dipaco_p2p.core.model.inner import StepReport
from dipaco_p2p.errors import DipacoError
from peers.governor.nvml import limit_memory

from .cards import GB, SLACK, share_of
from .case import Bench, Case, Figures, Found, Part, number, table, verdict
from .fast import GIB, path_of, way_of
from .games import WANTED_S, games
from .utilisation import Bare, memory_bytes

EACH_GB = 40
STEADY_S = 8.0
START_LIMIT_S = 120.0


def _alone(bench: Bench) -> Figures:
    return _together(bench, volunteers=1)


def _two(bench: Bench) -> Figures:
    return _together(bench, volunteers=2)


def _together(bench: Bench, *, volunteers: int) -> Figures:
    """Steps of so many processes within the same seconds."""
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(_volunteer(bench)) for _ in range(volunteers)]
        for connection in running:
            _hear(connection, START_LIMIT_S)  # its first steps are over
        for connection in running:
            connection.send(None)
        found = [_hear(connection, START_LIMIT_S) for connection in running]
    allowed = EACH_GB * GB
    return {
        "tokens_per_s": [own["tokens_per_s"] for own in found],
        "memory_gib": [own["memory_bytes"] / GIB for own in found],
        "ok": all(own["memory_bytes"] <= SLACK * allowed for own in found),
    }


@contextlib.contextmanager
def _volunteer(bench: Bench) -> Iterator[Connection]:
    """One that trains in a process of its own, and ends with this block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process: BaseProcess = context.Process(target=_train, args=(theirs, bench), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(5.0)
        process.kill()
        process.join()


def _hear(connection: Connection, limit_s: float) -> dict[str, float]:
    if not connection.poll(limit_s):
        raise DipacoError(f"a volunteer said nothing for {limit_s:.0f} s", hint="see its log")
    try:
        said = connection.recv()
    except EOFError:
        raise DipacoError("a volunteer ended before its time", hint="see its log") from None
    assert isinstance(said, dict)
    return said


def _train(connection: Connection, bench: Bench) -> None:
    """The life of one: its first steps, then a word, then so many seconds."""
    limit_memory(bench.device, share_of(EACH_GB * GB, bench.device))
    model, way = path_of(bench.is_small), way_of(bench)
    bare, steady_s = Bare(bench.device, way, model=model), 0.2 if bench.is_small else STEADY_S
    connection.send({})
    connection.recv()
    began_s, steps, ended_s = time.perf_counter(), 0, 0.0

    def on_step(report: StepReport) -> bool:
        nonlocal steps, ended_s
        steps, ended_s = steps + 1, time.perf_counter()
        return ended_s - began_s < steady_s

    bare.take(1_000_000, on_step)
    tokens_per_s = steps * way.batch * model.context / (ended_s - began_s)
    connection.send({"tokens_per_s": tokens_per_s, "memory_bytes": float(memory_bytes(bench.device))})


def _rows(found: Found) -> list[str]:
    rows: list[tuple[object, ...]] = [("volunteers", "tokens/s of each", "together", f"within {EACH_GB} GB each")]
    for name, own in found.items():
        each = own.get("tokens_per_s")
        if not isinstance(each, list):
            continue
        rows.append((name, ", ".join(f"{value:,.0f}" for value in each), f"{sum(each):,.0f}", verdict(own)))
    lines = table(*rows)
    if {"one", "two"} <= found.keys():
        one, two = (sum(found[name]["tokens_per_s"]) for name in ("one", "two"))  # type: ignore[call-overload]
        lines += [f"Two together do {two / one:.2f} times what one does.", ""]
    return lines + (_game(found["game"]) if "game" in found else [])


def _game(own: Figures) -> list[str]:
    has_it = f"Another program has the card for itself after {number(own, 'has_it_s'):.2f} s (wanted: {WANTED_S:g})"
    said = ", ".join(map(str, own["said"])) if isinstance(own["said"], list) else ""
    resumed = "" if own["resumed_s"] is None else f"; it trains again {number(own, 'resumed_s'):.0f} s after that ends"
    return [f"{has_it}. The volunteer says: {said or 'nothing'}{resumed}. As wanted: {verdict(own)}.", ""]


CASES = (
    Case(name="one", limit_s=60, ask=_alone, is_small_too=False),
    Case(name="two", limit_s=90, ask=_two),
    Case(name="game", limit_s=300, ask=games, is_small_too=False),
)
PART = Part(name="beside", about="What do others on the same GPU get?", cases=CASES, rows=_rows)
