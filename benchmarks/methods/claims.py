"""The paper's claims that a small machine can test, each with the figures that speak for or against it.

A claim holds if it does in every seed. Gaps are relative differences of perplexity: below 0 is better. Directions
only: at this size no figure says what the method does at the paper's. Numbers and wording of the claims follow
docs/design.md's list; sources are DiPaCo (arXiv 2403.10616) and DiLoCo (2311.08105) unless said.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from .plan import DENSE, DENSE_OUTER, DILOCO, EVERY_STEP, KMEANS, RANDOM
from .summary import Summary, gap, gaps, loss

HOLDS, FAILS, UNTESTED = "holds", "fails", "not tested"
NOISE = 0.005
"""Gaps below this are called level: another order of the batches alone moves perplexity by a tenth to a half of a per
cent."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the experiment says of one claim."""

    number: int
    claim: str
    verdict: str
    figures: str


Test = Callable[[Summary], tuple[bool | None, str]]
"""None as the first value: what it takes was not run. An empty text says the same."""


def verdicts(summary: Summary) -> list[Verdict]:
    """All claims, in their order."""
    found = []
    for number, (claim, test) in enumerate(_CLAIMS, start=1):
        holds, figures = test(summary)
        word = UNTESTED if holds is None else HOLDS if holds else FAILS
        found.append(Verdict(number, claim, word, figures or "not run"))
    return found


def shown(values: list[float]) -> str:
    """Gaps of the seeds, as `-6.1 % / -5.8 %`."""
    texts = ("diverged" if math.isinf(value) else f"{value:+.1%}" for value in values)
    return " / ".join(texts).replace("%", " %") or "not run"


def _each(holds: Callable[..., bool], *columns: list[float]) -> bool | None:
    """Whether it holds in every seed; None if one of the columns was not run."""
    return all(map(holds, *columns)) if all(columns) else None


def _below(*columns: list[float]) -> bool | None:
    """Whether all of them are better than what they are compared with."""
    return _and(*(_each(lambda value: value < 0, values) for values in columns))


def _above(*columns: list[float]) -> bool | None:
    return _and(*(_each(lambda value: value > 0, values) for values in columns))


def _small(values: list[float], bound: float = NOISE) -> bool | None:
    return _each(lambda value: abs(value) < bound, values)


def _and(*parts: bool | None) -> bool | None:
    return None if None in parts else all(parts)


def _order(summary: Summary) -> tuple[bool | None, str]:
    over_diloco, over_dense = gaps(summary, KMEANS, DILOCO), gaps(summary, DILOCO, DENSE)
    large = gaps(summary, "4x4 k-means", "DiLoCo, 16 workers")
    text = f"2x2 to DiLoCo-4 {shown(over_diloco)}, DiLoCo-4 to dense {shown(over_dense)}"
    text += f", DiLoCo-4 to dense + outer step {shown(gaps(summary, DILOCO, DENSE_OUTER))}"
    return _below(over_diloco, over_dense, *filter(None, [large])), f"{text}; 4x4 to DiLoCo-16 {shown(large)}"


def _more_paths(summary: Summary) -> tuple[bool | None, str]:
    large = gaps(summary, "4x4 k-means", KMEANS)
    small = gaps(summary, "4x4 k-means, 5 % of the text", "5 % of the text")
    return _and(_below(large), _above(small)), f"4x4 to 2x2: all text {shown(large)}, 5 % of it {shown(small)}"


def _overfit(summary: Summary) -> tuple[bool | None, str]:
    flat, shared = _fit_gaps(summary, "5 % of the text, flat mixture of 4"), _fit_gaps(summary, "5 % of the text")
    text = f"report less training loss, 5 % of the text: flat {_numbers(flat, 3)}, 2x2 {_numbers(shared, 3)} nats"
    return _each(float.__gt__, flat, shared), text


