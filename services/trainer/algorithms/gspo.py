"""GSPO (Zheng et al. 2025, arXiv 2507.18071): one ratio per sequence, the rewarded unit.

Unlike in GRPO, the ratio is the geometric mean of the sequence's token ratios, and the clips are
narrower. All tokens of a sequence share one loss; its mean over them is the paper's.
"""

from __future__ import annotations

from torch import Tensor

from meshrl.common.job.config import AlgorithmConfig
from meshrl.services.trainer.algorithms.hooks import Algorithm
from meshrl.services.trainer.losses.group_advantages import normalize_rewards
from meshrl.services.trainer.losses.surrogate import (
    ClipBounds,
    compute_clipped_loss,
    select_old_logprobs,
)
from meshrl.services.trainer.losses.terms import LossTerms, compute_ratio

CLIPS = ClipBounds(3e-4, 4e-4)


def token_loss(terms: LossTerms, config: AlgorithmConfig) -> Tensor:
    """Return the loss of each trained token [t]: the clipped surrogate of its sequence.

    The sequence's ratio and mean advantage take the place of the token's.
    """
    difference = terms.mean_by_sequence(terms.logprobs - select_old_logprobs(terms, config))
    ratio = compute_ratio(difference, difference.new_zeros(()))
    return compute_clipped_loss(
        ratio, terms.mean_by_sequence(terms.advantages), CLIPS.with_overrides(config)
    )


ALGORITHM = Algorithm(normalize_rewards, token_loss, aggregation="sequences", sequence_ratio=True)
