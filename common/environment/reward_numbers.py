"""Validation of what a job's code returns as rewards: numbers, perhaps with metrics beside them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

MAX_METRICS = 32  # metrics of one trajectory
METRIC_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}")
REWARD_KEYS = ("reward", "metrics")


def to_finite_float(value: Any, name: str) -> float:
    """Return a finite number, also of numpy's types, as float64; True counts as 1.

    Raise TypeError for another type, such as the text of a number; ValueError if it is not finite.
    """
    if not isinstance(value, Real):
        raise TypeError(
            f"{name} must be a finite number, not {value!r:.80}, a {type(value).__name__}"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, not {value!r:.80}")
    return number


def parse_metrics(value: Any) -> dict[str, float]:
    """Return metrics, numbers by name. Raise TypeError or ValueError."""
    if not isinstance(value, Mapping):
        raise TypeError(f"'metrics' must be a dict of numbers by name, not {value!r:.80}")
    if len(value) > MAX_METRICS:
        raise ValueError(f"'metrics' has {len(value)} names; the limit is {MAX_METRICS}")
    for name in value:
        if not isinstance(name, str) or not METRIC_NAME.fullmatch(name):
            raise ValueError(
                f"the name of a metric must be up to 64 letters, digits, '_', '.' and '-', not "
                f"{name!r:.80}"
            )
    return {name: to_finite_float(number, f"metric {name!r}") for name, number in value.items()}


def parse_reward(value: Any, name: str = "a reward") -> float | dict[str, Any]:
    """Return a reward as a finite number, or with metrics as {'reward': number, 'metrics': dict}.

    Raise TypeError or ValueError.
    """
    if not isinstance(value, Mapping):
        return to_finite_float(value, name)
    if unknown := [key for key in value if key not in REWARD_KEYS]:
        raise ValueError(f"there is no key {unknown[0]!r}; there are 'reward' and 'metrics'")
    if "reward" not in value:
        raise ValueError("the key 'reward' is missing")
    reward = to_finite_float(value["reward"], "'reward'")
    metrics = parse_metrics(value.get("metrics") or {})
    return {"reward": reward, "metrics": metrics} if metrics else reward


def average_valid_metrics(tables: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the means of a library's metrics over tables, without those that are no valid metric.

    Of too many names, the first ones remain.
    """
    values: dict[str, list[float]] = {}
    for table in tables:
        for name, value in table.items():
            if METRIC_NAME.fullmatch(name) and isinstance(value, Real) and math.isfinite(value):
                values.setdefault(name, []).append(float(value))
    return {name: sum(values[name]) / len(values[name]) for name in sorted(values)[:MAX_METRICS]}


def split_reward(value: Any) -> tuple[float | None, dict[str, float]]:
    """Return reward and metrics of a value of `parse_reward`; None: no reward."""
    if isinstance(value, Mapping):
        return value["reward"], dict(value["metrics"])
    return value, {}
