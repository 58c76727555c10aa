"""Rewards of a whole group: the wait for its members, failures and recorded rewards."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from meshrl.common.base.errors import ToolFailed
from meshrl.services.rollout.rewards.group_scorer import GroupScorer, Turns
from meshrl.services.rollout.trajectories.failures import TrajectoryFailed


def turns(text: str) -> Turns:
    return [{"role": "model", "text": text}]


class Reward:
    """Reward that is the share of the group's answers that equal a member's."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[list[str]] = []
        self.error = error

    async def compute(self, group: list[Turns]) -> list[Any]:
        answers = [member[-1]["text"] for member in group]
        self.calls.append(answers)
        if self.error is not None:
            raise self.error
        return [answers.count(answer) / len(answers) for answer in answers]


async def test_members_are_scored_at_once_in_their_order_after_the_last_has_ended() -> None:
    reward, stored = Reward(), list[dict[int, Any]]()

    async def record(rewards: dict[int, Any]) -> None:
        assert not any(task.done() for task in waiting), "a reward counts before it is stored"
        stored.append(rewards)

    scorer = GroupScorer(range(3), reward.compute, record=record)
    waiting = [
        asyncio.create_task(scorer.score(2, turns("b"))),
        asyncio.create_task(scorer.score(0, turns("a"))),
    ]
    await asyncio.sleep(0)
    assert reward.calls == []
    waiting.append(asyncio.create_task(scorer.score(1, turns("b"))))
    assert await asyncio.gather(*waiting) == [2 / 3, 1 / 3, 2 / 3]
    assert reward.calls == [["a", "b", "b"]] and stored == [{0: 1 / 3, 1: 2 / 3, 2: 2 / 3}]
    await scorer.close()


async def test_failed_members_are_left_out_of_the_group() -> None:
    reward = Reward()
    scorer = GroupScorer(range(3), reward.compute)
    waiting = [asyncio.create_task(scorer.score(i, turns("a"))) for i in (0, 2)]
    await asyncio.sleep(0)
    scorer.leave(1)
    assert await asyncio.gather(*waiting) == [1.0, 1.0]
    scorer.leave(0)
    assert reward.calls == [["a", "a"]]
    none = GroupScorer(range(2), reward.compute)
    none.leave(0)
    none.leave(1)
    await none.close()
    assert len(reward.calls) == 1, "a group without turns has no reward"


async def test_failure_of_the_function_reaches_every_member() -> None:
    scorer = GroupScorer(range(2), Reward(ToolFailed("the reward raised")).compute)
    waiting = [scorer.score(i, turns("a")) for i in range(2)]
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(error) for error in found] == ["the reward raised"] * 2


async def test_recorded_rewards_are_not_computed_again() -> None:
    reward = Reward()
    scorer = GroupScorer([0, 2], reward.compute, recorded={0: 0.25, 1: 0.5})
    assert await scorer.score(0, turns("a")) == 0.25
    with pytest.raises(TrajectoryFailed, match="were scored without it"):
        await scorer.score(2, turns("a"))
    scorer.leave(2)
    assert reward.calls == []
