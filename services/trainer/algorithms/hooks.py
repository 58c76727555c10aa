"""The definition of an algorithm: two hooks, and how its losses add up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from meshrl.common.job.config import AlgorithmConfig
from meshrl.services.trainer.losses.terms import LossTerms

if TYPE_CHECKING:
    from meshrl.services.trainer.bins.packing import TrainingSequence

# Rewards of a group's scored members, in float64, to one advantage for each; None: the group has
# nothing to teach, and is filtered.
Advantages = Callable[[NDArray[np.float64], AlgorithmConfig], "NDArray[np.float64] | None"]
# Loss of each trained token [t], before its sequence's weight and without corrections or KL.
TokenLoss = Callable[[LossTerms, AlgorithmConfig], Tensor]
# Sets the advantages of all sequences of a step, once their scoring passes are done.
PrepareAdvantages = Callable[["list[TrainingSequence]", AlgorithmConfig], None]


@dataclass(frozen=True)
class Algorithm:
    """An algorithm by its hooks. Keys of the job file that are left out take its own values."""

    compute_advantages: Advantages
    token_loss: TokenLoss
    aggregation: str = "tokens"  # tokens | sequences | constant, see aggregation.py
    prepare_advantages: PrepareAdvantages | None = (
        None  # advantages of tokens, from all sequences of the step at once
    )
    has_critic: bool = False  # a value model is trained beside the policy
    sequence_ratio: bool = False  # ratios are those of sequences, not of tokens
    always_refills: bool = False  # filtered groups are always replaced by others
    has_behaviour_policy: bool = (
        True  # tokens are a policy's, with its log-probabilities to compare with
    )
    overlong_share: float = 0.0  # last share of the longest trajectory, in which length is punished


def compute_unit_advantages(
    rewards: NDArray[np.float64], config: AlgorithmConfig
) -> NDArray[np.float64] | None:
    """Advantage 1 for each member, for losses that do not ask what a trajectory is worth."""
    return np.ones_like(rewards)
