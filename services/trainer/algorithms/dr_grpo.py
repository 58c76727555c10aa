"""Dr. GRPO (Liu et al. 2025, arXiv 2503.20783): GRPO without its two biases.

It differs from GRPO in what it does not divide by: advantages keep the scale of the rewards, so
that hard and easy prompts weigh alike, and a token's loss is divided by a constant instead of its
trajectory's length, so that long failures are not favoured.
"""

from __future__ import annotations

from torch import Tensor

from common.job.config import AlgorithmConfig
from services.trainer.algorithms.hooks import Algorithm
from services.trainer.losses.group_advantages import centred as advantages
from services.trainer.losses.surrogate import PPO, clipped, ratios
from services.trainer.losses.terms import LossTerms


def token_loss(terms: LossTerms, config: AlgorithmConfig) -> Tensor:
    """Loss of each trained token [t]: the clipped surrogate, with PPO's bounds."""
    return clipped(ratios(terms, config), terms.advantage, PPO.chosen(config))


ALGORITHM = Algorithm(advantages, token_loss, aggregation="constant")
