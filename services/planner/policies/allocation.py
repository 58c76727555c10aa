"""The allocation policy: moves a gang to the side of a job whose stage takes longer, if that pays.

An asynchronous job's iteration takes max(T_rollout, T_train) (Libra, arXiv 2606.03077, Cost
Evaluator). Both stages are taken to scale with the gangs they have. A move is made when the stage
times are out of balance by `imbalance` and the predicted iteration is shorter by at least `gain` of
the present one, so that a balanced job is left alone (Libra applies a plan iff its relative gain is
>= 0.05).
"""

from __future__ import annotations

from dataclasses import dataclass

from common.job.config import PlannerConfig
from common.pool.rows import Role


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The seconds that each stage needs for one step's work, with the present gangs."""

    rollout_s: float
    train_s: float


@dataclass(frozen=True, slots=True)
class Split:
    """The number of gangs of a job in each role."""

    rollout: int
    training: int


def growing_role(times: StageTimes, split: Split, config: PlannerConfig) -> Role | None:
    """The role that should get a gang of the other, `training` or `rollout`; None: leave the split.
    Training keeps its core, rollout `min_rollout` gangs.
    """
    if min(times.rollout_s, times.train_s) <= 0:
        return None
    if times.train_s >= config.imbalance * times.rollout_s and split.rollout > config.min_rollout:
        after = iteration_s(times, split, Split(split.rollout - 1, split.training + 1))
        grows = Role.TRAINING
    elif times.rollout_s >= config.imbalance * times.train_s and split.training > 1:
        after = iteration_s(times, split, Split(split.rollout + 1, split.training - 1))
        grows = Role.ROLLOUT
    else:
        return None
    present = max(times.rollout_s, times.train_s)
    return grows if present - after >= config.gain * present else None


def iteration_s(times: StageTimes, now: Split, then: Split) -> float:
    """Predicted seconds of an iteration after a change of split."""
    return max(
        times.rollout_s * now.rollout / then.rollout, times.train_s * now.training / then.training
    )
