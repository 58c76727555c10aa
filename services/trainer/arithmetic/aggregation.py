"""Aggregation: how token losses add up to the loss of a step, by weights and counts.

The gradient of a bin is that of the weighted sum; a step divides once by the sum of the counts.

- `tokens`: the mean over all tokens of the step (DAPO);
- `sequences`: the mean over sequences of each one's mean (GRPO as published);
- `constant`: the mean over sequences of each one's sum / constant (Dr. GRPO).
"""

from __future__ import annotations

from collections.abc import Iterable

from meshrl.common.job.config import JobConfig
from meshrl.services.trainer.algorithms import algorithm
from meshrl.services.trainer.bins.packing import Sequence

NAMES = ("tokens", "sequences", "constant")


def aggregation(config: JobConfig) -> str:
    return config.algorithm.aggregation or algorithm(config.algorithm.name).aggregation


def token_weight(trained: int, config: JobConfig) -> float:
    """Weight of the token losses of a sequence of which `trained` tokens carry loss."""
    kind = aggregation(config)
    if kind == "tokens":
        return 1.0
    if kind == "sequences":
        return 1.0 / max(trained, 1)
    return 1.0 / (config.algorithm.loss_constant or config.rollout.max_tokens)


def denominator(sequences: Iterable[Sequence], config: JobConfig) -> float:
    """What the summed gradient of these sequences is divided by."""
    by_tokens = aggregation(config) == "tokens"
    return float(sum(sequence.trained if by_tokens else 1 for sequence in sequences))