def _private(summary: Summary) -> tuple[bool | None, str]:
    private = gaps(summary, "2x2 private ends", KMEANS)
    flat = gaps(summary, "flat mixture of 4", KMEANS)
    large = gaps(summary, "4x4 private ends", "4x4 k-means")
    text = f"to the 2x2 grid: private first and last block {shown(private)}, flat mixture {shown(flat)}"
    return _below(private, *filter(None, [large])), f"{text}; 4x4 {shown(large)}"


def _discriminative(summary: Summary) -> tuple[bool | None, str]:
    parts, holds = [], []
    for grid in ("2x2", "4x4"):
        product = gaps(summary, f"{grid} product k-means", f"{grid} k-means")
        found = gaps(summary, f"{grid} discriminative", f"{grid} k-means")
        fair = _routed_gaps(summary, f"{grid} discriminative", f"{grid} k-means", "every 64")
        if product and found:
            text = f"{grid}, to k-means: product {shown(product)}, discriminative {shown(found)}"
            parts.append(f"{text} (both re-routed every 64: {shown(fair)})")
            holds += [one < other < 0 for one, other in zip(found, product, strict=True)]
    return (all(holds) if holds else None), "; ".join(parts)


def _phases(summary: Summary) -> tuple[bool | None, str]:
    names = ("re-sharded once", "re-sharded twice", "re-sharded three times")
    found = [gaps(summary, name, KMEANS) for name in names]
    if not all(found):
        return None, ""
    first, *later = [fmean(values) for values in found]
    text = "to k-means, after 1, 2 and 3 phases: " + ", ".join(map(shown, found))
    return first < 0 and first < min(later) - first, text


def _grows(summary: Summary) -> tuple[bool | None, str]:
    small, large = (gaps(summary, f"{grid} discriminative", f"{grid} k-means") for grid in ("2x2", "4x4"))
    text = f"discriminative to k-means: 2x2 {shown(small)}, 4x4 {shown(large)}"
    return (fmean(large) < min(0, fmean(small)) if small and large else None), text


def _starvation(summary: Summary) -> tuple[bool | None, str]:
    parts, holds = [], []
    for method in (KMEANS, RANDOM, "4x4 k-means"):
        for figures in _figures(summary, method):
            if found := figures.get("starvation"):
                plain, matched = found["plain"], found["matched"]
                parts.append(f"{method}: {plain['distance']:.3f} to {matched['distance']:.3f}")
                holds.append(matched["distance"] < plain["distance"] and not matched["empty"])
    text = "share of documents on the wrong side of the labels' histogram, before and after the bias: "
    return (all(holds), text + "; ".join(parts)) if holds else (None, "")


def _rerouting(summary: Summary) -> tuple[bool | None, str]:
    ways = ("once, token router", "every 128", "every 64", "every 32", "every 16")
    rows = [[loss(summary, KMEANS, seed, way) for way in ways] for seed in summary["seeds"]]
    known = [[value for value in row if value is not None] for row in rows]
    if not all(len(row) == len(ways) for row in known):
        return None, ""
    text = "; ".join(" > ".join(f"{math.exp(value):.2f}" for value in row) for row in known)
    holds = all(b < a * (1 + NOISE / 4) for row in known for a, b in zip(row, row[1:], strict=False))
    holds = holds and all(row[-1] < row[0] for row in known)
    return holds, f"perplexity, the same router once, then every 128, 64, 32, 16: {text}"


def _window(summary: Summary) -> tuple[bool | None, str]:
    values = _routed_gaps(summary, KMEANS, KMEANS, "every 64, looking 64 ahead", "every 64")
    return _small(values), f"W = 64, labels from 64 tokens to labels from all that follow: {shown(values)}"


