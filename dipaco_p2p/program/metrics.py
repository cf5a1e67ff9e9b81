"""Metrics in the text format of Prometheus: base units, and `_total` at the end of what only grows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One value of a metric."""

    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric with all its values."""

    name: str
    kind: str
    """`gauge` or `counter`."""
    about: str
    samples: tuple[Sample, ...]


def gauge(name: str, about: str, values: Iterable[tuple[float, Mapping[str, str]]]) -> Metric:
    """What goes up and down, by labels."""
    return _metric(name, "gauge", about, values)


def counter(name: str, about: str, values: Iterable[tuple[float, Mapping[str, str]]]) -> Metric:
    """What only grows, by labels."""
    return _metric(name, "counter", about, values)


def one(name: str, about: str, value: float | None) -> Metric:
    """A gauge without labels; without a value where that is not known."""
    return gauge(name, about, [] if value is None else [(value, {})])


def exposition(metrics: Iterable[Metric]) -> str:
    """All of them; those without a value are left out."""
    return "".join(line + "\n" for metric in metrics if metric.samples for line in _lines(metric))


def _metric(name: str, kind: str, about: str, values: Iterable[tuple[float, Mapping[str, str]]]) -> Metric:
    samples = tuple(Sample(value=value, labels=labels) for value, labels in values)
    return Metric(name=f"dipaco_{name}", kind=kind, about=about, samples=samples)


def _lines(metric: Metric) -> Iterator[str]:
    yield f"# HELP {metric.name} {metric.about}"
    yield f"# TYPE {metric.name} {metric.kind}"
    merged: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in metric.samples:
        # Labels may read the same once others' words in them are cleaned, and one series may stand here only once.
        labels = tuple(sample.labels.items())
        merged[labels] = merged.get(labels, 0) + sample.value
    for labels, value in merged.items():
        named = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels)
        yield f"{metric.name}{f'{{{named}}}' if named else ''} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value == int(value) else repr(float(value))
