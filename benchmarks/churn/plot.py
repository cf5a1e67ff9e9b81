"""One picture: contributions counted over time in both runs, the kills, and what each kill cost."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.chaos.evidence import Evidence

from .measure import Figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"twin": "#5f6368", "faults": "#c0392b"}
PARTS = {"detected_s": "#9aa0a6", "resumed_s": "#3f7fbf", "back_s": "#e8a33d"}
LABELS = {"detected_s": "T_detect", "resumed_s": "T_resume", "back_s": "T_back"}


def can_plot() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(runs: dict[str, tuple[float, Evidence]], faults: Figures, *, ttl_s: float, folder: Path) -> list[Path]:
    """Draw both runs, each with when its clock began; the files written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    _progress(above, runs, faults)
    _times(below, faults, ttl_s)
    files = [folder / f"churn.{suffix}" for suffix in ("svg", "png")]
    for file in files:
        figure.savefig(file, dpi=150)
    return files


def _progress(axes: Axes, runs: dict[str, tuple[float, Evidence]], faults: Figures) -> None:
    for name, (began_s, evidence) in runs.items():
        times = sorted(_counted_at(evidence, began_s))
        axes.step(times, range(1, len(times) + 1), where="post", color=COLOURS[name], label=name)
    for number, kill in enumerate(faults.kills):
        axes.axvline(kill.at_s, color="#d0d0d0", linewidth=0.8, zorder=0, label="SIGKILL" if not number else None)
    axes.set_xlabel("seconds")
    axes.set_ylabel("contributions counted")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _counted_at(evidence: Evidence, began_s: float) -> list[float]:
    archived = {(event["module"], event["version"]): event.t_s - began_s for _, event in evidence.events("archived")}
    return [
        t_s
        for module, links in evidence.chains.items()
        for link in links
        if (t_s := archived.get((module, link.version), -1.0)) >= 0
        for _ in link.shares
    ]


def _times(axes: Axes, faults: Figures, ttl_s: float) -> None:
    width = 0.8 / len(PARTS)
    for place, (name, colour) in enumerate(PARTS.items()):
        heights = [getattr(kill, name) or 0.0 for kill in faults.kills]
        axes.bar([n + place * width for n in range(len(heights))], heights, width, color=colour, label=LABELS[name])
    axes.axhline(ttl_s, color="#5f6368", linestyle="--", linewidth=0.8, label="an expiry")
    axes.set_xticks([n + width for n in range(len(faults.kills))], [f"{kill.at_s:.0f} s" for kill in faults.kills])
    axes.set_xlabel("kill at")
    axes.set_ylabel("seconds after it")
    axes.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0.0, 1.0))
    axes.spines[["top", "right"]].set_visible(False)
