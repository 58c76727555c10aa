"""Submission of a finished group: its members become one message, its bytes are stored, its row
becomes ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from meshrl.common.api.transfer.bulk_permissions import GROUPS
from meshrl.common.api.weights import TrajectoryGroup
from meshrl.common.base.encoding.blob import pack
from meshrl.common.base.expert_routing import concatenate_experts
from meshrl.common.base.lineages import SINGLE_LINEAGE
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.state import groups as rows
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.store.weight_store_client import put_chunk
from meshrl.services.rollout.rewards.scoring_client import concatenate_scores
from meshrl.services.rollout.trajectories.trajectory import Trajectory, TrajectoryOutcome


def build_group(
    group: int,
    prompt: int,
    members: Sequence[Trajectory],
    roles: Sequence[str],
    expert_shape: Callable[[], Sequence[int]],
) -> TrajectoryGroup:
    """Build the message for the trainer. `roles` are the frozen models that scored the members;
    `expert_shape` is called if engines recorded experts.
    """
    endings = [t.outcome or TrajectoryOutcome("failed") for t in members]
    rewards = [np.nan if e.reward is None else e.reward for e in endings]
    names = sorted({name for e in endings for name in e.metrics})
    metrics = [[e.metrics.get(name, np.nan) for name in names] for e in endings]
    experts = concatenate_experts((t.experts, t.length) for t in members)
    return TrajectoryGroup(
        group=group,
        prompt=prompt,
        lengths=np.array([t.length for t in members], np.int32),
        tokens=np.concatenate([t.tokens for t in members]),
        logprobs=np.concatenate([t.logprobs for t in members]),
        versions=np.concatenate([t.versions for t in members]),
        rewards=np.array(rewards, np.float64),
        truncated=np.array([e.reason == "length" for e in endings], np.bool_),
        **{f"{role}_logprobs": concatenate_scores(members, role) for role in roles},
        expert_ids=experts,
        expert_shape=list(expert_shape()) if experts.size else [0, 0],
        abandoned_above=SINGLE_LINEAGE,
        metric_names=names,
        metrics=np.array(metrics, np.float64).reshape(len(members), len(names)),
    )


async def submit_group(mesh: Mesh, bulk: BulkClient, job: str, message: TrajectoryGroup) -> None:
    """Store the bytes of a group, then mark its row as ready."""
    content = pack(message)
    digest = await put_chunk(mesh, bulk, content, "storing a finished group", space=GROUPS)
    sampled = message.sampled_versions
    if not len(sampled):  # no sampled tokens: the trainer filters the group
        sampled = message.versions[message.versions >= 0]
    await retry(
        mesh.clock,
        lambda: rows.mark_group_ready(
            mesh.state,
            job,
            mesh.name,
            mesh.token,
            rows.FinishedGroup(
                message.group,
                digest,
                len(content),
                int(sampled.min()),
                int(np.isfinite(message.rewards).sum()),
            ),
            f"ready-{message.group}",
        ),
    )
