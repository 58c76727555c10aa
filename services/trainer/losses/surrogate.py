"""Clipped surrogate objective that most algorithms share (PPO, arXiv 1707.06347)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from meshrl.common.job.config import AlgorithmConfig
from meshrl.services.trainer.losses.terms import LossTerms, compute_ratio


@dataclass(frozen=True)
class ClipBounds:
    """Bounds of a ratio's distance from 1, below and above.

    `dual` bounds the ratio where A < 0; 0: no bound.
    """

    low: float
    high: float
    dual: float = 0.0

    def with_overrides(self, config: AlgorithmConfig) -> ClipBounds:
        """Return the bounds with the job file's overrides."""
        return ClipBounds(
            config.clip_low if config.clip_low >= 0 else self.low,
            config.clip_high if config.clip_high >= 0 else self.high,
            config.dual_clip if config.dual_clip >= 0 else self.dual,
        )


PPO_CLIPS = ClipBounds(0.2, 0.2)


def select_old_logprobs(terms: LossTerms, config: AlgorithmConfig) -> Tensor:
    """Return the log-probabilities [t] of the policy that ratios are relative to.

    That is the behaviour policy, unless a correction accounts for it. Then the trust region is
    around the policy that the step began with.
    """
    return terms.behaviour_logprobs if config.correction == "none" else terms.proximal_logprobs


def compute_ratios(terms: LossTerms, config: AlgorithmConfig) -> Tensor:
    """Return the ratios [t] of each token's probability to that of `select_old_logprobs`."""
    return compute_ratio(terms.logprobs, select_old_logprobs(terms, config))


def compute_clipped_loss(ratio: Tensor, advantage: Tensor, clips: ClipBounds) -> Tensor:
    """Return max(-ratio A, -clip(ratio) A).

    For A < 0 the loss is at most -dual A (dual clip, arXiv 1912.09729).
    """
    inside = ratio.clamp(1 - clips.low, 1 + clips.high)
    loss = -torch.minimum(ratio * advantage, inside * advantage)
    if not clips.dual:
        return loss
    bound = torch.where(advantage < 0, -clips.dual * advantage, torch.inf)
    return torch.minimum(loss, bound)


def make_surrogate_loss(clips: ClipBounds) -> Callable[[LossTerms, AlgorithmConfig], Tensor]:
    """Return the clipped surrogate loss of each trained token [t], with these or the job's
    bounds.
    """

    def token_loss(terms: LossTerms, config: AlgorithmConfig) -> Tensor:
        return compute_clipped_loss(
            compute_ratios(terms, config), terms.advantages, clips.with_overrides(config)
        )

    return token_loss
