"""Rewards of a whole group: members that have ended wait for the others, and are scored at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from meshrl.services.rollout.trajectories.failures import TrajectoryFailed

Turns = list[dict[str, Any]]
ComputeRewards = Callable[[list[Turns]], Awaitable[list[Any]]]
RecordRewards = Callable[[dict[int, Any]], Awaitable[None]]


class GroupScorer:
    """Scorer of one group. A reward is a number, or has metrics as in `reward_numbers`.

    Each member either submits its turns or leaves, so that a wait ends with the slowest member.
    """

    def __init__(
        self,
        members: Iterable[int],
        compute: ComputeRewards,
        recorded: Mapping[int, Any] | None = None,
        record: RecordRewards | None = None,
    ) -> None:
        """Create a scorer.

        Args:
            members: Members that have not ended.
            recorded: Rewards of a predecessor, which are not computed again.
            record: Function that stores the rewards before any of them counts.
        """
        self._awaited, self._compute = set(members), compute
        self._recorded, self._record = recorded, record
        self._turns: dict[int, Turns] = {}
        self._rewards: asyncio.Future[dict[int, Any]] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    async def score(self, member: int, turns: Turns) -> Any:
        """Return the reward of a member, once all others have ended. Raise ToolFailed."""
        if self._recorded is None:
            self._turns[member] = turns
            self.leave(member)
            rewards: Mapping[int, Any] = await asyncio.shield(self._rewards)
        else:
            rewards = self._recorded
        if member not in rewards:
            raise TrajectoryFailed(
                "the other members of its group were scored without it, before a restart",
                kind="group was scored without it",
            )
        return rewards[member]

    def leave(self, member: int) -> None:
        """Wait no longer for a member, which has submitted its turns or has failed."""
        self._awaited.discard(member)
        if not self._awaited and self._turns and self._task is None:
            self._task = asyncio.create_task(self._score_all(), name="rewards of a group")

    async def _score_all(self) -> None:
        members = sorted(self._turns)
        try:
            found = await self._compute([self._turns[member] for member in members])
            rewards = dict(zip(members, found, strict=True))
            if self._record is not None:
                await self._record(rewards)
        except Exception as error:
            self._rewards.set_exception(error)
            self._rewards.exception()  # each waiting member raises it
        else:
            self._rewards.set_result(rewards)

    async def close(self) -> None:
        """Cancel the computation, if it still runs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
