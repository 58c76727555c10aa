"""REINFORCE++ (Hu 2025, arXiv 2501.03262): PPO without a critic; the baseline is the batch.

A trajectory is compared with all tokens of the step instead of its own group, so that a group needs
no variance. With `kl_in = "reward"` each token pays for its own divergence and for that of the
tokens that follow.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshrl.common.job.config import AlgorithmConfig
from meshrl.services.trainer.algorithms.hooks import Algorithm
from meshrl.services.trainer.bins.packing import TrainingSequence
from meshrl.services.trainer.losses.returns import (
    compute_token_rewards,
    discount_rewards,
    set_normalized_advantages,
)
from meshrl.services.trainer.losses.surrogate import PPO_CLIPS, make_surrogate_loss


def use_rewards_as_advantages(
    rewards: NDArray[np.float64], config: AlgorithmConfig
) -> NDArray[np.float64]:
    """Return the rewards, float64 [n], unchanged; `prepare_advantages` uses them."""
    return rewards


def prepare_advantages(sequences: list[TrainingSequence], config: AlgorithmConfig) -> None:
    """Set each token's advantage: the discounted later rewards, normalised over the step."""
    rewards = [compute_token_rewards(s, float(s.advantages), config) for s in sequences]
    set_normalized_advantages(
        sequences, [discount_rewards(own, config.discount) for own in rewards]
    )


ALGORITHM = Algorithm(
    use_rewards_as_advantages, make_surrogate_loss(PPO_CLIPS), prepare_advantages=prepare_advantages
)
