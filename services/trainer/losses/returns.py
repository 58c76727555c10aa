"""Returns and advantages of single tokens: rewards of tokens, discounted sums, GAE.

A trajectory's steps are the tokens that the model wrote; what an environment wrote between them is
skipped, as if its tokens took no time. Arrays [m] hold one number for each.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

from meshrl.common.job.config import AlgorithmConfig
from meshrl.services.trainer.bins.packing import Sequence
from meshrl.services.trainer.losses.shaping import divergences, kl_in_reward

Floats = NDArray[np.float64]
LEAST_DEVIATION = 1e-8  # keeps a batch without variance from dividing by 0


def own_tokens(sequence: Sequence) -> NDArray[np.intp]:
    """[m] places in the sequence of the tokens that carry loss."""
    return np.flatnonzero(sequence.mask[1:]) + 1


def token_rewards(sequence: Sequence, reward: float, config: AlgorithmConfig) -> Floats:
    """[m]: the reward at the last token, less what each token pays for its divergence."""
    rewards = np.zeros(sequence.trained)
    if kl_in_reward(config):
        rewards -= config.kl_coefficient * divergences(sequence, config)[own_tokens(sequence)]
    rewards[-1] += reward
    return rewards


def discounted(rewards: Floats, discount: float) -> Floats:
    """[m]: reward of each token plus, discounted, of all that follow."""
    found, following = np.empty_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        following = rewards[t] + discount * following
        found[t] = following
    return found


def gae(rewards: Floats, values: Floats, discount: float, trace: float) -> Floats:
    """Generalised advantages [m] (Schulman et al. 2016, arXiv 1506.02438); the end is worth 0."""
    ahead = np.append(values[1:], 0.0)
    return discounted(rewards + discount * ahead - values, discount * trace)


def set_normalised(sequences: Many[Sequence], advantages: Many[Floats]) -> None:
    """Gives the sequences these advantages, with mean 0 and deviation 1 over all their tokens."""
    if not sequences:
        return
    every = np.concatenate(advantages)
    mean, deviation = every.mean(), every.std() + LEAST_DEVIATION
    for sequence, own in zip(sequences, advantages, strict=True):
        sequence.advantages = np.zeros(len(sequence.tokens), np.float32)
        sequence.advantages[own_tokens(sequence)] = (own - mean) / deviation
