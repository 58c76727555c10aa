"""Table of waits: every process publishes its waits with its lease, so that a stall leads to its
cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from meshrl.common.base.clock import Clock

MIN_PUBLISHED_S = 0.25  # shorter waits are work in progress
MAX_PUBLISHED = 100  # the longest waits


class WaitTable:
    """Current waits of one process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waits: dict[object, tuple[str, str, float]] = {}

    @contextmanager
    def wait(self, what: str, on: str, since: float | None = None) -> Iterator[None]:
        """Record a wait for the duration of the block; `since` (monotonic) if it began earlier."""
        key = object()
        self._waits[key] = (on, what, self._clock.monotonic() if since is None else since)
        try:
            yield
        finally:
            del self._waits[key]

    def compute_start(self, waited_s: float) -> float:
        """Return the start (monotonic) of a wait that has lasted for `waited_s` seconds, for
        `wait`.
        """
        return self._clock.monotonic() - waited_s

    def list_longest(self, calls: Iterable[tuple[str, str, float]]) -> list[dict[str, Any]]:
        """Return [{on, what, since_ms (wall), count}], the longest first; `calls` adds (on, what,
        since).
        """
        now = self._clock.monotonic()
        oldest: dict[tuple[str, str], tuple[float, int]] = {}
        for on, what, since in [*self._waits.values(), *calls]:
            if now - since >= MIN_PUBLISHED_S:
                first, count = oldest.get((on, what), (since, 0))
                oldest[on, what] = (min(first, since), count + 1)
        epoch = self._clock.wall() - now
        longest = sorted(oldest.items(), key=lambda row: row[1][0])[:MAX_PUBLISHED]
        return [
            {"on": on, "what": what, "since_ms": int((epoch + since) * 1000), "count": count}
            for (on, what), (since, count) in longest
        ]
