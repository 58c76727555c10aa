"""Page of metrics in Prometheus' text format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

METRIC_PREFIX = "meshrl_"


class Exposition:
    """Counters and gauges under `labels`, and the kernel's figures of the process (CPU time,
    memory, descriptors).

    Gauges are numbers and booleans; a table of them is one gauge with the label `of`. Texts and
    lists are omitted.
    """

    def __init__(
        self, labels: Mapping[str, str], counters: Mapping[str, float], gauges: Mapping[str, Any]
    ) -> None:
        self._labels = dict(labels)
        self._counters, self._gauges = dict(counters), dict(gauges)

    def render(self) -> tuple[int, str, bytes]:
        """Render HTTP status, content type and body."""
        # Imported on the first request, because the import takes 70 ms of CPU time.
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return 200, CONTENT_TYPE_LATEST, generate_latest(self)

    def collect(self) -> Iterator[Any]:
        """Yield the metric families of the page, as `prometheus_client` requires of a collector."""
        from prometheus_client import ProcessCollector
        from prometheus_client.metrics_core import CounterMetricFamily

        for family in ProcessCollector(registry=None).collect():
            family.samples = [
                s._replace(labels={**self._labels, **s.labels}) for s in family.samples
            ]
            yield family
        for name, value in self._counters.items():
            counter = CounterMetricFamily(make_metric_name(name), name, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), value)
            yield counter
        for name in self._gauges.keys() - self._counters.keys():
            yield from self._collect_gauge(name, self._gauges[name])

    def _collect_gauge(self, name: str, value: Any) -> Iterator[Any]:
        from prometheus_client.metrics_core import GaugeMetricFamily

        many = isinstance(value, Mapping)
        found = value if many else {"": value}
        numbers = {str(k): float(v) for k, v in found.items() if isinstance(v, int | float)}
        if numbers:
            labels = [*self._labels, "of"] if many else list(self._labels)
            gauge = GaugeMetricFamily(make_metric_name(name), name, labels=labels)
            for key, number in numbers.items():
                own = [*self._labels.values(), key] if many else list(self._labels.values())
                gauge.add_metric(own, number)
            yield gauge


def make_metric_name(name: str) -> str:
    """Return a valid Prometheus metric name."""
    return METRIC_PREFIX + re.sub(r"\W", "_", name, flags=re.ASCII)
