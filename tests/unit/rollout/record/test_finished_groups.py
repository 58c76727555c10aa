"""What a shard hands in of a finished group says how each member ended."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshrl.common.api.weights import Group
from meshrl.common.base.encoding.blob import pack, unpack
from meshrl.services.rollout.record.finished_groups import finished_group
from meshrl.services.rollout.trajectories.trajectory import Ending, Trajectory


def ended(member: int, reason: str, reward: float | None) -> Trajectory:
    t = Trajectory(4, member, 0, 2, seed=member)
    t.begin([1, 2])
    t.sampled(np.array([3], np.int32), np.zeros(1, np.float32), np.array([2], np.int32))
    t.ending = Ending(reason, reward)
    return t


def test_members_that_were_cut_off_at_the_longest_length_are_marked() -> None:
    endings = [("done", 1.0), ("length", 0.0), ("turns", 0.0), ("failed", None)]
    members = [ended(n, *ending) for n, ending in enumerate(endings)]
    sent = unpack(Group, pack(finished_group(4, 0, members, (), lambda: [0, 0])))
    assert sent.truncated.tolist() == [False, True, False, False]
    assert np.isfinite(sent.rewards).tolist() == [True, True, True, False]


def test_rewards_are_handed_in_as_float64() -> None:
    rewards = [1e39, 100000001.0, 100000002.0, 0.1]
    members = [ended(n, "done", reward) for n, reward in enumerate(rewards)]
    sent = unpack(Group, pack(finished_group(4, 0, members, (), lambda: [0, 0])))
    assert sent.rewards.tolist() == rewards


def test_a_group_stored_by_an_earlier_version_is_read_with_its_float32_rewards() -> None:
    members = [ended(n, "done", float(n)) for n in range(2)]
    made = finished_group(4, 0, members, (), lambda: [0, 0])
    old = replace(made, rewards=made.rewards.astype(np.float32))
    assert unpack(Group, pack(old)).rewards.tolist() == [0.0, 1.0]
