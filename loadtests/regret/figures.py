"""Figures of planner against static splits: regret, moves that paid, errors of predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

FAR = 0.15  # a default split so much slower than the best one is far from it
SECONDS = ("before_s", "predicted_s", "observed_s", "expected_s", "regret_s")  # of a step
TOLD = ("from", "to", "step", *SECONDS, "paid", "undone")
PAID, REGRET, ERROR = 0.9, 0.10, 0.15  # bounds: least share, most p90, most p50


@dataclass(frozen=True)
class Compared:
    """One job: seconds with every static split and with the planner, its moves and judgements."""

    job: str
    static_s: Mapping[int, float]
    planner_s: float
    moves: int = 0
    judged: Sequence[Mapping[str, Any]] = field(default_factory=tuple)

    @property
    def best(self) -> int:
        """The split that takes the least time."""
        return min(self.static_s, key=lambda helping: (self.static_s[helping], helping))

    @property
    def regret(self) -> float:
        """Time lost against the best split, as a share; negative where no split is always best."""
        return self.planner_s / self.static_s[self.best] - 1.0

    @property
    def default_loses(self) -> float:
        """The same of the split that a job begins with."""
        return self.static_s[0] / self.static_s[self.best] - 1.0

    def row(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "static_s": {str(k): round(v, 1) for k, v in self.static_s.items()},
            "planner_s": round(self.planner_s, 1),
            "best": self.best,
            "default_loses": round(self.default_loses, 3),
            "regret": round(self.regret, 3),
            "moves": self.moves,
            "judged": [judgement(one) for one in self.judged],
        }


def judgement(told: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: told[key] for key in TOLD if key in told}
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in found.items()}


def errors(judged: Sequence[Mapping[str, Any]]) -> list[float]:
    pairs = ((told.get("predicted_s"), told.get("observed_s")) for told in judged)
    return [abs(p / o - 1.0) for p, o in pairs if p and o]


def figures(compared: Sequence[Compared], prefix: str = "") -> dict[str, Any]:
    """Return the figures of several jobs, flat; None where no move was judged."""
    judged = [told for one in compared for told in one.judged]
    paid = [bool(told.get("paid")) for told in judged]
    regrets = [one.regret for one in compared]
    off = errors(judged)
    found: dict[str, Any] = {
        "far_defaults": sum(one.default_loses >= FAR for one in compared),
        "moves": sum(one.moves for one in compared),
        "moves_that_paid": round(sum(paid) / len(paid), 4) if paid else None,
        "undone": sum(bool(told.get("undone")) for told in judged),
        "regret_p50": quantile(regrets, 0.5),
        "regret_p90": quantile(regrets, 0.9),
        "prediction_error_p50": quantile(off, 0.5) if off else None,
    }
    return {prefix + key: value for key, value in found.items()}


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile by linear interpolation."""
    return round(float(np.quantile(values, share)), 4)


def good(found: Mapping[str, Any], prefix: str = "") -> bool:
    """Return True if the figures are within their bounds."""
    paid, error = found[f"{prefix}moves_that_paid"], found[f"{prefix}prediction_error_p50"]
    return (
        paid is not None
        and paid >= PAID
        and found[f"{prefix}regret_p90"] <= REGRET
        and error is not None
        and error <= ERROR
    )
