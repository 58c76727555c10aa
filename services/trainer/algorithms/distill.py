"""On-policy distillation: trains on the student's own samples towards a teacher.

The loss is the reverse KL divergence to the teacher (Gu et al. 2023, arXiv 2306.08543; on samples
of the student, Agarwal et al. 2023, arXiv 2306.13649), by its policy gradient. A token's advantage
is the teacher's log-probability less the student's, without later tokens. Rewards are not used.
Ratios to the behaviour policy are clipped as in GRPO.
"""

from __future__ import annotations

from torch import Tensor

from meshrl.common.job.config import AlgorithmConfig
from meshrl.services.trainer.algorithms.grpo import CLIPS
from meshrl.services.trainer.algorithms.hooks import Algorithm, compute_unit_advantages
from meshrl.services.trainer.losses.surrogate import compute_clipped_loss, compute_ratios
from meshrl.services.trainer.losses.terms import LossTerms


def token_loss(terms: LossTerms, config: AlgorithmConfig) -> Tensor:
    """Return the loss of each trained token [t]: the clipped surrogate.

    The advantage is the teacher's log-probability less the student's. Raise ConfigError without a
    teacher.
    """
    advantage = terms.get_extra("teacher") - terms.logprobs.detach()
    return compute_clipped_loss(
        compute_ratios(terms, config), advantage, CLIPS.with_overrides(config)
    )


ALGORITHM = Algorithm(compute_unit_advantages, token_loss)
