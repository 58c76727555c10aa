"""How long an engine's token stream stood while new weights were put in place, beside how long its
steps take.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from meshrl.common.api.stats import PauseStats
from meshrl.common.base.clock import Clock

KEPT = 256  # the last of each: updates of hours, steps of seconds


class Pauses:
    """Written by the driver's side, read by the loop's."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pauses: deque[float] = deque(maxlen=KEPT)
        self._steps: deque[float] = deque(maxlen=KEPT)
        self.applied = 0  # updates that ended, whole or not

    @contextmanager
    def applying(self) -> Iterator[None]:
        """The time in which weights are replaced, and no step runs."""
        began = self._clock.monotonic()
        try:
            yield
        finally:
            self._pauses.append(self._clock.monotonic() - began)
            self.applied += 1

    @property
    def last_s(self) -> float:
        return self._pauses[-1] if self._pauses else 0.0

    def stepped(self, steps: int, busy_s: float) -> None:
        if steps > 0:
            self._steps.append(busy_s / steps)

    @property
    def stats(self) -> PauseStats:
        pauses, steps = list(self._pauses), list(self._steps)
        return PauseStats(
            applied=self.applied,
            pause_ms=_ms(pauses[-1:], 50),
            pause_p50_ms=_ms(pauses, 50),
            pause_p99_ms=_ms(pauses, 99),
            engine_step_ms=_ms(steps, 50),
        )


def _ms(seconds: list[float], percentile: float) -> float:
    return round(1e3 * float(np.percentile(seconds, percentile)), 3) if seconds else 0.0
