"""The pages that a monitor reads of one process: its metrics, whether it lives, whether it is
ready.
"""

from __future__ import annotations

from typing import Any

from common.mesh.process.usage import CHILDREN, USAGE
from common.mesh.runtime.lease import Lease
from common.mesh.telemetry.endpoint import Page, health
from common.mesh.telemetry.exposition import Exposition
from common.mesh.telemetry.logs import Telemetry
from common.mesh.telemetry.watchdog import Watchdog


class Monitor:
    """Answers a monitor; the endpoint's threads call it, whatever the event loop does."""

    def __init__(
        self, name: str, kind: str, lease: Lease, watchdog: Watchdog, telemetry: Telemetry
    ) -> None:
        self._name, self._kind = name, kind
        self._lease, self._watchdog, self._telemetry = lease, watchdog, telemetry

    @property
    def pages(self) -> dict[str, Page]:
        """The pages by path, each a function that answers (status, content type, body)."""
        return {
            "/metrics": self.metrics,
            "/livez": health(self.not_live),
            "/readyz": health(self.not_ready),
        }

    @property
    def _stats(self) -> dict[str, Any]:
        """The stats as they were published last: the loop renews them with each of its ticks."""
        return self._lease.entry.stats

    def metrics(self) -> tuple[int, str, bytes]:
        """The page of metrics: (status, content type, body)."""
        stats = self._stats
        page = Exposition(
            labels={
                "service": self._name,
                "kind": self._kind,
                "job": str(stats.get("job") or ""),
            },
            counters={
                **self._telemetry.counters,
                "cpu_children_seconds": float(stats.get(CHILDREN, 0.0)),
            },
            gauges={
                **{name: value for name, value in stats.items() if name not in USAGE},
                "live": not self.not_live(),
                "ready": not self.not_ready(),
                "loop_lag_seconds": self._watchdog.behind_s,
            },
        )
        return page.rendered()

    def not_live(self) -> str:
        """Why the process should be restarted; empty if it should not."""
        return self._watchdog.stalled(starting=not self._lease.token)

    def not_ready(self) -> str:
        """Why nobody should count on the process now; empty if it is ready."""
        if why := self.not_live() or self._lease.lapsed():
            return why
        return "" if self._stats.get("ready", True) else "the service is not ready for work"
