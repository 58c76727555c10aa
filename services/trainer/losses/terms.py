"""Inputs of a loss: the trained tokens of a bin, in arrays [t] of one order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshrl.common.base.errors import ConfigError

MAX_LOG_RATIO = 20.0  # larger log-ratios are clamped, so that the exponential stays finite

# Sources of another model's log-probabilities, by their name in a sequence's extras.
EXTRA_SOURCES = {"reference": "models.reference", "teacher": "models.teacher"}


@dataclass(slots=True)
class LossTerms:
    """Log-probabilities of the trained tokens under three policies, with advantages and extras.

    `behaviour_logprobs` are those of the policy that sampled the tokens. `proximal_logprobs` are
    those of the policy that the step began with. `logprobs` are those of the trained policy; only
    these carry a gradient. All tokens of a sequence are present.
    """

    logprobs: Tensor
    behaviour_logprobs: Tensor
    proximal_logprobs: Tensor
    advantages: Tensor
    sequence_ids: Tensor  # int64: the sequence of the bin that each token belongs to, from 0
    sequence_count: int
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    def get_extra(self, name: str) -> Tensor:
        """Return an extra by name; the ConfigError names the model that the job lacks."""
        found = self.extras.get(name)
        if found is None:
            raise ConfigError(
                f"the trajectories have no {name} log-probabilities",
                where="algorithm",
                fix=f"Declare [{EXTRA_SOURCES.get(name, name)}] in the job file",
            )
        return found

    def sum_by_sequence(self, values: Tensor) -> Tensor:
        """Return [t]: at each token the sum over all tokens of its sequence."""
        totals = values.new_zeros(self.sequence_count).index_add(0, self.sequence_ids, values)
        return totals.index_select(0, self.sequence_ids)

    def mean_by_sequence(self, values: Tensor) -> Tensor:
        """Return [t]: at each token the mean over all tokens of its sequence."""
        return self.sum_by_sequence(values) / self.sum_by_sequence(torch.ones_like(values))


def compute_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return exp(logprobs - old_logprobs), kept finite."""
    difference = logprobs - old_logprobs
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
