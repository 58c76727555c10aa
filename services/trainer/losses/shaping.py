"""Reward shaping: penalties of a trajectory's or token's reward before advantages."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.config import AlgorithmConfig, JobConfig
from meshrl.services.trainer.bins.packing import TrainingSequence
from meshrl.services.trainer.losses import kl
from meshrl.services.trainer.losses.terms import EXTRA_SOURCES


def compute_overlong_penalty(
    lengths: NDArray[np.integer], share: float, config: JobConfig
) -> NDArray[np.float64]:
    """Return DAPO's soft length penalty (arXiv 2503.14476, equation 13), from 0 to -penalty.

    It grows in the last `overlong_buffer` tokens before `rollout.max_tokens`, or in their `share`
    if the job leaves that open; lengths are those of full trajectories.
    """
    longest, buffer = config.rollout.max_tokens, config.algorithm.overlong_buffer
    if buffer < 0:
        buffer = round(longest * share)
    if not buffer:
        return np.zeros(len(lengths))
    over = (np.asarray(lengths, np.float64) - (longest - buffer)) / buffer
    punished: NDArray[np.float64] = -config.algorithm.overlong_penalty * np.clip(over, 0.0, 1.0)
    return punished


def compute_divergences(sequence: TrainingSequence, config: AlgorithmConfig) -> NDArray[np.float64]:
    """Return the behaviour policy's divergence [n] from the reference at sampled tokens, else 0.

    Raise ConfigError if the trajectory has no reference log-probabilities.
    """
    reference = sequence.extras.get("reference")
    if reference is None:
        raise ConfigError(
            "the trajectories have no reference log-probabilities",
            where="algorithm.kl_coefficient",
            fix=f"Declare [{EXTRA_SOURCES['reference']}] in the job file",
        )
    found = kl.estimate_kl_numpy(config.kl, sequence.logprobs, reference)
    found[~sequence.loss_mask] = 0.0
    return found


def is_kl_in_reward(config: AlgorithmConfig) -> bool:
    """Return True if the KL penalty is part of the reward."""
    return config.kl_coefficient != 0 and config.kl_in == "reward"


def is_kl_in_loss(config: AlgorithmConfig) -> bool:
    """Return True if the KL penalty is part of the loss."""
    return config.kl_coefficient != 0 and config.kl_in == "loss"
