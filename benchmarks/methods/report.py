"""The summary as tables: on the terminal, and as the body of a page of docs/."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

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


def print_summary(summary: Summary) -> None:
    """Methods, ways to route, ablations, claims and bars, as far as there are figures."""
    console = Console()
    for title, head, rows in _tables(summary):
        if rows:
            table = Table(*head, title=title, title_justify="left")
            for row in rows:
                table.add_row(*row)
            console.print(table)
    console.print(_last_line(summary))


def render_markdown(summary: Summary, *, heading: str = "##", claims: bool = True) -> str:
    """The same as Markdown, without a title of the page; `heading` is the level of the tables' titles."""
    corpus = summary["corpus"]
    parts = ", ".join(
        f"{name} {corpus['sequences'][name]} of {corpus['documents'][name]} documents" for name in corpus["sequences"]
    )
    lines = [
        f"Text: {', '.join(corpus['domains'])}. Sequences of 256 tokens: {parts}. Seeds: {_seeds(summary)}.",
        "Perplexities are per token of a vocabulary of 1024; the first 32 tokens of a sequence count for no method.",
        "",
    ]
    for title, head, rows in _tables(summary, claims=claims):
        if rows:
            cells = [head, ["---"] * len(head), *rows]
            lines += [f"{heading} {title}", "", *("| " + " | ".join(row) + " |" for row in cells), ""]
    return "\n".join([*lines, _last_line(summary), ""])


def _tables(summary: Summary, *, claims: bool = True) -> list[tuple[str, list[str], Rows]]:
    ppl = [f"ppl {seed}" for seed in summary["seeds"]]
    to = [f"to {control}" for control in CONTROLS]
    found: list[tuple[str, list[str], Rows]] = [
        ("Bars", ["to show", "found", ""], _bar_rows(summary)),
        (
            "Methods, routed once",
            ["method", "parameters", "path-steps", "outer lr", *ppl, "bits/byte", *to],
            [_method_row(summary, name, method) for name, method in summary["methods"].items()],
        ),
        (
            "The same paths under other routers (perplexity, mean of the seeds)",
            ["method", *WAYS],
            [row for name in summary["methods"] if (row := _way_row(summary, name))],
        ),
        (
            "Outer learning rates (nats on the tune split, mean of the seeds)",
            ["method", *_lrs(summary)],
            [_lr_row(summary, name, method) for name, method in summary["methods"].items() if method["tuned"]],
        ),
        (
            f"One change each to `{KMEANS}`",
            ["change", *ppl, f"to {KMEANS}"],
            [[name, *_ppls(summary, name), shown(gaps(summary, name, KMEANS))] for name in summary["ablations"]],
        ),
    ]
    if claims:
        rows = [[str(v.number), v.claim, v.verdict, v.figures] for v in verdicts(summary)]
        found.append(("The paper's claims", ["", "claim", "here", "figures"], rows))
    return found


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
    rate = "-" if method["lr"] is None else f"{method['lr']:g}" + (" *" if method["like"] else "")
    cells = [name, f"{first['parameters']:,}", str(method["path_steps"]), rate, *_ppls(summary, name), f"{bits:.3f}"]
    return cells + [shown(gaps(summary, name, control)) if name != control else "" for control in CONTROLS]


def _way_row(summary: Summary, name: str) -> list[str]:
    means = []
    for way in WAYS:
        values = [loss(summary, name, seed, way) for seed in summary["seeds"]]
        known = [value for value in values if value is not None]
        means.append(f"{math.exp(fmean(known)):.2f}" if known else "")
    return [name, *means] if means[-1] else []


def _lr_row(summary: Summary, name: str, method: dict[str, Any]) -> list[str]:
    best = min(method["tuned"].values())
    known = {lr: f"{value:.4f}" + (" <" if value == best else "") for lr, value in method["tuned"].items()}
    return [name, *(known.get(lr, "") for lr in _lrs(summary))]


def _lrs(summary: Summary) -> list[str]:
    return sorted({lr for method in summary["methods"].values() for lr in method["tuned"]}, key=float)


def _ppls(summary: Summary, name: str) -> list[str]:
    values = [loss(summary, name, seed) for seed in summary["seeds"]]
    return [
        "-" if value is None else "diverged" if value > DIVERGED_NATS else f"{math.exp(value):.2f}" for value in values
    ]


def _seeds(summary: Summary) -> str:
    seeds: Sequence[int] = summary["seeds"]
    return ", ".join(map(str, seeds))


def _last_line(summary: Summary) -> str:
    beats = summary["beats_dense"]
    if beats is None:
        return f"`{KMEANS}` and `{DENSE_OUTER}` were not both run."
    verb = "beats" if beats else "does not beat"
    return f"`{KMEANS}`, routed once, {verb} `{DENSE_OUTER}` in all {len(summary['seeds'])} seed(s)."