def _norms(summary: Summary) -> tuple[bool | None, str]:
    parts, holds = [], []
    for count, grid in ((2, "2x2"), (4, "2x2"), (4, "4x4"), (16, "4x4")):
        apart, alike = (
            [
                math.log(figures["agreement"][str(count)]) / math.log(count)
                for figures in _figures(summary, f"{grid} {routing}")
                if str(count) in figures["agreement"]
            ]
            for routing in ("k-means", "random routing")
        )
        if apart and alike:
            parts.append(f"{grid}, {count} contributors: {_numbers(apart, 2)}, random {_numbers(alike, 2)}")
            holds += [abs(one + 0.5) < 0.1 for one in apart]
    text = "norm of the mean over mean norm is the number of contributors to the power of (k-means) "
    return (all(holds), text + "; ".join(parts)) if holds else (None, "")


def _rules(summary: Summary) -> tuple[bool | None, str]:
    mean, rda = gaps(summary, "rule mean", KMEANS), gaps(summary, "rule rda", KMEANS)
    text = f"at the same outer learning rate, to sqrt: plain mean {shown(mean)}, rda {shown(rda)}"
    return (_above(mean) if rda else None), text


def _weights(summary: Summary) -> tuple[bool | None, str]:
    even = gaps(summary, "weights equal", KMEANS)
    skewed = gaps(summary, "unbalanced shards, weights equal", "unbalanced shards")
    text = f"equal weights to weights by size: balanced shards {shown(even)}, unbalanced {shown(skewed)}"
    return _and(_small(even), _each(lambda one, other: other > abs(one), even, skewed)), text


def _private_step(summary: Summary) -> tuple[bool | None, str]:
    values = gaps(summary, "private ends without outer step", "2x2 private ends")
    return _above(values), f"without to with: {shown(values)}"


def _early_stop(summary: Summary) -> tuple[bool | None, str]:
    large = gaps(summary, "2x2 early stopping", KMEANS)
    small = gaps(summary, "5 % of the text, early stopping", "5 % of the text")
    return _and(_below(small), _small(large, 2 * NOISE)), f"whole text {shown(large)}, 5 % of it {shown(small)}"


def _overlap(summary: Summary) -> tuple[bool | None, str]:
    large = gaps(summary, "2x2 overlap of 2", KMEANS)
    small = gaps(summary, "5 % of the text, overlap of 2", "5 % of the text")
    many = gaps(summary, "4x4 overlap of 2", "4x4 k-means")
    text = f"2x2 {shown(large)}, 2x2 on 5 % of the text {shown(small)}, 4x4 {shown(many)}"
    return _and(_above(large), _below(small, *filter(None, [many]))), text


def _lost(summary: Summary) -> tuple[bool | None, str]:
    third, half = gaps(summary, "30 % lost", KMEANS), gaps(summary, "50 % lost", KMEANS)
    text = f"30 % lost {shown(third)}, 50 % lost {shown(half)}"
    return _each(lambda one, other: max(one, other) < 0.1, third, half), text


def _tau(summary: Summary) -> tuple[bool | None, str]:
    short, middle, long = (gaps(summary, f"{steps} steps a round", KMEANS) for steps in (10, 20, 120))
    text = f"to 40 steps a round: 10 {shown(short)}, 20 {shown(middle)}, 120 {shown(long)}"
    return _each(lambda one, other: other - one < 0.1, short, long), text


def _alone(summary: Summary) -> tuple[bool | None, str]:
    values = gaps(summary, "each contribution alone", KMEANS)
    text = f"each contribution stepped alone, to stepped together: {shown(values)}; delayed Nesterov was not tried"
    return _above(values), text


def _codecs(summary: Summary) -> tuple[bool | None, str]:
    names = ("int4", "int4 without feedback", "int2", "int2 without feedback", "top 3 %", "top 3 % without feedback")
    full = gaps(summary, KMEANS, "fp32")
    found = {name: gaps(summary, name, "fp32") for name in names}
    if not full or not all(found.values()):
        return None, ""
    text = f"to fp32: int8 {shown(full)}, " + ", ".join(f"{name} {shown(values)}" for name, values in found.items())
    needed = all(fmean(found[name]) < fmean(found[f"{name} without feedback"]) for name in ("int2", "top 3 %"))
    return _and(_small(full), _small(found["int4"]), needed), text


