"""Hands in a finished group: its members become one message, its bytes are stored, its row is made
ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from meshrl.common.api.transfer.bulk import GROUPS
from meshrl.common.api.weights import Group
from meshrl.common.base.encoding.blob import pack
from meshrl.common.base.experts import laid_out
from meshrl.common.base.lineages import NATIVE
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.state import groups as rows
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.store.weight_store import put
from meshrl.services.rollout.rewards.scoring import beside
from meshrl.services.rollout.trajectories.trajectory import Ending, Trajectory


def finished_group(
    group: int,
    prompt: int,
    members: Sequence[Trajectory],
    roles: Sequence[str],
    expert_shape: Callable[[], Sequence[int]],
) -> Group:
    """What the trainer gets: `roles` are of the frozen models that have read the members, and
    `expert_shape` is asked for when engines have noted experts.
    """
    endings = [t.ending or Ending("failed") for t in members]
    rewards = [np.nan if e.reward is None else e.reward for e in endings]
    experts = laid_out((t.experts, t.length) for t in members)
    return Group(
        group=group,
        prompt=prompt,
        lengths=np.array([t.length for t in members], np.int32),
        tokens=np.concatenate([t.tokens for t in members]),
        logprobs=np.concatenate([t.logprobs for t in members]),
        versions=np.concatenate([t.versions for t in members]),
        rewards=np.array(rewards, np.float64),
        truncated=np.array([e.reason == "length" for e in endings], np.bool_),
        **{role: beside(members, role) for role in roles},
        experts=experts,
        expert_shape=list(expert_shape()) if experts.size else [0, 0],
        foreign_above=NATIVE,
    )


async def hand_in(mesh: Mesh, bulk: BulkClient, job: str, message: Group) -> None:
    """The bytes into the store, then the row to `ready`."""
    content = pack(message)
    digest = await put(mesh, bulk, content, "storing a finished group", space=GROUPS)
    sampled = message.sampled_versions
    if not len(sampled):  # nothing to train, which the trainer filters
        sampled = message.versions[message.versions >= 0]
    await patiently(
        mesh.clock,
        lambda: rows.group_ready(
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
