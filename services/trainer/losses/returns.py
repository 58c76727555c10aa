"""Returns and advantages of single tokens: token rewards, discounted sums, GAE.

The steps of a trajectory are the tokens that the model wrote. Tokens of the environment between
them are skipped and take no time. Arrays [m] hold one number per step.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

from meshrl.common.job.config import AlgorithmConfig
from meshrl.services.trainer.bins.packing import TrainingSequence
from meshrl.services.trainer.losses.shaping import compute_divergences, is_kl_in_reward

Floats = NDArray[np.float64]
MIN_DEVIATION = 1e-8  # prevents a division by 0 for a batch without variance


def find_loss_tokens(sequence: TrainingSequence) -> NDArray[np.intp]:
    """Return the positions [m] in the sequence of the tokens that carry loss."""
    return np.flatnonzero(sequence.loss_mask[1:]) + 1


def compute_token_rewards(
    sequence: TrainingSequence, reward: float, config: AlgorithmConfig
) -> Floats:
    """Return rewards [m]: the reward at the last token, less each token's KL penalty."""
    rewards = np.zeros(sequence.loss_token_count)
    if is_kl_in_reward(config):
        rewards -= (
            config.kl_coefficient
            * compute_divergences(sequence, config)[find_loss_tokens(sequence)]
        )
    rewards[-1] += reward
    return rewards


def discount_rewards(rewards: Floats, discount: float) -> Floats:
    """Return [m]: reward of each token plus, discounted, of all that follow."""
    found, following = np.empty_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        following = rewards[t] + discount * following
        found[t] = following
    return found


def compute_gae(rewards: Floats, values: Floats, discount: float, gae_lambda: float) -> Floats:
    """Return generalised advantages [m] (Schulman et al. 2016, arXiv 1506.02438); end value 0."""
    ahead = np.append(values[1:], 0.0)
    return discount_rewards(rewards + discount * ahead - values, discount * gae_lambda)


def set_normalized_advantages(sequences: Many[TrainingSequence], advantages: Many[Floats]) -> None:
    """Set the sequences' advantages, with mean 0 and deviation 1 over all their tokens."""
    if not sequences:
        return
    every = np.concatenate(advantages)
    mean, deviation = every.mean(), every.std() + MIN_DEVIATION
    for sequence, own in zip(sequences, advantages, strict=True):
        sequence.advantages = np.zeros(len(sequence.tokens), np.float32)
        sequence.advantages[find_loss_tokens(sequence)] = (own - mean) / deviation
