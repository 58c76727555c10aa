"""Supervised fine-tuning: cross-entropy of the tokens that the model is to write."""

from __future__ import annotations

from torch import Tensor

from meshrl.common.job.config import AlgorithmConfig
from meshrl.services.trainer.algorithms.hooks import Algorithm, compute_unit_advantages
from meshrl.services.trainer.losses.terms import LossTerms


def token_loss(terms: LossTerms, config: AlgorithmConfig) -> Tensor:
    """Return the loss of each trained token [t]: its negative log-probability."""
    return -terms.logprobs


ALGORITHM = Algorithm(compute_unit_advantages, token_loss, has_behaviour_policy=False)
