"""Importance weights for tokens that another policy sampled than the one a step begins with.

Other, because it is older, or because the engine computes it in other arithmetic. The weight is
proximal / behaviour probability, a constant of the gradient; the trust region then lies around the
proximal policy (decoupled PPO: Hilton et al. 2021, arXiv 2110.00641; for stale trajectories, AReaL,
Fu et al. 2025, arXiv 2505.24298).

- `decoupled`: the weight as it is;
- `tis`: cut off above (truncated importance sampling; Ionides 2008; for engines, Yao et al. 2025);
- `mis`: 0 outside its bounds, so that such tokens teach nothing (IcePop, Ling team 2025, arXiv
  2510.18855).

Of a token, or of its whole sequence: the product over its tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshrl.common.job.config import AlgorithmConfig
from meshrl.common.job.correction_bounds import get_weight_bounds
from meshrl.services.trainer.losses.terms import LossTerms, compute_ratio


@torch.no_grad()
def compute_importance_weights(terms: LossTerms, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """([t] factors of the tokens' losses, [t] bool: where a bound was met)."""
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
