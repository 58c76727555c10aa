"""A trajectory's turns, with an environment that is lost before each operation and rebuilt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.config import JobConfig, RolloutConfig
from common.errors import ToolFailed
from common.ledger import Kind, Record
from common.model.tokenizer import Tokenizer
from common.tokenrecord import TokenRows
from services.rollout.environment_main import Environments
from services.rollout.job import CALLS, ShardJob
from services.rollout.link import LENGTH, STOP, Turn
from services.rollout.trajectory import Restored, Trajectory

ROOT = Path(__file__).parents[3]
TOKENIZER = Tokenizer.load(str(ROOT / "examples/calculator/tokenizer.json"))
KEY = 0


class Asking:
    """Asks the tool about each turn, and passes on what it said; `seen` is all it was told."""

    seen: list[str]
    endless = False

    def open(self, row: dict[str, Any]) -> str:
        Asking.seen = []
        return "1+1="

    def step(self, text: str) -> dict[str, Any]:
        self.seen.append(f"step {text}")
        return {"tool": "echo", "input": text}

    def result(self, value: Any) -> dict[str, Any]:
        self.seen.append(f"result {value}")
        return {"tool": "echo", "input": "1"} if self.endless else {"append": f"{value}+"}

    def cut(self, text: str) -> float:
        self.seen.append(f"cut {text}")
        return 0.5

    def close(self) -> None:
        pass


class Rebuilt:
    """A pool whose process is lost before every operation that can be replayed."""

    def __init__(self, *, lossy: bool = True) -> None:
        self._lossy = lossy
        self._served = Environments(Asking, TOKENIZER, "")

    def _perform(self, operation: str, argument: Any, replay: Callable[[], Any]) -> Any:
        if self._lossy:
            self._served = Environments(Asking, TOKENIZER, "")
            assert self._served.perform(KEY, "restore", replay()) == ("ok", None)
        status, answer = self._served.perform(KEY, operation, argument)
        assert status == "ok", answer
        return answer

    async def begin(self, row: dict[str, Any]) -> list[int]:
        status, ids = self._served.perform(KEY, "begin", row)
        assert status == "ok"
        return list(ids)

    async def step(self, _: int, ids: list[int], replay: Any) -> Any:
        return self._perform("step", ids, replay)

    async def result(self, _: int, value: Any, replay: Any) -> Any:
        return self._perform("result", value, replay)

    async def cut(self, _: int, ids: list[int], replay: Any) -> Any:
        return self._perform("cut", ids, replay)


def shard_job(pool: Rebuilt, said: str, **rollout: Any) -> ShardJob:
    """One that samples what is `said` in each turn, as far as there is room."""

    async def generate(turn: Callable[[], Turn]) -> int:
        request = turn()
        if request.max_new <= 0:
            return LENGTH
        request.trajectory.sampled(*arrays(TOKENIZER.encode(said)[: request.max_new]))
        return STOP

    async def tool(name: str, argument: str, session: str, earlier: Any) -> str:
        return argument

    job = ShardJob.__new__(ShardJob)
    job.config = JobConfig(rollout=RolloutConfig(**rollout))
    job.environments = pool  # type: ignore[assignment]
    job.router = SimpleNamespace(generate=generate, returned=lambda t: None)  # type: ignore
    job.outside = SimpleNamespace(tool=tool)  # type: ignore[assignment]
    return job


def arrays(ids: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n = len(ids)
    return np.array(ids, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32)


def restored(opening: list[int], said: str, *more: tuple[Kind, Any]) -> Trajectory:
    """A trajectory as a shard that starts again finds it in its ledger."""
    tokens, logprobs, versions = arrays(TOKENIZER.encode(said))
    ids, counts = np.array([KEY], np.int64), np.array([len(tokens)], np.int32)
    records = [
        (Kind.OPEN, [0, 0, 0, 0, opening]),
        (Kind.TOKENS, TokenRows(ids, counts, tokens, logprobs, versions)),
        (Kind.TURN, [KEY, said]),
        *more,
    ]
    found = Restored()
    for kind, payload in records:
        found.apply(Record(kind, payload), lambda group, member: 0)
    t = found.trajectories[KEY]
    t.recorded = False
    return t


async def test_an_environment_that_is_rebuilt_for_its_cut_knows_the_last_tools_value() -> None:
    pool = Rebuilt()
    t = Trajectory(0, 0, 0, 0, 0)
    t.recorded = False
    t.begin(await pool.begin({}))
    job = shard_job(pool, "2", max_turns=3)
    assert await job._turns(t, {}) == ("turns", 0.5)
    assert Asking.seen == ["step 2", "result 2"] * 3 + ["cut "]


@pytest.mark.parametrize("answered", [True, False])
async def test_a_turn_that_ended_where_there_is_no_more_room_is_not_told_twice(
    answered: bool,
) -> None:
    pool = Rebuilt()
    opening = await pool.begin({})
    call = [(Kind.TOOL, [KEY, "echo", "2", "7"])] if answered else []
    t = restored(opening, "2", *call)
    value = "7" if answered else "2"
    job = shard_job(pool, "3", max_tokens=t.length)
    assert await job._turns(t, {}) == ("length", 0.5)
    assert Asking.seen == ["step 2", f"result {value}", "cut "]
    assert t.turns() == [
        {"role": "model", "text": "2"},
        {"role": "tool", "name": "echo", "input": "2", "value": value},
    ]


async def test_an_environment_that_never_stops_calling_tools_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Asking, "endless", True)
    pool = Rebuilt(lossy=False)
    t = Trajectory(0, 0, 0, 0, 0)
    t.recorded = False
    t.begin(await pool.begin({}))
    with pytest.raises(ToolFailed, match=f"over {CALLS} tool calls"):
        await shard_job(pool, "2")._turns(t, {})


@pytest.mark.parametrize("member, length", [(0, 3), (1, 1), (2, 3)])
async def test_a_trajectory_is_cut_at_the_length_that_its_job_forces(
    member: int, length: int
) -> None:
    pool = Rebuilt(lossy=False)
    t = Trajectory(0, member, 0, 0, 0)
    t.recorded = False
    t.begin(await pool.begin({}))
    job = shard_job(pool, "", lengths=[3, 1])
    asked = []

    async def generate(turn: Callable[[], Turn]) -> int:
        request = turn()
        asked.append(request.max_new)
        request.trajectory.sampled(*arrays(TOKENIZER.encode("234567")[: request.max_new]))
        return LENGTH

    job.router.generate = generate  # type: ignore[method-assign]
    assert await job._turns(t, {}) == ("length", 0.5)
    assert asked == [length]
    assert t.length == t.prompt_length + length
    assert Asking.seen == [f"cut {'234567'[:length]}"]
