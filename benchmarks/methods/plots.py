"""The summary as pictures, each as SVG and PNG."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from .plan import DENSE, DENSE_OUTER, DILOCO, KMEANS, MAIN, RANDOM
from .summary import Summary, loss

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {DENSE: "#9aa0a6", DENSE_OUTER: "#5f6368", RANDOM: "#e8a33d", DILOCO: "#3f7fbf", KMEANS: "#c0392b"}
OTHER = "#7d9c8a"
WAYS = ("once", "once, likelihood router (matched)", "every 128", "every 64", "every 32", "every 16", "oracle once")
LABELS = ("once", "once,\nlikelihood", "W = 128", "64", "32", "16", "oracle\nonce")


def can_plot() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(summary: Summary, folder: Path) -> list[Path]:
    """Every picture that the summary has figures for."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {"curves": _curves, "methods": _methods, "rerouting": _rerouting}
    drawn = []
    for name, picture in pictures.items():
        figure = picture(summary)
        if figure is not None:
            for suffix in ("svg", "png"):
                figure.savefig(folder / f"{name}.{suffix}", dpi=150)
                drawn.append(folder / f"{name}.{suffix}")
    return drawn


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _curves(summary: Summary) -> Figure | None:
    """Perplexity over inner steps per path: the mean over the seeds, and each seed as a thin line."""
    names = [name for name in MAIN if name in summary["methods"]]
    if not names:
        return None
    figure, axes = _figure(7, 4.4)
    for name in names:
        curves = [figures["curve"] for figures in summary["methods"][name]["seeds"].values()]
        steps = [step for step, _ in curves[0]]
        for curve in curves if len(curves) > 1 else ():
            axes.plot(steps, [math.exp(value) for _, value in curve], color=COLOURS[name], linewidth=0.7, alpha=0.5)
        means = [math.exp(fmean(values)) for values in zip(*([v for _, v in curve] for curve in curves), strict=True)]
        axes.plot(steps, means, color=COLOURS[name], linewidth=2, marker="o", markersize=4)
        axes.annotate(
            f" {name} {means[-1]:.1f}", (steps[-1], means[-1]), color=COLOURS[name], fontsize=8.5, va="center"
        )
    axes.set_yscale("log")
    _plain_ticks(axes)
    axes.set_xlabel("inner steps per path after the warm-up")
    axes.set_ylabel("perplexity (log scale)")
    axes.set_title(f"Equal steps per path; {_seeds(summary)}", fontsize=10, loc="left")
    _spread_labels(axes)
    return figure


def _methods(summary: Summary) -> Figure | None:
    """Final perplexity of every method: the mean as a bar, each seed as a dot with its 95 % interval."""
    names = list(summary["methods"])
    if not names:
        return None
    figure, axes = _figure(7.5, 1.2 + 0.34 * len(names))
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    order = sorted(names, key=lambda name: -_mean(summary, name))
    for row, name in enumerate(order):
        axes.barh(row, _mean(summary, name), height=0.62, color=COLOURS.get(name, OTHER), alpha=0.85)
        for place, figures in enumerate(summary["methods"][name]["seeds"].values()):
            report = figures["report"]
            values = [math.exp(report[key]) for key in ("loss", "low", "high")]
            height = row + 0.16 * (place - (len(summary["seeds"]) - 1) / 2)
            axes.plot(values[1:], [height, height], color="black", linewidth=0.8)
            axes.plot(values[0], height, "o", color="black", markersize=3)
    axes.set_yticks(range(len(order)), order, fontsize=8.5)
    axes.set_xlim(left=0.75 * min(_mean(summary, name) for name in names))
    axes.set_xlabel("perplexity, routed once; dots: seeds, 95 % intervals over documents; the axis is cut")
    return figure


def _rerouting(summary: Summary) -> Figure | None:
    """Perplexity by way of routing, of each method that was scored."""
    scored = {
        name: values
        for name in summary["methods"]
        if len(values := [_mean(summary, name, way) for way in WAYS]) and not any(map(math.isnan, values))
    }
    if not scored:
        return None
    figure, axes = _figure(7.5, 4.4)
    for name, values in scored.items():
        axes.plot(
            range(len(WAYS)), values, marker="o", markersize=4, linewidth=1.5, color=COLOURS.get(name), label=name
        )
    axes.set_xticks(range(len(WAYS)), LABELS, fontsize=8.5)
    axes.set_ylabel("perplexity")
    axes.set_title("Routed once by the router it was trained with, then by routers fitted on who is best", fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=2)
    return figure


def _mean(summary: Summary, name: str, way: str = "once") -> float:
    values = [loss(summary, name, seed, way) for seed in summary["seeds"]]
    known = [value for value in values if value is not None]
    return math.exp(fmean(known)) if known else math.nan


def _seeds(summary: Summary) -> str:
    count = len(summary["seeds"])
    return "one seed" if count == 1 else f"mean of {count} seeds, thin lines the seeds"


def _plain_ticks(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())


def _spread_labels(axes: Axes) -> None:
    """Move the labels at the ends of the lines apart, and leave room for them."""
    left, right = axes.get_xlim()
    axes.set_xlim(left, right + 0.42 * (right - left))
    labels: Sequence[Any] = sorted(axes.texts, key=lambda label: label.xy[1])
    low, high = (math.log(value) for value in axes.get_ylim())
    step, last = 0.055 * (high - low), -math.inf
    for label in labels:
        place = max(math.log(label.xy[1]), last + step)
        label.set_position((label.xy[0], math.exp(place)))
        last = place
