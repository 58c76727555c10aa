"""Figures of a run so far, from the rows of its steps, in memory that does not grow with them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

WINDOW = 10  # steps whose figures are held: the first ones and the last ones
# Names of figures that a row has under the same name.
ROW_FIGURES = (
    *("reward", "reward_spread", "groups", "filtered_share", "sequences", "truncated", "masked"),
    *("turns", "failed_share", "loss", "kl", "reference_kl", "grad_norm"),
)
# Figures that only some steps have: their last values are held apart.
OCCASIONAL_FIGURES = ("logprob_gap_mean",)

Figures = dict[str, float]


@dataclass
class FigureRange:
    """Range and sum of one figure over the steps that have it."""

    count: int = 0
    total: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def add(self, value: float) -> None:
        self.count, self.total = self.count + 1, self.total + value
        self.low, self.high = min(self.low, value), max(self.high, value)


@dataclass
class RunFigures:
    """Figures of the steps of one lineage: ranges, the first steps and the last ones."""

    steps: int = 0
    last_step: int = 0
    lineage: int = 0
    ranges: dict[str, FigureRange] = field(default_factory=dict)
    first: list[Figures] = field(default_factory=list)
    recent: deque[Figures] = field(default_factory=lambda: deque(maxlen=WINDOW))
    occasional: dict[str, deque[float]] = field(default_factory=dict)
    _weights: str = ""  # identity of the weights after the last step

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the row of the next step."""
        found = extract_figures(row)
        weights = str(row.get("masters", ""))
        if weights and self._weights:
            found["is_unchanged"] = float(weights == self._weights)
        self._weights, self.steps = weights, self.steps + 1
        self.last_step, self.lineage = int(row["step"]), int(row.get("lineage", 0))
        for name, value in found.items():
            self.ranges.setdefault(name, FigureRange()).add(value)
        for name in OCCASIONAL_FIGURES:
            if (number := read_number(row, name)) is not None:
                self.occasional.setdefault(name, deque(maxlen=WINDOW)).append(number)
        if len(self.first) < WINDOW:
            self.first.append(found)
        self.recent.append(found)

    def find_range(self, name: str) -> FigureRange | None:
        """Return the range of a figure; None unless all steps have the figure."""
        found = self.ranges.get(name)
        return found if found is not None and found.count == self.steps else None

    def select_recent(self, name: str, count: int) -> list[float]:
        """Return a figure of the last `count` steps; none unless each has the figure."""
        rows = list(self.recent)[-count:]
        return [row[name] for row in rows] if all(name in row for row in rows) else []


def collect_figures(rows: Iterable[Mapping[str, Any]]) -> RunFigures:
    """Return the figures of a run from all of its rows, which are read once."""
    figures = RunFigures()
    for row in rows:
        figures.add(row)
    return figures


def extend_figures(figures: RunFigures, rows: Iterable[Mapping[str, Any]]) -> RunFigures:
    """Add the rows that follow the last one; start again if a new lineage has replaced it."""
    held = list(rows)
    last = held[-1] if held else {}
    is_replaced = (
        not held
        or int(last["step"]) < figures.last_step
        or int(last.get("lineage", 0)) != figures.lineage
    )
    figures = RunFigures() if is_replaced else figures
    for row in held:
        if row["step"] > figures.last_step:
            figures.add(row)
    return figures


def extract_figures(row: Mapping[str, Any]) -> Figures:
    """Return the figures of one row by name; those that it lacks are left out."""
    found = {name: v for name in ROW_FIGURES if (v := read_number(row, name)) is not None}
    if (scored := count_scored(row)) is not None:
        found["scored"] = scored
    if (share := compute_truncated_share(row)) is not None:
        found["truncated_share"] = share
    entropy = read_number(row, "entropy")
    if entropy is not None and found.get("sequences"):  # without a trained token it is 0
        found["entropy"] = entropy
    return found


def count_scored(row: Mapping[str, Any]) -> float | None:
    """Return the number of scored trajectories of a step; None if its row has no lengths."""
    tokens, mean = read_number(row, "tokens"), read_number(row, "length_mean")
    if tokens is None or mean is None:
        return None
    return float(round(tokens / mean)) if mean > 0 else 0.0


def compute_truncated_share(row: Mapping[str, Any]) -> float | None:
    """Return the share of the scored trajectories of a step that were truncated."""
    truncated, scored = read_number(row, "truncated"), count_scored(row)
    return truncated / scored if truncated is not None and scored else None


def read_number(row: Mapping[str, Any], key: str) -> float | None:
    """Return a number of a row; None if the row lacks it."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else None
