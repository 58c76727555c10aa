"""Objective of a bin's tokens, by an algorithm, weights, corrections and a KL term.

It needs no model: its gradient with respect to the log-probabilities starts the model's backward
pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshrl.common.job.config import AlgorithmConfig
from meshrl.services.trainer.algorithms import get_algorithm
from meshrl.services.trainer.losses import kl
from meshrl.services.trainer.losses.corrections import compute_importance_weights
from meshrl.services.trainer.losses.shaping import is_kl_in_loss
from meshrl.services.trainer.losses.surrogate import select_old_logprobs
from meshrl.services.trainer.losses.terms import LossTerms


@dataclass(slots=True)
class Objective:
    """Objective of a bin's trained tokens, [t] each, detached."""

    losses: Tensor  # weighted; their sum is the loss of the bin
    logprob_gradient: Tensor  # gradient of that sum with respect to the log-probabilities
    clipped_mask: Tensor  # bool: the token has an advantage but no gradient
    # bool: likelier than under the old policy; of the sequence where ratios are per sequence
    increased_mask: Tensor
    corrected_mask: Tensor  # bool: its importance weight met a bound


def compute_objective(terms: LossTerms, weight: Tensor, config: AlgorithmConfig) -> Objective:
    """Return the learner's objective; `weight` [t] is that of each token's sequence.

    Tokens without weight need no extras: a bin of them has no gradient.
    """
    if not weight.any():
        nothing = torch.zeros_like(weight)
        no = nothing.bool()
        return Objective(nothing, nothing, no, no, no)
    logprobs = terms.logprobs.detach().requires_grad_()
    own = replace(terms, logprobs=logprobs)
    factor, bounded = compute_importance_weights(own, config)
    with torch.enable_grad():
        losses = get_algorithm(config.name).token_loss(own, config) * (factor * weight)
        (slope,) = torch.autograd.grad(losses.sum(), logprobs)
        clipped = (slope == 0) & (terms.advantages != 0) & (factor != 0)
        if is_kl_in_loss(config):
            divergence = kl.estimate_kl(config.kl, logprobs, own.get_extra("reference"))
            kl_losses = divergence * (config.kl_coefficient * weight)
            slope = slope + torch.autograd.grad(kl_losses.sum(), logprobs)[0]
            losses = losses + kl_losses
    difference = logprobs.detach() - select_old_logprobs(own, config)
    if get_algorithm(config.name).sequence_ratio:
        difference = own.sum_by_sequence(difference)
    return Objective(losses.detach(), slope, clipped, difference > 0, bounded)
