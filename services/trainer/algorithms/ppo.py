"""PPO (Schulman et al. 2017, arXiv 1707.06347) with a critic, a value model beside the policy.

Unlike in the other algorithms, the baseline is learned. Token advantages are generalised ones (GAE)
of the critic's values, normalised over the step. The value loss is in `critic.py`.
"""

from __future__ import annotations

import numpy as np

from meshrl.common.job.config import AlgorithmConfig
from meshrl.services.trainer.algorithms.hooks import Algorithm
from meshrl.services.trainer.algorithms.reinforce_pp import use_rewards_as_advantages
from meshrl.services.trainer.bins.packing import TrainingSequence
from meshrl.services.trainer.losses.returns import (
    compute_gae,
    compute_token_rewards,
    find_loss_tokens,
    set_normalized_advantages,
)
from meshrl.services.trainer.losses.surrogate import PPO_CLIPS, make_surrogate_loss


def prepare_advantages(sequences: list[TrainingSequence], config: AlgorithmConfig) -> None:
    """Set generalised advantages from `extras["values"]`, and targets `extras["returns"]`."""
    found = []
    for sequence in sequences:
        own = find_loss_tokens(sequence)
        values = sequence.extras["values"][own].astype(np.float64)
        rewards = compute_token_rewards(sequence, float(sequence.advantages), config)
        found.append(compute_gae(rewards, values, config.discount, config.gae_lambda))
        returns = np.zeros(len(sequence.tokens), np.float32)
        returns[own] = found[-1] + values
        sequence.extras["returns"] = returns
    set_normalized_advantages(sequences, found)


ALGORITHM = Algorithm(
    use_rewards_as_advantages,
    make_surrogate_loss(PPO_CLIPS),
    prepare_advantages=prepare_advantages,
    has_critic=True,
)
