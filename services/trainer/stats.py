"""What is known of a step's gradient beside the gradient: sums over the trained tokens of bins."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from services.trainer.algorithms.objective import Objective
from services.trainer.algorithms.terms import Terms


@dataclass(slots=True)
class BinStats:
    """Sums over the trained tokens of bins; `*_max` are maxima."""

    tokens: int = 0
    loss_sum: float = 0.0
    entropy_sum: float = 0.0
    clipped: int = 0  # tokens whose loss has no gradient
    kl_sum: float = 0.0  # of behaviour from the trained policy, Schulman's k3 estimate
    fresh_tokens: int = 0  # sampled, with their whole prefix, under the version being trained
    gap_sum: float = 0.0  # |log-probability here - at sampling| over fresh tokens
    gap_max: float = 0.0

    def __add__(self, other: BinStats) -> BinStats:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return BinStats(**sums | {"gap_max": max(self.gap_max, other.gap_max)})


@torch.no_grad()
def describe(terms: Terms, found: Objective, entropy: Tensor, fresh: Tensor) -> BinStats:
    """Of the trained tokens of a bin, [t] each."""
    log_ratio = terms.logprobs - terms.behaviour
    gaps = log_ratio.abs()[fresh]
    return BinStats(
        tokens=len(found.losses),
        loss_sum=float(found.losses.sum()),
        entropy_sum=float(entropy.sum()),
        clipped=int(found.clipped.sum()),
        kl_sum=float((log_ratio.exp() - 1 - log_ratio).sum()),
        fresh_tokens=len(gaps),
        gap_sum=float(gaps.sum()) if len(gaps) else 0.0,
        gap_max=float(gaps.max()) if len(gaps) else 0.0,
    )


def update_metrics(bins: int, norm: float, stats: BinStats) -> dict[str, Any]:
    """What a step's metrics say of its gradient; sums become means over the trained tokens."""
    tokens = max(1, stats.tokens)
    return {
        "bins": bins,
        "grad_norm": norm,
        "loss": stats.loss_sum / tokens,
        "entropy": stats.entropy_sum / tokens,
        "clipped": stats.clipped / tokens,
        "kl": stats.kl_sum / tokens,
        "logprob_gap": stats.gap_max if stats.fresh_tokens else None,
        "logprob_gap_mean": stats.gap_sum / max(1, stats.fresh_tokens),
        "fresh_tokens": stats.fresh_tokens,
        "model_tokens": stats.tokens,
    }
