"""GRPO: a trajectory is as good as it is better than the others of its group.

Advantages after Shao et al. 2024 (arXiv 2402.03300), without a KL term; the loss is averaged over
all tokens of a step and clipped higher above than below, after DAPO (arXiv 2503.14476), and bounded
for bad tokens that the policy has moved towards, after dual-clip PPO (arXiv 1912.09729).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.config import AlgorithmConfig

EPSILON = 1e-4  # added to the deviation, in units of reward
NO_VARIANCE = 1e-6  # deviation below which all rewards of a group count as equal


def advantages(
    rewards: NDArray[np.floating], config: AlgorithmConfig
) -> NDArray[np.float64] | None:
    """(reward - mean) / (deviation + 1e-4) for each of a group; None: no variance, filtered."""
    values = np.asarray(rewards, dtype=np.float64)
    deviation = float(values.std())
    if config.filter_zero_variance and deviation < NO_VARIANCE:
        return None
    relative: NDArray[np.float64] = (values - values.mean()) / (deviation + EPSILON)
    return relative


def token_loss(
    logprobs: Tensor, behaviour: Tensor, advantage: Tensor, config: AlgorithmConfig
) -> Tensor:
    """Loss of each token under the policy that is trained (`logprobs`) and the one that sampled it.

    max(-ratio A, -clip(ratio) A), and for A < 0 at most -dual_clip A.
    """
    ratio = (logprobs - behaviour).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -torch.minimum(ratio * advantage, clipped * advantage)
    bound = torch.where(advantage < 0, -config.dual_clip * advantage, torch.inf)
    return torch.minimum(loss, bound)
