"""Pauses of an engine's token stream during weight updates, beside the duration of its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from meshrl.common.api.stats import PauseStats
from meshrl.common.base.clock import Clock

MAX_SAMPLES = 256  # recent samples of each kind: hours of updates, seconds of steps


class UpdatePauses:
    """Pause measurements, written by the driver and read by the event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pauses: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._steps: deque[float] = deque(maxlen=MAX_SAMPLES)
        self.updates = 0  # finished updates, successful or not

    @contextmanager
    def measure_update(self) -> Iterator[None]:
        """Measure the time in which weights are replaced and no step runs."""
        began = self._clock.monotonic()
        try:
            yield
        finally:
            self._pauses.append(self._clock.monotonic() - began)
            self.updates += 1

    @property
    def last_pause_s(self) -> float:
        return self._pauses[-1] if self._pauses else 0.0

    def add_steps(self, steps: int, busy_s: float) -> None:
        if steps > 0:
            self._steps.append(busy_s / steps)

    @property
    def stats(self) -> PauseStats:
        pauses, steps = list(self._pauses), list(self._steps)
        return PauseStats(
            applied=self.updates,
            pause_ms=_percentile_ms(pauses[-1:], 50),
            pause_p50_ms=_percentile_ms(pauses, 50),
            pause_p99_ms=_percentile_ms(pauses, 99),
            engine_step_ms=_percentile_ms(steps, 50),
        )


def _percentile_ms(seconds: list[float], percentile: float) -> float:
    return round(1e3 * float(np.percentile(seconds, percentile)), 3) if seconds else 0.0
