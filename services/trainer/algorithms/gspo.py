"""GSPO (Zheng et al. 2025, arXiv 2507.18071): one ratio for a sequence, the unit that is rewarded.

It differs from GRPO in the ratio, which is the geometric mean of its tokens' ratios, and so in how
narrow the clips are. All tokens of a sequence share one loss; its mean over them is the paper's.
"""

from __future__ import annotations

from torch import Tensor

from meshrl.common.job.config import AlgorithmConfig
from meshrl.services.trainer.algorithms.hooks import Algorithm
from meshrl.services.trainer.losses.group_advantages import normalised
from meshrl.services.trainer.losses.surrogate import Clips, clipped, old_logprobs
from meshrl.services.trainer.losses.terms import LossTerms, ratio_of

CLIPS = Clips(3e-4, 4e-4)


def token_loss(terms: LossTerms, config: AlgorithmConfig) -> Tensor:
    """Loss of each trained token [t]: the clipped surrogate of its sequence's ratio and mean
    advantage.
    """
    difference = terms.mean_by_sequence(terms.logprobs - old_logprobs(terms, config))
    ratio = ratio_of(difference, difference.new_zeros(()))
    return clipped(ratio, terms.mean_by_sequence(terms.advantage), CLIPS.chosen(config))


ALGORITHM = Algorithm(normalised, token_loss, aggregation="sequences", sequence_ratio=True)
