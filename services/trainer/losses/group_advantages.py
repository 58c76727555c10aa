"""Advantages that compare the trajectories of a group, which several algorithms share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshrl.common.job.config import AlgorithmConfig

EPSILON = 1e-4  # added to a deviation before dividing by it, in units of reward
NO_VARIANCE = 0.0  # largest less smallest reward of a group that has nothing to teach


def has_equal_rewards(rewards: NDArray[np.float64], config: AlgorithmConfig) -> bool:
    """True if the group has nothing to teach: its rewards, compared as float64, are all equal."""
    return config.filter_zero_variance and float(np.ptp(rewards)) <= NO_VARIANCE


def center_rewards(
    rewards: NDArray[np.float64], config: AlgorithmConfig
) -> NDArray[np.float64] | None:
    """reward - mean, float64 [n]; None: the group has nothing to teach."""
    return None if has_equal_rewards(rewards, config) else rewards - rewards.mean()


def normalize_rewards(
    rewards: NDArray[np.float64], config: AlgorithmConfig
) -> NDArray[np.float64] | None:
    """(reward - mean) / (deviation + 1e-4), float64 [n], with the deviation of the population;
    None: the group has nothing to teach.
    """
    if has_equal_rewards(rewards, config):
        return None
    relative: NDArray[np.float64] = (rewards - rewards.mean()) / (rewards.std() + EPSILON)
    return relative
