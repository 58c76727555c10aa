"""What a shard counts of its own work, as real ones publish it (`services/rollout/worked.py`)."""

from __future__ import annotations

from collections import deque

import numpy as np

from common.pool.measured import LEVELS, Lengths, Work
from services.rollout.worked import LATEST, LEAST
from sim.cluster.agenda import Agenda


class Occupied:
    """Seconds, summed over who is somewhere."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda, self._there = agenda, 0
        self._seconds, self._at_s = 0.0, agenda.now_s

    def enter(self) -> None:
        """One more is there."""
        self._seconds, self._there = self.seconds, self._there + 1
        self._at_s = self._agenda.now_s

    def leave(self) -> None:
        """One less is."""
        self._seconds, self._there = self.seconds, self._there - 1
        self._at_s = self._agenda.now_s

    @property
    def seconds(self) -> float:
        """So far."""
        return self._seconds + self._there * (self._agenda.now_s - self._at_s)


class Counting:
    """The counts of one shard."""

    def __init__(self, agenda: Agenda) -> None:
        self.flight, self.turn, self.engine = Occupied(agenda), Occupied(agenda), Occupied(agenda)
        self.groups = self.trajectories = 0
        self.sampled = self.prompted = 0.0
        self._latest: deque[tuple[float, float]] = deque(maxlen=LATEST)

    def ended(self, sampled: float, prompt: float) -> None:
        """A trajectory is over."""
        self.trajectories += 1
        self.prompted += prompt
        self._latest.append((sampled, prompt))

    @property
    def lengths(self) -> Lengths | None:
        """Of the latest; None as long as they are few."""
        if len(self._latest) < LEAST:
            return None
        sampled, prompts = np.array(self._latest, np.float64).T
        levels = np.quantile(sampled, LEVELS)
        return Lengths(len(self._latest), tuple(map(float, levels)), float(prompts.mean()))

    @property
    def work(self) -> Work:
        """All so far."""
        flight_s, turn_s, engine_s = (s.seconds for s in (self.flight, self.turn, self.engine))
        return Work(
            groups=self.groups,
            trajectories=self.trajectories,
            sampled=self.sampled,
            flight_s=flight_s,
            engine_s=engine_s,
            queue_s=turn_s - engine_s,
            tool_s=flight_s - turn_s,
            prompted=self.prompted,
        )
