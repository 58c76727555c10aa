"""Held-out evaluation on the engines of the job: sampled and greedy, at a version or newer."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from common.state import jobs
from services.rollout.job import EVALUATION_GROUP, ShardJob
from services.rollout.trajectory import Trajectory

MODES = {"sampled": 1.0, "greedy": 0.0}  # temperature of each


async def evaluate(shard: ShardJob, tag: str, version: int, modes: list[str]) -> dict[str, Any]:
    """Runs the held-out set on engines at `version` or newer and records the result under `tag`.

    Returns, per mode, the mean reward over the problems; a trajectory that fails by type counts in
    `failed` and in no mean.
    """
    problems = shard.held_out[: shard.config.evaluation.problems]
    result: dict[str, Any] = {"version": version, "problems": len(problems)}
    lengths: list[int] = []
    for number, mode in enumerate(modes):
        base = EVALUATION_GROUP + (((version + 1) * 2 + number) << 20)
        ts = [trajectory(shard, base + i, i, version, MODES[mode]) for i in range(len(problems))]
        await asyncio.gather(*(shard.run(t, row) for t, row in zip(ts, problems, strict=True)))
        rewards = [t.ending.reward for t in ts if t.ending and t.ending.reward is not None]
        result[mode] = float(np.mean(rewards)) if rewards else 0.0
        result["failed"] = result.get("failed", 0) + len(ts) - len(rewards)
        lengths += [t.length for t in ts]
    result["length_mean"] = float(np.mean(lengths)) if lengths else 0.0
    await jobs.record_evaluation(
        shard.mesh.state,
        shard.job.id,
        tag,
        version,
        result,
        shard.mesh.name,
        shard.mesh.token,
    )
    return result


def trajectory(
    shard: ShardJob, group: int, prompt: int, version: int, temperature: float
) -> Trajectory:
    t = Trajectory(group, 0, prompt, version, shard.seed_of(group, 0))
    t.recorded = False
    t.temperature = temperature
    return t
