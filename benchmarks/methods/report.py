"""The summary as tables."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from rich.table import Table

from benchmarks.report import table

from .claims import shown, verdicts
from .plan import DENSE_OUTER, DILOCO, KMEANS, RANDOM
from .summary import DIVERGED_NATS, Summary, gaps, loss

WAYS = (
    "once",
    "once, likelihood router (matched)",
    "every 128",
    "every 64",
    "every 32",
    "every 16",
    "all paths read along, every 64",
    "oracle once",
)
CONTROLS = (DENSE_OUTER, DILOCO, RANDOM)

Rows = list[list[str]]


def told(summary: Summary) -> list[Table | str]:
    """Methods, ways to route, ablations, claims and bars, as far as there are figures."""
    tables = [table(title, head, rows, left=head) for title, head, rows in _tables(summary) if rows]
    return [*tables, _last_line(summary)]


def _tables(summary: Summary) -> list[tuple[str, list[str], Rows]]:
    ppl = [f"ppl {seed}" for seed in summary["seeds"]]
    to = [f"to {control}" for control in CONTROLS]
    return [
        ("Bars", ["to show", "found", ""], _bar_rows(summary)),
        (
            "Methods, routed once",
            ["method", "parameters", "path-steps", "inner lr", "outer lr", *ppl, "bits/byte", *to],
            [_method_row(summary, name, method) for name, method in summary["methods"].items()],
        ),
        (
            "The same paths under other routers (perplexity, mean of the seeds)",
            ["method", *WAYS],
            [row for name in summary["methods"] if (row := _way_row(summary, name))],
        ),
        (
            "Learning rates (nats on the tune split, one seed)",
            ["method", "inner lr", *(f"outer {rate:g}" for rate in _outers(summary))],
            [row for name in summary["methods"] for row in _rate_rows(summary, name)],
        ),
        (
            f"One change each to `{KMEANS}`",
            ["change", *ppl, f"to {KMEANS}"],
            [[name, *_ppls(summary, name), shown(gaps(summary, name, KMEANS))] for name in summary["ablations"]],
        ),
        (
            "The paper's claims",
            ["", "claim", "here", "figures"],
            [[str(v.number), v.claim, v.verdict, v.figures] for v in verdicts(summary)],
        ),
    ]


def _bar_rows(summary: Summary) -> Rows:
    rows = []
    for bar in summary["bars"]:
        routed = "" if bar["routed"] == "once" else f", re-routed {bar['routed']}"
        wanted = f"{bar['method']}{routed}: at least {bar['margin']:.0%} below {bar['control']}".replace("%", " %")
        rows.append([wanted, shown(bar["gaps"]), "met" if bar["met"] else "missed" if bar["gaps"] else "not run"])
    return rows


def _method_row(summary: Summary, name: str, method: dict[str, Any]) -> list[str]:
    first = next(iter(method["seeds"].values()))
    bits = fmean(figures["report"]["bits_per_byte"] for figures in method["seeds"].values())
    rates = ["-" if method[rate] is None else f"{method[rate]:g}" for rate in ("inner_lr", "lr")]
    rates[0] += " *" if method["like"] else ""
    cells = [name, f"{first['parameters']:,}", str(method["path_steps"]), *rates, *_ppls(summary, name), f"{bits:.3f}"]
    return cells + [shown(gaps(summary, name, control)) if name != control else "" for control in CONTROLS]


def _way_row(summary: Summary, name: str) -> list[str]:
    means = []
    for way in WAYS:
        values = [loss(summary, name, seed, way) for seed in summary["seeds"]]
        known = [value for value in values if value is not None]
        means.append(f"{math.exp(fmean(known)):.2f}" if known else "")
    return [name, *means] if means[-1] else []


def _rate_rows(summary: Summary, name: str) -> Rows:
    """One for each inner rate; a method without an outer step has its loss in the column of 1."""
    tuned = summary["methods"][name]["tuned"]
    best = min((nats for *_, nats in tuned), default=0.0)
    rows = []
    for inner in sorted({inner for inner, _, _ in tuned}):
        losses = {outer: f"{nats:.4f}" + (" <" if nats == best else "") for own, outer, nats in tuned if own == inner}
        rows.append([name, f"{inner:g}", *(losses.get(outer, "") for outer in _outers(summary))])
    return rows


def _outers(summary: Summary) -> list[float]:
    return sorted({outer for method in summary["methods"].values() for _, outer, _ in method["tuned"]})


def _ppls(summary: Summary, name: str) -> list[str]:
    values = [loss(summary, name, seed) for seed in summary["seeds"]]
    return [
        "-" if value is None else "diverged" if value > DIVERGED_NATS else f"{math.exp(value):.2f}" for value in values
    ]


def _last_line(summary: Summary) -> str:
    beats = summary["beats_dense"]
    if beats is None:
        return f"`{KMEANS}` and `{DENSE_OUTER}` were not both run."
    verb = "beats" if beats else "does not beat"
    return f"`{KMEANS}`, routed once, {verb} `{DENSE_OUTER}` in all {len(summary['seeds'])} seed(s)."
