"""Pages of one process for monitors: its metrics, liveness and readiness."""

from __future__ import annotations

from meshrl.common.mesh.process.processor_usage import CHILDREN_CPU, USAGE_KEYS
from meshrl.common.mesh.runtime.lease import Lease
from meshrl.common.mesh.telemetry.exposition import Exposition
from meshrl.common.mesh.telemetry.logs import Telemetry
from meshrl.common.mesh.telemetry.metrics_endpoint import PageRenderer, make_health_page
from meshrl.common.mesh.telemetry.watchdog import Watchdog


class MonitorPages:
    """Pages for a monitor; the endpoint's threads render them, even while the event loop blocks."""

    def __init__(
        self, name: str, kind: str, lease: Lease, watchdog: Watchdog, telemetry: Telemetry
    ) -> None:
        self._name, self._kind = name, kind
        self._lease, self._watchdog, self._telemetry = lease, watchdog, telemetry

    @property
    def pages(self) -> dict[str, PageRenderer]:
        """Pages by path, each a function that returns (status, content type, body)."""
        return {
            "/metrics": self.render_metrics,
            "/livez": make_health_page(self.explain_not_live),
            "/readyz": make_health_page(self.explain_not_ready),
        }

    def render_metrics(self) -> tuple[int, str, bytes]:
        """Render the page of metrics as (status, content type, body)."""
        stats = self._lease.entry.stats  # last published: the loop updates them with each tick
        page = Exposition(
            {"service": self._name, "kind": self._kind, "job": str(stats.get("job") or "")},
            self._telemetry.counters
            | {"cpu_children_seconds": float(stats.get(CHILDREN_CPU, 0.0))},
            {
                **{name: value for name, value in stats.items() if name not in USAGE_KEYS},
                "live": not self.explain_not_live(),
                "ready": not self.explain_not_ready(),
                "loop_lag_seconds": self._watchdog.current_lag_s,
            },
        )
        return page.render()

    def explain_not_live(self) -> str:
        """Explain why the process should be restarted; empty if it should not."""
        return self._watchdog.explain_stall(starting=not self._lease.token)

    def explain_not_ready(self) -> str:
        """Explain why the process is not ready; empty if it is."""
        if why := self.explain_not_live() or self._lease.explain_lapse():
            return why
        ready = self._lease.entry.stats.get("ready", True)
        return "" if ready else "the service is not ready for work"
