"""Durations of a step and its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

CHECKPOINT_PAUSE = "checkpoint_pause_s"  # metric of a step that wrote a checkpoint


@dataclass(frozen=True)
class StepDurations:
    """Times of a step under the names of its metrics; seconds."""

    step: int
    wait_s: float
    train_s: float
    turn_wait_s: float
    wall: float  # seconds since 1970
    workers: dict[str, float]


class StepPartTimer:
    """Timer of a step's parts: of the last finished step, and of all so far, seconds."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        """Create a timer with a clock that stands still while the core does not work."""
        self._now = now_s
        self._step: dict[str, float] = {}
        self.last_step_s: dict[str, float] = {}
        self.total_s: dict[str, float] = {}

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        began = self._now()
        try:
            yield
        finally:
            self.add(part, self._now() - began)

    def add(self, part: str, seconds: float) -> None:
        self._step[part] = self._step.get(part, 0.0) + seconds
        self.total_s[part] = self.total_s.get(part, 0.0) + seconds

    def begin_step(self) -> None:
        """Begin a step; discard the times of an interrupted one."""
        self._step = {}

    def end_step(self) -> None:
        self.last_step_s, self._step = self._step, {}

    @property
    def rounded_last_step_s(self) -> dict[str, float]:
        """Seconds of the last step's parts, rounded for display."""
        return {part: round(seconds, 4) for part, seconds in self.last_step_s.items()}
