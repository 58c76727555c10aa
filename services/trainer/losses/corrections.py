"""Importance weights for tokens sampled by another policy than the one that a step begins with.

That policy is older, or the engine computes it in other arithmetic. The weight is the proximal /
behaviour probability, a constant of the gradient. The trust region is then around the proximal
policy (decoupled PPO: Hilton et al. 2021, arXiv 2110.00641; for stale trajectories, AReaL, Fu et
al. 2025, arXiv 2505.24298).

- `decoupled`: the weight as it is;
- `tis`: bounded above (truncated importance sampling; Ionides 2008; for engines, Yao et al. 2025);
- `mis`: 0 outside its bounds, so that such tokens have no gradient (IcePop, Ling team 2025, arXiv
  2510.18855).

The weight is that of a token, or of its sequence: the product over its tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshrl.common.job.config import AlgorithmConfig
from meshrl.common.job.correction_bounds import get_weight_bounds
from meshrl.services.trainer.losses.terms import LossTerms, compute_ratio


@torch.no_grad()
def compute_importance_weights(terms: LossTerms, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Return factors [t] of the tokens' losses, and a mask, bool [t], of bounded weights."""
    if config.correction == "none":
        one = torch.ones_like(terms.behaviour_logprobs)
        return one, torch.zeros_like(one, dtype=torch.bool)
    difference = terms.proximal_logprobs - terms.behaviour_logprobs
    if config.correction_level == "sequence":
        difference = terms.sum_by_sequence(difference)
    weight = compute_ratio(difference, difference.new_zeros(()))
    low, high = get_weight_bounds(config)
    if config.correction == "mis":
        outside = (weight < low) | (weight > high)
        return weight.masked_fill(outside, 0.0), outside
    return weight.clamp(max=high), weight > high
