"""Definition of an algorithm: two hooks, and the aggregation of its losses."""

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

# Maps rewards of a group's scored members, in float64, to one advantage each. None: the group
# has no learning signal and is filtered.
Advantages = Callable[[NDArray[np.float64], AlgorithmConfig], "NDArray[np.float64] | None"]
# Loss of each trained token [t], before its sequence's weight and without corrections or KL.
TokenLoss = Callable[[LossTerms, AlgorithmConfig], Tensor]
# Sets the advantages of all sequences of a step after the scoring passes.
PrepareAdvantages = Callable[["list[TrainingSequence]", AlgorithmConfig], None]


@dataclass(frozen=True)
class Algorithm:
    """Algorithm as a set of hooks and defaults for keys that the job file leaves out."""

    compute_advantages: Advantages
    token_loss: TokenLoss
    aggregation: str = "tokens"  # tokens | sequences | constant, see aggregation.py
    prepare_advantages: PrepareAdvantages | None = None  # per token, from the whole step
    has_critic: bool = False  # trains a value model beside the policy
    sequence_ratio: bool = False  # ratios are per sequence, not per token
    always_refills: bool = False  # filtered groups are always replaced by others
    has_behaviour_policy: bool = True  # tokens have log-probabilities of the sampling policy
    overlong_share: float = 0.0  # last share of the maximum length, in which length is penalized


def compute_unit_advantages(
    rewards: NDArray[np.float64], config: AlgorithmConfig
) -> NDArray[np.float64] | None:
    """Return advantage 1 for each member, for losses that do not use rewards."""
    return np.ones_like(rewards)
