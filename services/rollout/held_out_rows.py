"""Encoded rows of a supervised job's held-out set."""

from __future__ import annotations

import numpy as np

from meshrl.common.api.rollout import HeldOutRequest, HeldOutRows
from meshrl.common.mesh.runtime.task_groups import run_all
from meshrl.services.rollout.runner import FIRST_EVALUATION_GROUP, fill_supervised
from meshrl.services.rollout.shard_job import ShardJob
from meshrl.services.rollout.trajectories.trajectory import NOT_SAMPLED, Trajectory


async def encode_held_out(shard: ShardJob, request: HeldOutRequest) -> HeldOutRows:
    """Encode the requested rows; those without an answer, or too long, are left out."""
    rows = shard.held_out[: shard.config.evaluation.problems]
    end = min(request.start + request.count, len(rows))
    pool, most = shard.runner.environment_pool, shard.config.rollout.max_tokens
    found = [Trajectory(FIRST_EVALUATION_GROUP + i, 0, i, 0, 0) for i in range(request.start, end)]
    await run_all(fill_supervised(t, rows[t.prompt], pool, most) for t in found)
    encoded = [t for t in found if t.outcome is not None and not t.outcome.error]
    nothing = Trajectory(FIRST_EVALUATION_GROUP, 0, 0, 0, 0)  # gives empty arrays their types
    versions = np.concatenate([t.versions for t in (nothing, *encoded)])
    return HeldOutRows(
        end if end < len(rows) else -1,
        np.array([t.length for t in encoded], np.int32),
        np.concatenate([t.tokens for t in (nothing, *encoded)]),
        versions != NOT_SAMPLED,
    )
