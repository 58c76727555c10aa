"""Where something has spent its time: one state after the other, from its begin to its end, without
a gap or an overlap.
"""

from __future__ import annotations

from meshrl.common.base.clock import Clock

MAX_PARTS = 4096  # parts that are kept: what follows counts as the last one's


class NullStopwatch:
    """Measures nothing: what is not traced has this one."""

    __slots__ = ()

    def enter(self, state: str) -> None:
        """It is in `state` from now on."""


NULL_STOPWATCH = NullStopwatch()


class Stopwatch(NullStopwatch):
    """Begins in a state. A change of state costs two readings of a clock at most."""

    __slots__ = ("_clock", "_parts", "_since", "_state", "began")

    def __init__(self, clock: Clock, state: str) -> None:
        self._clock, self._state = clock, state
        self._since = clock.monotonic()
        self._parts: list[str | float] = []  # a state, its seconds, the next state
        self.began = clock.wall()

    def enter(self, state: str) -> None:
        """It is in `state` from now on."""
        if state != self._state and len(self._parts) < 2 * MAX_PARTS:
            now = self._clock.monotonic()
            self._parts += (self._state, now - self._since)
            self._state, self._since = state, now

    def list_parts(self) -> list[str | float]:
        """Each state until now and its milliseconds, one after the other, less those of none."""
        every = [*self._parts, self._state, self._clock.monotonic() - self._since]
        told: list[str | float] = []
        for state, seconds in zip(every[::2], every[1::2], strict=True):
            assert isinstance(seconds, float)
            if ms := round(1000 * seconds, 3):
                told += (state, ms)
        return told
