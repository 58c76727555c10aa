"""Connections that this process has turned away: counted by reason, and logged now and then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from common.mesh.telemetry.logs import Telemetry

LOGGED_EVERY_S = 30.0  # between two lines of the log, however many there are

Listener = Callable[[], Mapping[str, int]]


class Rejections:
    """Sum over the listeners of a process of the connections that each has turned away."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._listeners: list[Listener] = []
        self._logged: dict[str, int] = {}
        self._logged_at = -LOGGED_EVERY_S

    def add(self, listener: Listener) -> None:
        """Include a listener, which returns its rejected connections by reason."""
        self._listeners.append(listener)

    def report(self, now: float) -> None:
        """Count and log the connections since the last line of the log, one line a while."""
        rejected = dict(sum((Counter(listener()) for listener in self._listeners), Counter()))
        if rejected == self._logged or now - self._logged_at < LOGGED_EVERY_S:
            return
        new = {why: n - self._logged.get(why, 0) for why, n in rejected.items()}
        for why, number in new.items():
            self._telemetry.count(f"refused_{why}", number)
        self._telemetry.log.warning("connections were turned away", **new)
        self._logged, self._logged_at = rejected, now
