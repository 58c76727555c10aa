"""Statistics of a step's gradient: sums over the trained tokens of its bins."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from meshrl.services.trainer.learner.objective import Objective
from meshrl.services.trainer.losses import kl
from meshrl.services.trainer.losses.terms import LossTerms, compute_ratio


@dataclass(slots=True)
class BinStats:
    """Sums over the trained tokens of bins; `*_max` are maxima, `*_min` minima."""

    tokens: int = 0
    loss_sum: float = 0.0  # weighted
    entropy_sum: float = 0.0
    clipped_tokens: int = 0  # tokens with an advantage that get no gradient for it
    clipped_high_tokens: int = 0  # those of them that the policy has made likelier
    corrected_tokens: int = 0  # tokens whose importance weight met a bound
    sampled_tokens: int = 0  # sampled tokens: KL and ratios are sums over these
    kl_sum: float = 0.0  # KL of behaviour from the trained policy, Schulman's k3 estimate
    ratio_max: float = 0.0  # probability under the trained policy / under behaviour
    ratio_min: float = math.inf
    ratio_sum: float = 0.0
    ratio_square_sum: float = 0.0
    fresh_tokens: int = 0  # sampled, with their whole prefix, under the version being trained
    gap_sum: float = 0.0  # |log-probability here - at sampling| over fresh tokens
    gap_max: float = 0.0
    gap_kl_sum: float = 0.0  # KL of the engine's policy from the trainer's, k3, fresh tokens
    reference_tokens: int = 0  # tokens scored by a reference
    reference_kl_sum: float = 0.0  # KL of the trained policy from the reference, k3
    teacher_tokens: int = 0
    teacher_kl_sum: float = 0.0  # from the teacher, k1: the quantity that distillation minimizes
    value_tokens: int = 0  # tokens valued by a critic
    value_loss_sum: float = 0.0
    value_error_sum: float = 0.0  # return - value
    value_error_square_sum: float = 0.0
    return_sum: float = 0.0
    return_square_sum: float = 0.0

    def __add__(self, other: BinStats) -> BinStats:
        added = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        for name in added:
            if name.endswith("_max"):
                added[name] = max(getattr(self, name), getattr(other, name))
            elif name.endswith("_min"):
                added[name] = min(getattr(self, name), getattr(other, name))
        return BinStats(**added)


@torch.no_grad()
def measure_bin(
    terms: LossTerms, objective: Objective, entropy: Tensor, fresh_mask: Tensor | None
) -> BinStats:
    """Return the statistics of a bin's trained tokens, [t] each.

    `fresh_mask` is bool; None: no policy sampled the tokens.
    """
    if not len(objective.losses):
        return BinStats()
    now = terms.logprobs.detach()
    sums = {
        "loss_sum": objective.losses.sum(),
        "entropy_sum": entropy.sum(),
        "clipped_tokens": objective.clipped_mask.sum(),
        "clipped_high_tokens": (objective.clipped_mask & objective.increased_mask).sum(),
        "corrected_tokens": objective.corrected_mask.sum(),
    }
    if fresh_mask is not None:
        sums |= _compare_with_sampling(now, terms.behaviour_logprobs, fresh_mask)
    stats = BinStats(tokens=len(now), **_to_numbers(sums))
    if "reference" in terms.extras:
        stats.reference_tokens = len(now)
        stats.reference_kl_sum = float(kl.estimate_kl("k3", now, terms.extras["reference"]).sum())
    if "teacher" in terms.extras:
        stats.teacher_tokens = len(now)
        stats.teacher_kl_sum = float((now - terms.extras["teacher"]).sum())
    return stats


def _compare_with_sampling(
    logprobs: Tensor, behaviour_logprobs: Tensor, fresh_mask: Tensor
) -> dict[str, Tensor]:
    """Return how log-probabilities [t] differ from those at sampling."""
    ratio, log_ratio = compute_ratio(logprobs, behaviour_logprobs), logprobs - behaviour_logprobs
    divergence, gaps = ratio - 1 - log_ratio, log_ratio.abs()[fresh_mask]
    return {
        "sampled_tokens": torch.ones_like(fresh_mask).sum(),
        "kl_sum": divergence.sum(),
        "ratio_max": ratio.max(),
        "ratio_min": ratio.min(),
        "ratio_sum": ratio.sum(),
        "ratio_square_sum": ratio.square().sum(),
        "fresh_tokens": fresh_mask.sum(),
        "gap_sum": gaps.sum(),
        "gap_max": gaps.max() if len(gaps) else gaps.sum(),
        "gap_kl_sum": divergence[fresh_mask].sum(),
    }


@torch.no_grad()
def measure_values(stats: BinStats, terms: LossTerms, losses: Tensor) -> None:
    """Add a critic's values [t] of the step's start to the statistics."""
    if "returns" not in terms.extras:
        return
    returns = terms.extras["returns"]
    error = returns - terms.extras["values"]
    stats.value_tokens = len(returns)
    sums = {
        "value_loss_sum": losses.sum(),
        "value_error_sum": error.sum(),
        "value_error_square_sum": error.square().sum(),
        "return_sum": returns.sum(),
        "return_square_sum": returns.square().sum(),
    }
    for name, number in _to_numbers(sums).items():
        setattr(stats, name, number)


def _to_numbers(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the values of scalars in one device transfer; counts stay integers."""
    numbers = torch.stack([tensor.double() for tensor in tensors.values()]).tolist()
    integer_flags = [not tensor.is_floating_point() for tensor in tensors.values()]
    named = zip(tensors, numbers, integer_flags, strict=True)
    return {name: int(number) if count else number for name, number, count in named}


