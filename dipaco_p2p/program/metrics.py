"""Metrics in the text format of Prometheus: base units, and `_total` at the end of what only grows.

They are built from values for each scrape: no registry holds state between two scrapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["CONTENT_TYPE", "Metric", "counter", "exposition", "gauge", "one"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Values: TypeAlias = Iterable[tuple[float, Mapping[str, str]]]
"""Each value with its labels."""


def gauge(name: str, about: str, values: Values) -> Metric:
    """A metric that goes up and down, by labels; `name` without the prefix `dipaco_`."""
    return _filled(GaugeMetricFamily(f"dipaco_{name}", about), f"dipaco_{name}", values)


def counter(name: str, about: str, values: Values) -> Metric:
    """A metric that only grows, by labels; `name` ends with `_total`."""
    return _filled(CounterMetricFamily(f"dipaco_{name}", about), f"dipaco_{name}", values)


def one(name: str, about: str, value: float | None) -> Metric:
    """A gauge without labels; without a value if that is not known."""
    return gauge(name, about, [] if value is None else [(value, {})])


def exposition(metrics: Iterable[Metric], *, clean: Callable[[str], str] = str) -> str:
    """The text that a scrape returns; metrics without a value are left out. `clean` is for labels that others chose."""
    return generate_latest(_Collected(metrics, clean)).decode()


class _Collected(Collector):
    """The metrics of one scrape."""

    def __init__(self, metrics: Iterable[Metric], clean: Callable[[str], str]) -> None:
        self._metrics = metrics
        self._clean = clean

    def collect(self) -> Iterator[Metric]:
        for metric in self._metrics:
            # Labels may become equal when they are cleaned, and a scrape may hold each series only once.
            merged: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
            for sample in metric.samples:
                labels = tuple((name, self._clean(text)) for name, text in sample.labels.items())
                merged[sample.name, labels] = merged.get((sample.name, labels), 0) + sample.value
            if merged:
                made = Metric(metric.name, metric.documentation, metric.type)
                for (name, labels), value in merged.items():
                    made.add_sample(name, dict(labels), value)
                yield made


def _filled(metric: Metric, name: str, values: Values) -> Metric:
    for value, labels in values:
        metric.add_sample(name, dict(labels), value)
    return metric
