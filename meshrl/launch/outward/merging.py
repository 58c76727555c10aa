"""Pages of metrics of several processes made into one: each family once, with its samples by
process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

OURS = ("service", "kind", "job")


class Merged:
    """One valid exposition of what is added to it."""

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}  # by the name that its TYPE line has

    def add_page(self, text: str, labels: Mapping[str, str]) -> None:
        """The page of one process, whose `service` and `kind` these are; a sample that names no job
        has that of `labels`. ValueError, and nothing is added: it is no page of metrics.
        """
        from prometheus_client.parser import text_string_to_metric_families

        try:
            families = list(text_string_to_metric_families(text))
        except (KeyError, IndexError, AttributeError) as error:  # of its parser, too
            raise ValueError(f"no page of metrics: {error}") from error
        for family in families:
            family.samples = [s._replace(labels=_own(s.labels, labels)) for s in family.samples]
            self.add([family])

    def add(self, families: Iterable[Any]) -> None:
        """Families of `prometheus_client`, with the labels that they have."""
        for family in families:
            header = family.name + ("_total" if family.type == "counter" else "")
            known = self._families.get(header)
            if known is None:
                self._families[header] = family
                continue
            known.samples += family.samples
            if known.type != family.type:  # of two kinds of processes: it is what neither says
                known.type = "unknown"

    def collect(self) -> Iterable[Any]:
        """The families, as `prometheus_client` asks a collector for them."""
        return self._families.values()

    def rendered(self) -> tuple[int, str, bytes]:
        """HTTP status, content type and body."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return 200, CONTENT_TYPE_LATEST, generate_latest(self)


def _own(found: Mapping[str, str], labels: Mapping[str, str]) -> dict[str, str]:
    job = found.get("job") or labels.get("job", "")
    return {**found, **{name: labels.get(name, "") for name in OURS}, "job": job}
