"""Stopwatch of consecutive states, without gaps or overlaps between them."""

from __future__ import annotations

from meshrl.common.base.clock import Clock

MAX_PARTS = 4096  # stored parts; later states count as the last one


class NullStopwatch:
    """Stopwatch without measurements, for untraced objects."""

    __slots__ = ()

    def enter(self, state: str) -> None:
        """Enter `state`."""


NULL_STOPWATCH = NullStopwatch()


class Stopwatch(NullStopwatch):
    """Stopwatch that starts in a state. A change of state costs at most two clock readings."""

    __slots__ = ("_clock", "_parts", "_since", "_state", "started_at")

    def __init__(self, clock: Clock, state: str) -> None:
        self._clock, self._state = clock, state
        self._since = clock.monotonic()
        self._parts: list[str | float] = []  # a state, its seconds, the next state
        self.started_at = clock.wall()

    def enter(self, state: str) -> None:
        """Enter `state`."""
        if state != self._state and len(self._parts) < 2 * MAX_PARTS:
            now = self._clock.monotonic()
            self._parts += (self._state, now - self._since)
            self._state, self._since = state, now

    def list_parts(self) -> list[str | float]:
        """Return states and their milliseconds alternately, in order, without those that round to
        0.
        """
        every = [*self._parts, self._state, self._clock.monotonic() - self._since]
        parts: list[str | float] = []
        for state, seconds in zip(every[::2], every[1::2], strict=True):
            assert isinstance(seconds, float)
            if ms := round(1000 * seconds, 3):
                parts += (state, ms)
        return parts
