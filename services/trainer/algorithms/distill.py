"""On-policy distillation: towards a teacher, on what the student itself samples.

The reverse KL divergence to the teacher (Gu et al. 2023, arXiv 2306.08543; on samples of the
student, Agarwal et al. 2023, arXiv 2306.13649) by its policy gradient: a token's advantage is how
much likelier the teacher finds it than the student does, without a look ahead. Rewards play no
part. Ratios to the policy that sampled are clipped as GRPO's.
"""

from __future__ import annotations

from torch import Tensor

from meshrl.common.job.config import AlgorithmConfig
from meshrl.services.trainer.algorithms.grpo import CLIPS
from meshrl.services.trainer.algorithms.hooks import Algorithm, compute_unit_advantages
from meshrl.services.trainer.losses.surrogate import compute_clipped_loss, compute_ratios
from meshrl.services.trainer.losses.terms import LossTerms


def token_loss(terms: LossTerms, config: AlgorithmConfig) -> Tensor:
    """Loss of each trained token [t]: the clipped surrogate; the advantage is the teacher's
    log-probability less ours. ConfigError without a teacher.
    """
    advantage = terms.get_extra("teacher") - terms.logprobs.detach()
    return compute_clipped_loss(
        compute_ratios(terms, config), advantage, CLIPS.with_overrides(config)
    )


ALGORITHM = Algorithm(compute_unit_advantages, token_loss)
