"""RLOO (Ahmadian et al. 2024, arXiv 2402.14740): REINFORCE with the rest of the group as baseline.

It differs from the paper off-policy only. The paper uses log-probabilities; this file uses ratios,
clipped as PPO's, which have the same gradient at a ratio of 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshrl.common.job.config import AlgorithmConfig
from meshrl.services.trainer.algorithms.hooks import Algorithm
from meshrl.services.trainer.losses.group_advantages import has_equal_rewards
from meshrl.services.trainer.losses.surrogate import PPO_CLIPS, make_surrogate_loss


def compute_advantages(
    rewards: NDArray[np.float64], config: AlgorithmConfig
) -> NDArray[np.float64] | None:
    """Return reward - mean of the others, float64 [n]; 0 for a trajectory without others."""
    others = len(rewards) - 1
    if has_equal_rewards(rewards, config):
        return None
    relative: NDArray[np.float64] = rewards - (rewards.sum() - rewards) / max(others, 1)
    return relative if others else np.zeros_like(rewards)


ALGORITHM = Algorithm(compute_advantages, make_surrogate_loss(PPO_CLIPS), aggregation="constant")