def build_update_metrics(
    bins: int, norm: float, stats: BinStats, denominator: float
) -> dict[str, Any]:
    """Return a step's gradient metrics: means over the trained tokens.

    The loss is divided by `denominator`, which makes it the objective. A metric is None if nothing
    of its kind was trained.
    """
    tokens, fresh = max(1, stats.tokens), stats.fresh_tokens
    # Effective sample size as a share of the sampled tokens: (sum w)^2 / (n sum w^2) of the
    # importance weights w (Kong 1992).
    squares = stats.sampled_tokens * stats.ratio_square_sum
    metrics: dict[str, Any] = {
        "bins": bins,
        "grad_norm": norm,
        "loss": stats.loss_sum / denominator if denominator else 0.0,
        "entropy": stats.entropy_sum / tokens,
        "clipped": stats.clipped_tokens / tokens,
        "clipped_high": stats.clipped_high_tokens / tokens,
        "clipped_low": (stats.clipped_tokens - stats.clipped_high_tokens) / tokens,
        "corrected": stats.corrected_tokens / tokens,
        "kl": stats.kl_sum / stats.sampled_tokens if stats.sampled_tokens else None,
        "ratio_max": stats.ratio_max if stats.sampled_tokens else None,
        "ratio_min": stats.ratio_min if stats.sampled_tokens else None,
        "effective_sample_size": stats.ratio_sum**2 / squares if stats.sampled_tokens else None,
        "logprob_gap": stats.gap_max if fresh else None,
        "logprob_gap_mean": stats.gap_sum / fresh if fresh else None,
        "logprob_kl": stats.gap_kl_sum / fresh if fresh else None,
        "fresh_tokens": fresh,
        "model_tokens": stats.tokens,
    }
    return metrics | _build_model_metrics(stats)


def _build_model_metrics(stats: BinStats) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if stats.reference_tokens:
        found["reference_kl"] = stats.reference_kl_sum / stats.reference_tokens
    if stats.teacher_tokens:
        found["teacher_kl"] = stats.teacher_kl_sum / stats.teacher_tokens
    if n := stats.value_tokens:
        found["value_loss"] = stats.value_loss_sum / n
        spread = stats.return_square_sum / n - (stats.return_sum / n) ** 2
        unexplained = stats.value_error_square_sum / n - (stats.value_error_sum / n) ** 2
        found["explained_variance"] = 1 - unexplained / spread if spread > 0 else None
    return found
