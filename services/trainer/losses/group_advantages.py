"""Advantages relative to a trajectory's group, which several algorithms share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshrl.common.job.config import AlgorithmConfig

EPSILON = 1e-4  # added to a deviation before the division, in units of reward
NO_VARIANCE = 0.0  # largest less smallest reward of a group without a learning signal


def has_equal_rewards(rewards: NDArray[np.float64], config: AlgorithmConfig) -> bool:
    """Return True if the group has no learning signal: its float64 rewards are all equal."""
    return config.filter_zero_variance and float(np.ptp(rewards)) <= NO_VARIANCE


def center_rewards(
    rewards: NDArray[np.float64], config: AlgorithmConfig
) -> NDArray[np.float64] | None:
    """Return reward - mean, float64 [n]; None if the group has no learning signal."""
    return None if has_equal_rewards(rewards, config) else rewards - rewards.mean()


def normalize_rewards(
    rewards: NDArray[np.float64], config: AlgorithmConfig
) -> NDArray[np.float64] | None:
    """Return (reward - mean) / (population deviation + 1e-4), float64 [n].

    Return None if the group has no learning signal.
    """
    if has_equal_rewards(rewards, config):
        return None
    relative: NDArray[np.float64] = (rewards - rewards.mean()) / (rewards.std() + EPSILON)
    return relative
