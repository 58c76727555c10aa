"""Run to judge, and verdicts of rules about it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from statistics import fmean, variance
from typing import Any

from meshrl.view.health.run_figures import WINDOW, RunFigures

SHORT_WINDOW = 5  # steps of rules about what never happens
REWARD_FREE = ("sft", "distill")  # algorithms that do not use rewards


class Severity(IntEnum):
    """Severity of a rule's verdict; `FAILURE`: the run cannot have learned."""

    FINE, WARNING, FAILURE = range(3)


@dataclass(frozen=True)
class Verdict:
    """Verdict of a rule: what happened, and a cause and keys if they differ from the rule's."""

    severity: Severity
    text: str = ""
    cause: str = ""
    keys: tuple[str, ...] = ()


FINE = Verdict(Severity.FINE)


@dataclass(frozen=True)
class Case:
    """Run to judge: its figures, the document of its job, and counts of its trajectories."""

    figures: RunFigures
    document: Mapping[str, Any]
    counts: Mapping[str, int]
    is_over: bool  # no further step comes: fewer steps than a window are enough

    def read_key(self, table: str, key: str, default: Any) -> Any:
        """Return a key of the job; documents of earlier versions may lack it."""
        return self.document.get(table, {}).get(key, default)

    @property
    def algorithm(self) -> str:
        return str(self.read_key("algorithm", "name", "grpo"))

    def is_long_enough(self, window: int) -> bool:
        """Return True if there are as many steps as a window, or the run is over."""
        return self.figures.steps >= (1 if self.is_over else window)

    def find_recent(self, name: str, window: int) -> list[float]:
        """Return a figure of the last steps; none if it is missing or there are too few."""
        return self.figures.select_recent(name, window) if self.is_long_enough(window) else []

    @property
    def lacks_signal(self) -> bool:
        """True if no step has trained a token, or all rewards of each group were equal."""
        trained = self.figures.find_range("sequences")
        spread = self.figures.find_range("reward_spread")
        return (trained is not None and trained.high == 0) or (
            spread is not None and spread.high == 0 and self.algorithm not in REWARD_FREE
        )

    @property
    def has_improved(self) -> bool:
        """True if the reward of the last steps exceeds that of the first by two standard errors.

        For algorithms without rewards the loss must be lower.
        """
        name, sign = ("loss", -1.0) if self.algorithm in REWARD_FREE else ("reward", 1.0)
        count = min(WINDOW, self.figures.steps // 2)
        if count < 2 or self.lacks_signal or self.figures.find_range(name) is None:
            return False
        before = [row[name] for row in self.figures.first[:count]]
        after = self.figures.select_recent(name, count)
        error = math.sqrt((variance(before) + variance(after)) / count)
        return sign * (fmean(after) - fmean(before)) > max(2 * error, 1e-9)


def judge_limit(value: float, limit: float, text: str) -> Verdict:
    """Return a warning with a text if a value reaches its limit."""
    return Verdict(Severity.WARNING, text) if value >= limit else FINE


def format_share(share: float) -> str:
    return f"{100 * share:.0f} %"


def format_steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"
