"""The inputs of a loss: the trained tokens of a bin, in arrays [t] of one order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshrl.common.base.errors import ConfigError

LARGEST_LOG_RATIO = 20.0  # beyond it a ratio counts as this one: its exponential stays finite

# Where the log-probabilities of another model come from, by their name in a sequence's extras.
SOURCES = {
    "reference": "models.reference",
    "teacher": "models.teacher",
}


@dataclass(slots=True)
class LossTerms:
    """Log-probabilities of the trained tokens under three policies, and what else is known.

    `behaviour` sampled the tokens, `proximal` is the policy that the step began with, `logprobs`
    are those of the policy that is trained; only they carry a gradient. Sequences are whole.
    """

    logprobs: Tensor
    behaviour: Tensor
    proximal: Tensor
    advantage: Tensor
    sequence: Tensor  # int64: the sequence of the bin that each token belongs to, from 0
    sequences: int
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    def extra(self, name: str) -> Tensor:
        """An extra by name; ConfigError says which model of the job would give it."""
        found = self.extras.get(name)
        if found is None:
            raise ConfigError(
                f"the trajectories carry no {name} log-probabilities",
                where="algorithm",
                fix=f"declare [{SOURCES.get(name, name)}] in the job file",
            )
        return found

    def sum_by_sequence(self, values: Tensor) -> Tensor:
        """[t]: at each token the sum over all tokens of its sequence."""
        totals = values.new_zeros(self.sequences).index_add(0, self.sequence, values)
        return totals.index_select(0, self.sequence)

    def mean_by_sequence(self, values: Tensor) -> Tensor:
        """[t]: at each token the mean over all tokens of its sequence."""
        return self.sum_by_sequence(values) / self.sum_by_sequence(torch.ones_like(values))


def ratio_of(logprobs: Tensor, old: Tensor) -> Tensor:
    """exp(logprobs - old), finite."""
    difference = logprobs - old
    return difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
