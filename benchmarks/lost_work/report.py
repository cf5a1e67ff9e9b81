"""All cases of all draws, the table, and the choice that it leads to.

Every figure of a case is its perplexity over that of the clean case of the same draw, so that what differs between
draws for other reasons cancels.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from .cases import CASES, job_of
from .training import prepare, read_text, result_of

ELSEWHERE = "; its documents routed elsewhere"
PAIRS = (
    ("30 % lost, left out", "30 % lost, counts as zero"),
    ("60 % lost, left out; nothing came: no step", "60 % lost, counts as zero; nothing came: no step"),
    ("one path never trained, left out", "one path never trained, counts as zero"),
    ("60 % lost, left out; nothing came: no step", "60 % lost, left out; nothing came: momentum"),
    ("30 % a round late, used; left out meanwhile", "30 % a round late, used; zero meanwhile"),
    ("30 % a round late, used; left out meanwhile", "30 % lost, left out"),
    ("30 % a round late, a quarter used; left out meanwhile", "30 % a round late, used; left out meanwhile"),
    ("30 % a round late, a quarter used; left out meanwhile", "30 % lost, left out"),
    ("one path never trained, left out" + ELSEWHERE, "one path never trained, left out"),
)
"""Two rules for the same loss."""

Draws = Mapping[str, Sequence[float]]
"""Of each case its perplexity in each draw."""


def run(corpus: Path | None, *, draws: int, rounds: int, json_file: Path | None, fast: bool) -> Draws:
    """Train everything and print the tables; raises CorpusError."""
    console, began_s = Console(), time.perf_counter()
    data = read_text(corpus)
    console.print(
        f"{len(data.train)} sequences to train on, {len(data.report)} to report on, {', '.join(data.domains)}"
    )
    found: dict[str, list[float]] = {}
    for draw in range(draws):
        start = prepare(data, job_of(draw, rounds=rounds), fast=fast)
        for case in CASES:
            result = result_of(data, start, case, fast=fast)
            found.setdefault(case.name, []).append(result.perplexity)
            if result.elsewhere is not None:
                found.setdefault(case.name + ELSEWHERE, []).append(result.elsewhere)
        if json_file is not None:
            json_file.write_text(json.dumps({"draws": draw + 1, "perplexity": found}, indent=1) + "\n")
        console.print(f"draw {draw + 1} of {draws} done after {time.perf_counter() - began_s:.0f} s")
    console.print(cases_table(found))
    console.print(pairs_table(found))
    return found


def cases_table(found: Draws) -> Table:
    """What each case costs."""
    table = Table("case", "perplexity", "over clean %", "from %", "to %", title="What lost work costs")
    for name, values in found.items():
        costs = percents(found["clean"], values)
        figures = (statistics.median(costs), min(costs), max(costs))
        table.add_row(name, f"{statistics.median(values):.2f}", *(f"{value:+.1f}" for value in figures))
    return table


def pairs_table(found: Draws) -> Table:
    """What the second rule of a pair costs over the first, and whether all draws agree."""
    table = Table("rule", "instead", "costs %", "from %", "to %", "worse in", title="Two rules for the same loss")
    for first, second in PAIRS:
        costs = percents(found[first], found[second])
        figures = (statistics.median(costs), min(costs), max(costs))
        worse = f"{sum(cost > 0 for cost in costs)} of {len(costs)}"
        table.add_row(first, second, *(f"{value:+.1f}" for value in figures), worse)
    return table


def percents(before: Sequence[float], after: Sequence[float]) -> list[float]:
    """How much greater each value of `after` is than its one of `before`, in percent."""
    return list(_percents(before, after))


def _percents(before: Sequence[float], after: Sequence[float]) -> Iterator[float]:
    for old, new in zip(before, after, strict=True):
        yield float(100 * np.expm1(np.log(new) - np.log(old)))
