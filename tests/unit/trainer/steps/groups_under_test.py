"""Finished groups as in the weight store, and jobs that train on them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshrl.common.api.weights import TrajectoryGroup
from meshrl.common.job.config import AlgorithmConfig, JobConfig, RolloutConfig
from meshrl.common.job.constraints import AlgorithmName

LONGEST = 40


def job(name: AlgorithmName = "grpo", **keys: Any) -> JobConfig:
    return JobConfig(
        rollout=RolloutConfig(max_tokens=LONGEST), algorithm=AlgorithmConfig(name=name, **keys)
    )


def group(
    rewards: Sequence[float],
    lengths: Sequence[int] | None = None,
    number: int = 7,
    version: int = 3,
    reference: bool = False,
    seed: int = 0,
) -> TrajectoryGroup:
    """Return a group whose members have a prompt of two tokens and sampled tokens."""
    draw = np.random.default_rng(seed)
    sizes = np.array(lengths or [6 + i for i in range(len(rewards))], np.int32)
    own = np.concatenate([np.arange(n) >= 2 for n in sizes])
    total = len(own)
    made = TrajectoryGroup(
        group=number,
        prompt=0,
        lengths=sizes,
        tokens=draw.integers(0, 32, total).astype(np.int32),
        logprobs=np.where(own, draw.uniform(-2, 0, total), 0).astype(np.float32),
        versions=np.where(own, version, -1).astype(np.int32),
        rewards=np.array(rewards, np.float32),
    )
    scores = draw.uniform(-2, 0, total).astype(np.float32)
    return replace(made, reference_logprobs=scores) if reference else made
