"""Rates of a job: tokens and steps, from its counters and the rows of its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from meshrl.view.mesh.mesh_snapshot import StepRows

WINDOW_S = 6.0  # rates are over this long; shorter flickers, longer lags
ETA_STEPS = 8  # the last steps that the time to go is judged by


class TokenRate:
    """Rate of a counter in tokens/s over the last seconds."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, float]] = deque()

    def update(self, at_s: float, total: float) -> float:
        """Return the rate with this reading; a counter that fell back belongs to a new process."""
        if self._readings and total < self._readings[-1][1]:
            self._readings.clear()
        self._readings.append((at_s, total))
        while len(self._readings) > 2 and at_s - self._readings[0][0] > WINDOW_S:
            self._readings.popleft()
        (start, first), (end, last) = self._readings[0], self._readings[-1]
        return (last - first) / (end - start) if end > start else 0.0


def compute_trained_rate(rows: StepRows) -> float:
    """Return the tokens/s trained over the last steps."""
    recent = rows[-ETA_STEPS:]
    if len(recent) < 2:
        return 0.0
    span = float(recent[-1]["wall"]) - float(recent[0]["wall"])
    return sum(float(row["tokens_trained"]) for row in recent[1:]) / span if span > 0 else 0.0


def estimate_remaining_s(rows: StepRows, total_steps: int) -> float | None:
    """Return seconds for the remaining steps, by the median of the last; None before the third."""
    walls = [float(row["wall"]) for row in rows[-ETA_STEPS - 1 :]]
    if len(walls) < 3:
        return None
    spans = sorted(b - a for a, b in pairwise(walls))
    return spans[len(spans) // 2] * (total_steps - int(rows[-1]["step"]))


def compute_steps_per_min(committed_ms: Sequence[int], now_ms: float) -> float | None:
    """Return steps a minute, by the median of the last steps; None before the third step.

    The step under way counts instead where it has already taken longer.
    """
    last = committed_ms[-ETA_STEPS - 1 :]
    if len(last) < 3:
        return None
    took_ms = median(b - a for a, b in pairwise(last))
    longest_ms = max(took_ms, now_ms - last[-1])
    return 60_000 / longest_ms if longest_ms > 0 else None


def compute_wait_share(rows: StepRows) -> float | None:
    """Return the share of the trainer's time in the last steps that it waited for trajectories."""
    last = [row for row in rows[-ETA_STEPS:] if "wait_s" in row and "train_s" in row]
    waited_s = sum(float(row["wait_s"]) for row in last)
    total_s = waited_s + sum(float(row["train_s"]) for row in last)
    return waited_s / total_s if total_s > 0 else None


def is_supervised_step(row: Mapping[str, Any]) -> bool:
    """Return True for a step whose tokens no policy sampled, so that they have no ratio."""
    return bool(row.get("model_tokens")) and row.get("ratio_max", 1.0) is None
