"""Bounds of importance weights, which correct for tokens that another policy sampled.

The trainer applies them, and job files are checked against them.
"""

from __future__ import annotations

import math

from meshrl.common.job.config import AlgorithmConfig

# Largest weight of each correction, from its source; decoupled PPO has no bound.
MAX_WEIGHTS = {"decoupled": math.inf, "tis": 2.0, "mis": 5.0}
LOWEST = {"mis": 0.5}  # smallest weight that is kept


def get_weight_bounds(config: AlgorithmConfig) -> tuple[float, float]:
    """Return the lowest and largest weight: those of the job file, or else the correction's own."""
    low, high, name = config.correction_low, config.correction_high, config.correction
    return (
        low if low >= 0 else LOWEST.get(name, 0.0),
        high if high >= 0 else MAX_WEIGHTS.get(name, math.inf),
    )
