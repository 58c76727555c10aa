"""How long a step and its parts take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

CHECKPOINT_PAUSE = "checkpoint_pause_s"  # among a step's metrics, where it wrote a checkpoint


@dataclass(frozen=True)
class StepDurations:
    """A step's times, as its metrics name them; seconds."""

    step: int
    wait_s: float
    train_s: float
    turn_wait_s: float
    wall: float  # since 1970
    workers: dict[str, float]


class StepPartTimer:
    """Seconds by part: of the last step that has ended, and of all so far."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        """`now` stands while the core does not work."""
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
        """A step begins; one that was cut off is forgotten."""
        self._step = {}

    def end_step(self) -> None:
        self.last_step_s, self._step = self._step, {}

    @property
    def rounded_last_step_s(self) -> dict[str, float]:
        """Those of the last step, for people."""
        return {part: round(seconds, 4) for part, seconds in self.last_step_s.items()}
