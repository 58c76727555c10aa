"""Supervised trajectories for sft: the dataset gives prompt and answer, which are encoded, not
sampled.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from common.base.errors import ToolFailed
from services.rollout.environments.pool import EnvironmentPool
from services.rollout.trajectories.trajectory import Ending, Trajectory

REWARD = 1.0  # every answer is one to learn


async def supervise(
    t: Trajectory,
    row: dict[str, Any],
    response: str,
    environments: EnvironmentPool,
    max_tokens: int,
) -> None:
    """Fills a trajectory from the row and ends it; one that cannot be learned fails by type.

    Nothing of it is in the ledger: the row gives it again.
    """
    t.recorded = False
    try:
        prompt, answer = await environments.answer(t.id, row, row.get(response))
        if not answer:
            raise ToolFailed("the answer has no token")
        if len(prompt) + len(answer) > max_tokens:
            raise ToolFailed(
                f"prompt and answer have {len(prompt) + len(answer)} tokens",
                fix=f"leave out what is longer than rollout.max_tokens = {max_tokens}, or raise it",
            )
    except ToolFailed as error:
        t.ending = Ending("failed", None, f"row {t.prompt}: {error}")
        return
    n = len(answer)
    t.begin(prompt)
    t.buffer.sampled(
        np.array(answer, np.int32), np.zeros(n, np.float32), np.full(n, t.version, np.int32)
    )
    t.ending = Ending("done", REWARD)
