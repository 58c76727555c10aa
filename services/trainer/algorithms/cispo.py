"""CISPO (MiniMax 2025, arXiv 2506.13585): clips the ratio, but no token's gradient.

Unlike in PPO, the clipped ratio is a constant weight of the log-probability. So rare tokens that an
update moves far keep their gradient. There is no lower bound.
"""

from __future__ import annotations

from torch import Tensor

from meshrl.common.job.config import AlgorithmConfig
from meshrl.services.trainer.algorithms.hooks import Algorithm
from meshrl.services.trainer.losses.group_advantages import normalize_rewards
from meshrl.services.trainer.losses.surrogate import ClipBounds, compute_ratios
from meshrl.services.trainer.losses.terms import LossTerms

CLIPS = ClipBounds(1.0, 0.28)


def token_loss(terms: LossTerms, config: AlgorithmConfig) -> Tensor:
    """Return the loss of each trained token [t]: its weighted negative log-probability.

    The weight is the advantage times the clipped ratio, which has no gradient.
    """
    clips = CLIPS.with_overrides(config)
    weight = compute_ratios(terms, config).detach().clamp(1 - clips.low, 1 + clips.high)
    return -weight * terms.advantages * terms.logprobs


ALGORITHM = Algorithm(normalize_rewards, token_loss)
