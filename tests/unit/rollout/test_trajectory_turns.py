"""Turns of a trajectory whose environment is lost before each operation and rebuilt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshrl.common.api.engine import FinishReason
from meshrl.common.base.errors import ToolFailed
from meshrl.common.job.config import JobConfig, RolloutConfig
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.common.records.ledger import LedgerRecord, RecordKind, extract_groups
from meshrl.common.records.token_records import TokenRows
from meshrl.services.environment.environments import Environments
from meshrl.services.rollout.runner import JobTurnPlayer, TrajectoryRunner
from meshrl.services.rollout.trajectories.trajectory import (
    RestoredGroups,
    Trajectory,
    TrajectoryOutcome,
)
from meshrl.services.rollout.trajectories.turn_player import MAX_TOOL_CALLS

ROOT = Path(__file__).parents[3]
TOKENIZER = Tokenizer.load(str(ROOT / "examples/calculator/tokenizer.json"))
KEY = 0


class ToolEnvironment:
    """Environment that calls the tool with each turn and appends its value; `calls` lists its
    calls.
    """

    calls: list[str]
    endless = False

    def open(self, row: dict[str, Any]) -> str:
        ToolEnvironment.calls = []
        return "1+1="

    def step(self, text: str) -> dict[str, Any]:
        self.calls.append(f"step {text}")
        return {"tool": "echo", "input": text}

    def result(self, value: Any) -> dict[str, Any]:
        self.calls.append(f"result {value}")
        return {"tool": "echo", "input": "1"} if self.endless else {"append": f"{value}+"}

    def cut(self, text: str) -> float:
        self.calls.append(f"cut {text}")
        return 0.5

    def close(self) -> None:
        pass


class LossyPool:
    """Pool whose process is lost before every operation that can be replayed."""

    def __init__(self, *, lossy: bool = True) -> None:
        self._lossy = lossy
        self._served = Environments(ToolEnvironment, TOKENIZER, "")

    def _perform(self, operation: str, argument: Any, replay: Callable[[], Any]) -> Any:
        if self._lossy:
            self._served = Environments(ToolEnvironment, TOKENIZER, "")
            assert self._served.run_operation(KEY, "restore", replay()) == ("ok", None)
        status, answer = self._served.run_operation(KEY, operation, argument)
        assert status == "ok", answer
        return answer

    async def begin(self, row: dict[str, Any]) -> list[int]:
        status, ids = self._served.run_operation(KEY, "begin", row)
        assert status == "ok"
        return list(ids)

    async def step(self, _: int, ids: list[int], replay: Any) -> Any:
        return self._perform("step", ids, replay)

    async def send_tool_result(self, _: int, value: Any, replay: Any) -> Any:
        return self._perform("result", value, replay)

    async def end_early(self, _: int, ids: list[int], replay: Any) -> Any:
        return self._perform("cut", ids, replay)


class RepeatingAssignment:
    """Trajectory at an engine that samples the same text in each turn while there is room."""

    def __init__(self, t: Trajectory, text: str, ends: FinishReason = FinishReason.STOP) -> None:
        self.trajectory, self._said, self._ends = t, TOKENIZER.encode(text), ends
        self.limits: list[int] = []

    async def generate(self, limit: int) -> FinishReason:
        self.limits.append(limit)
        room = limit - self.trajectory.length
        if room <= 0:
            return FinishReason.LENGTH
        self.trajectory.append_sampled(*arrays(self._said[:room]))
        return self._ends


async def run_turns(runner: TrajectoryRunner, t: Trajectory, text: str) -> tuple[str, float | None]:
    """Run the trajectory, which samples that text in each turn."""
    return await JobTurnPlayer(runner, RepeatingAssignment(t, text), {}).play()  # type: ignore[arg-type]


def create_runner(pool: LossyPool, **rollout: Any) -> TrajectoryRunner:

    async def tool(name: str, argument: str, session: str, earlier: Any) -> str:
        return argument

    job = TrajectoryRunner.__new__(TrajectoryRunner)
    job.config = JobConfig(rollout=RolloutConfig(**rollout))
    job.environment_pool = pool  # type: ignore[assignment]
    job.router = SimpleNamespace(on_tool_return=lambda assignment: None)  # type: ignore[assignment]
    job.sandbox_client = SimpleNamespace(call_tool=tool)  # type: ignore[assignment]
    return job


def arrays(ids: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n = len(ids)
    return np.array(ids, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32)


def restore_trajectory(
    opening: list[int], turn: tuple[list[int], str], *more: tuple[RecordKind, Any]
) -> Trajectory:
    """Restore a trajectory from its ledger records, as a restarted shard does."""
    text = turn[1]
    tokens, logprobs, versions = arrays(turn[0])
    ids, counts = np.array([KEY], np.int64), np.array([len(tokens)], np.int32)
    records = [
        (RecordKind.OPEN, [0, 0, 0, 0, opening]),
        (RecordKind.TOKENS, TokenRows(ids, counts, tokens, logprobs, versions)),
        (RecordKind.TURN, [KEY, text]),
        *more,
    ]
    groups = RestoredGroups()
    for kind, payload in records:
        groups.apply_record(LedgerRecord(kind, payload), lambda group, member: 0)
    t = groups.trajectories[KEY]
    t.is_recorded = False
    return t


async def test_environment_rebuilt_for_its_cut_has_the_last_tool_value() -> None:
    pool = LossyPool()
    t = Trajectory(0, 0, 0, 0, 0)
    t.is_recorded = False
    t.set_prompt(await pool.begin({}))
    job = create_runner(pool, max_turns=3)
    assert await run_turns(job, t, "2") == ("turns", 0.5)
    assert ToolEnvironment.calls == ["step 2", "result 2"] * 3 + ["cut "]


@pytest.mark.parametrize("answered", [True, False])
async def test_turn_that_ends_at_the_length_limit_is_passed_once(answered: bool) -> None:
    pool = LossyPool()
    opening = await pool.begin({})
    call = [(RecordKind.TOOL, [KEY, "echo", "2", "7"])] if answered else []
    t = restore_trajectory(opening, (TOKENIZER.encode("2"), "2"), *call)
    value = "7" if answered else "2"
    job = create_runner(pool, max_tokens=t.length)
    assert await run_turns(job, t, "3") == ("length", 0.5)
    assert ToolEnvironment.calls == ["step 2", f"result {value}", "cut "]
    (turn,) = t.all_turns
    assert (turn.text, turn.list_calls()) == ("2", [("echo", "2", value)])


async def test_environment_with_endless_calls_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToolEnvironment, "endless", True)
    pool = LossyPool(lossy=False)
    t = Trajectory(0, 0, 0, 0, 0)
    t.is_recorded = False
    t.set_prompt(await pool.begin({}))
    with pytest.raises(ToolFailed, match=f"more than {MAX_TOOL_CALLS} tool calls"):
        await run_turns(create_runner(pool), t, "2")


@pytest.mark.parametrize("member, length", [(0, 3), (1, 1), (2, 3)])
async def test_trajectory_is_cut_at_its_forced_length(member: int, length: int) -> None:
    pool = LossyPool(lossy=False)
    t = Trajectory(0, member, 0, 0, 0)
    t.is_recorded = False
    t.set_prompt(await pool.begin({}))
    job = create_runner(pool, forced_lengths=[3, 1])
    assignment = RepeatingAssignment(t, "234567", FinishReason.LENGTH)
    assert await JobTurnPlayer(job, assignment, {}).play() == ("length", 0.5)  # type: ignore[arg-type]
    assert assignment.limits == [t.prompt_length + length]
    assert t.length == t.prompt_length + length
    assert ToolEnvironment.calls == [f"cut {'234567'[:length]}"]


class EndingPool(LossyPool):
    """Pool whose environment ends with a last observation."""

    async def step(self, _: int, ids: list[int], replay: Any) -> Any:
        return TOKENIZER.decode(ids), "last", [TOKENIZER.encode("=4"), 0.5]


async def test_last_observation_is_recorded_with_the_end() -> None:
    pool = EndingPool()
    opening = await pool.begin({})
    t = Trajectory(0, 0, 0, 0, 0)
    t.is_recorded = False
    t.set_prompt(opening)
    assert await run_turns(create_runner(pool), t, "2") == ("done", 0.5)
    assert TOKENIZER.decode(t.tokens.tolist()) == "1+1=2=4"
    text = (TOKENIZER.encode("2"), "2")
    again = restore_trajectory(
        opening,
        text,
        (RecordKind.APPEND, [KEY, t.last_observation]),
        (RecordKind.END, [KEY, "done", 0.5, ""]),
    )
    assert again.tokens.tolist() == t.tokens.tolist()
    assert again.outcome is not None and again.outcome.reward == 0.5
    assert again.outcome.metrics == {}
    metrics = {"reward/format": 1.0}
    measured = restore_trajectory(opening, text, (RecordKind.END, [KEY, "done", 1.0, "", metrics]))
    assert measured.outcome == TrajectoryOutcome("done", 1.0, metrics=metrics)


def test_rewards_of_a_group_are_restored_with_its_members() -> None:
    restored = RestoredGroups()
    rewards: dict[int, Any] = {0: 0.5, 1: {"reward": 1.0, "metrics": {"a": 2.0}}}
    for member in (0, 1):
        opening = [3, member, 0, 0, [1, 2]]
        restored.apply_record(LedgerRecord(RecordKind.OPEN, opening), lambda *_: 0)
    recorded = LedgerRecord(RecordKind.REWARDS, [3, [list(one) for one in rewards.items()]])
    assert extract_groups(recorded) == {3}
    restored.apply_record(recorded, lambda *_: 0)
    assert [t.group_rewards for t in restored.list_open_groups()[3]] == [rewards] * 2
    lost = RestoredGroups()
    lost.apply_record(LedgerRecord(RecordKind.OPEN, [3, 0, 0, 0, [1, 2]]), lambda *_: 0)
    lost.mark_gap()  # the turns that were scored are lost
    lost.apply_record(recorded, lambda *_: 0)
    assert [t.group_rewards for t in lost.list_open_groups()[3]] == [None]
