"""Aggregation of token losses into the loss of a step, by weights and counts.

The gradient of a bin is that of the weighted sum; a step divides once by the sum of the counts.

- `tokens`: the mean over all tokens of the step (DAPO);
- `sequences`: the mean over sequences of each one's mean (GRPO as published);
- `constant`: the mean over sequences of each one's sum / constant (Dr. GRPO).
"""

from __future__ import annotations

from collections.abc import Iterable

from meshrl.common.job.config import JobConfig
from meshrl.services.trainer.algorithms import get_algorithm
from meshrl.services.trainer.bins.packing import TrainingSequence

AGGREGATIONS = ("tokens", "sequences", "constant")


def get_aggregation(config: JobConfig) -> str:
    return config.algorithm.aggregation or get_algorithm(config.algorithm.name).aggregation


def compute_token_weight(loss_tokens: int, config: JobConfig) -> float:
    """Return the weight of the token losses of a sequence with `loss_tokens` tokens of loss."""
    kind = get_aggregation(config)
    if kind == "tokens":
        return 1.0
    if kind == "sequences":
        return 1.0 / max(loss_tokens, 1)
    return 1.0 / (config.algorithm.loss_constant or config.rollout.max_tokens)


def compute_denominator(sequences: Iterable[TrainingSequence], config: JobConfig) -> float:
    """Return the divisor of the summed gradient of these sequences."""
    by_tokens = get_aggregation(config) == "tokens"
    return float(sum(sequence.loss_token_count if by_tokens else 1 for sequence in sequences))
