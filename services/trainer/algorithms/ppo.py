"""PPO (Schulman et al. 2017, arXiv 1707.06347) with a critic, a value model beside the policy.

It differs from the others in its baseline, which is learned: advantages of tokens are generalised
ones from the critic's values, normalised over the step. The value loss is in `critic.py`.
"""

from __future__ import annotations

import numpy as np

from meshrl.common.job.config import AlgorithmConfig
from meshrl.services.trainer.algorithms.hooks import Algorithm
from meshrl.services.trainer.algorithms.reinforce_pp import advantages
from meshrl.services.trainer.bins.packing import Sequence
from meshrl.services.trainer.losses.returns import gae, own_tokens, set_normalised, token_rewards
from meshrl.services.trainer.losses.surrogate import PPO, surrogate


def prepare(sequences: list[Sequence], config: AlgorithmConfig) -> None:
    """Sets generalised advantages from `extras["values"]`, and `extras["returns"]`, the values'
    targets.
    """
    found = []
    for sequence in sequences:
        own = own_tokens(sequence)
        values = sequence.extras["values"][own].astype(np.float64)
        rewards = token_rewards(sequence, float(sequence.advantages), config)
        found.append(gae(rewards, values, config.discount, config.gae_lambda))
        returns = np.zeros(len(sequence.tokens), np.float32)
        returns[own] = found[-1] + values
        sequence.extras["returns"] = returns
    set_normalised(sequences, found)


ALGORITHM = Algorithm(advantages, surrogate(PPO), prepare=prepare, critic=True)
