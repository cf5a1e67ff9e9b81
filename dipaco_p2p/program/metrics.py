"""Metrics in the text format of Prometheus: base units, and `_total` at the end of what only grows.

They are built anew for each scrape, from values: no registry holds state between two scrapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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


def exposition(metrics: Iterable[Metric]) -> str:
    """The text that a scrape returns; metrics without a value are left out."""
    return generate_latest(_Collected(metrics)).decode()


class _Collected(Collector):
    """The metrics of one scrape."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return (metric for metric in self._metrics if metric.samples)


def _filled(metric: Metric, name: str, values: Values) -> Metric:
    merged: dict[tuple[tuple[str, str], ...], float] = {}
    for value, labels in values:
        # Peers' words may become equal when they are cleaned, and a scrape may hold each series only once.
        key = tuple(labels.items())
        merged[key] = merged.get(key, 0) + value
    for key, value in merged.items():
        metric.add_sample(name, dict(key), value)
    return metric