def _attack(summary: Summary) -> tuple[bool | None, str]:
    found = [gaps(summary, f"sign-flip attacker{how}", KMEANS) for how in ("", ", clipped", ", clipped, rda")]
    text = "one of four sends ten times the negative: {}; clipped {}; clipped, rda {}".format(*map(shown, found))
    return (fmean(found[0]) > 1 and fmean(found[1]) < fmean(found[0]) / 2 if all(found) else None), text


def _outer_alone(summary: Summary) -> tuple[bool | None, str]:
    values = gaps(summary, DENSE_OUTER, DENSE)
    return _below(values), f"with to without, each at its own rates: {shown(values)}"


def _every_step(summary: Summary) -> tuple[bool | None, str]:
    values = gaps(summary, EVERY_STEP, KMEANS)
    large = gaps(summary, "4x4 k-means, every step", "4x4 k-means")
    text = f"every step to every round, each at its own rates: {shown(values)}; 4x4 {shown(large)}"
    return _each(lambda value: value > -2 * NOISE, values), text


def _tested(where: str) -> Test:
    """A claim about bits, which a test holds: no figure of the experiment is needed."""
    return lambda summary: (True, f"to the bit: {where}")


def _figures(summary: Summary, name: str) -> list[dict[str, Any]]:
    """What each seed of a method gave."""
    return list(summary["methods"].get(name, {}).get("seeds", {}).values())


def _fit_gaps(summary: Summary, name: str) -> list[float]:
    found: dict[str, Any] = summary["ablations"].get(name, {})
    return [figures["report"]["loss"] - figures["training_text"] for figures in found.values()]


def _routed_gaps(summary: Summary, name: str, control: str, way: str, other: str = "") -> list[float]:
    """As `gaps`, routed in this way; the control in the `other` one, if it is given."""
    pairs = [(loss(summary, name, seed, way), loss(summary, control, seed, other or way)) for seed in summary["seeds"]]
    return [gap(a, b) for a, b in pairs if a is not None and b is not None]


def _numbers(values: list[float], digits: int) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in values)


_CLAIMS: tuple[tuple[str, Test], ...] = (
    ("At equal steps per path: DiPaCo better than DiLoCo with as many workers, better than dense", _order),
    ("More paths help while there is text for them; with little text the gain turns", _more_paths),
    ("The flat mixture overfits before modules that are shared", _overfit),
    ("Private blocks win back what sharing costs", _private),
    ("Discriminative re-sharding better than product k-means, better than k-means", _discriminative),
    ("The first re-sharding gives most of the gain", _phases),
    ("The gain of re-sharding grows with the number of paths", _grows),
    ("A logistic router starves rare paths; a bias cures it", _starvation),
    ("Re-routing every W tokens: the shorter W, the better", _rerouting),
    ("How far ahead a token router's labels look hardly matters", _window),
    ("Synchronising modules every round is about as good as every step", _every_step),
    ("The mean outer gradient shrinks as one over the root of its contributors when their text differs", _norms),
    ("Rescaling by the root of the contributors helps shared modules; rda as good", _rules),
    ("Weights by shard size matter only for unbalanced shards", _weights),
    ("An outer step on private modules is better than none", _private_step),
    ("Early stopping per path helps small shards only", _early_stop),
    ("Overlapping shards help with many paths or little text, and cost specialisation with few", _overlap),
    ("Losing 30 to 50 % of the contributions costs a few per cent", _lost),
    ("Ten times longer rounds cost little", _tau),
    ("Nesterov on single contributions, as they come, is worse than on their mean", _alone),
    ("int8 and int4 cost nothing; 2 bits and top-k need error feedback", _codecs),
    ("An outer step alone, with one worker, beats AdamW", _outer_alone),
    ("Fewer workers than paths give the same result, later", _tested("tests/peers/test_rotation.py")),
    ("Killed and restarted workers change nothing", _tested("tests/peers/test_crash_safe.py")),
    ("One attacker among few contributors wrecks the mean; clipping contains it", _attack),
)
