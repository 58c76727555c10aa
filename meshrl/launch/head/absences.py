"""How long hosts have been away, as far as the launcher has seen."""

from __future__ import annotations

from collections.abc import Collection


class Absences:
    """A host is away from the first look on that does not find it; `for_s` is what is long."""

    def __init__(self, for_s: float) -> None:
        self._for_s = for_s
        self._since: dict[str, float] = {}

    def look(self, hosts: Collection[str], here: Collection[str], now: float) -> dict[str, float]:
        """Those of these hosts that have been away for long, and for how long, in seconds; `here`
        are those that are found, `now` is of a monotonic clock.
        """
        away = set(hosts) - set(here)
        self._since = {host: self._since.get(host, now) for host in away}
        return {h: now - s for h, s in sorted(self._since.items()) if now - s > self._for_s}

    def begin_anew(self) -> None:
        """Nobody could be found for a while: what was seen before tells nothing."""
        self._since = {}
