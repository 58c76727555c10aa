"""A trajectory's turns, with an environment that is lost before each operation and rebuilt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshrl.common.api.engine import Finish
from meshrl.common.base.errors import ToolFailed
from meshrl.common.job.config import JobConfig, RolloutConfig
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.common.records.ledger import Kind, Record
from meshrl.common.records.token_record import TokenRows
from meshrl.services.environment.environments import Environments
from meshrl.services.rollout.runner import JobTurns, TrajectoryRunner
from meshrl.services.rollout.trajectories.trajectory import Restored, Trajectory
from meshrl.services.rollout.trajectories.turns import CALLS

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


class Saying:
    """A trajectory at an engine that says the same in each turn, as far as there is room."""

    def __init__(self, t: Trajectory, said: str, ends: Finish = Finish.STOP) -> None:
        self.trajectory, self._said, self._ends = t, TOKENIZER.encode(said), ends
        self.limits: list[int] = []

    async def generate(self, limit: int) -> Finish:
        self.limits.append(limit)
        room = limit - self.trajectory.length
        if room <= 0:
            return Finish.LENGTH
        self.trajectory.sampled(*arrays(self._said[:room]))
        return self._ends


async def turns(runner: TrajectoryRunner, t: Trajectory, said: str) -> tuple[str, float | None]:
    """Runs the trajectory, which says that in each turn."""
    return await JobTurns(runner, Saying(t, said), {}).play()  # type: ignore[arg-type]


def runner_of(pool: Rebuilt, **rollout: Any) -> TrajectoryRunner:

    async def tool(name: str, argument: str, session: str, earlier: Any) -> str:
        return argument

    job = TrajectoryRunner.__new__(TrajectoryRunner)
    job.config = JobConfig(rollout=RolloutConfig(**rollout))
    job.environments = pool  # type: ignore[assignment]
    job.router = SimpleNamespace(returned=lambda stay: None)  # type: ignore[assignment]
    job.sandbox = SimpleNamespace(tool=tool)  # type: ignore[assignment]
    return job


def arrays(ids: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n = len(ids)
    return np.array(ids, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32)


def restored(
    opening: list[int], turn: tuple[list[int], str], *more: tuple[Kind, Any]
) -> Trajectory:
    """A trajectory as a shard that starts again finds it in its ledger."""
    said = turn[1]
    tokens, logprobs, versions = arrays(turn[0])
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
    job = runner_of(pool, max_turns=3)
    assert await turns(job, t, "2") == ("turns", 0.5)
    assert Asking.seen == ["step 2", "result 2"] * 3 + ["cut "]


@pytest.mark.parametrize("answered", [True, False])
async def test_a_turn_that_ended_where_room_ends_is_not_told_twice(answered: bool) -> None:
    pool = Rebuilt()
    opening = await pool.begin({})
    call = [(Kind.TOOL, [KEY, "echo", "2", "7"])] if answered else []
    t = restored(opening, (TOKENIZER.encode("2"), "2"), *call)
    value = "7" if answered else "2"
    job = runner_of(pool, max_tokens=t.length)
    assert await turns(job, t, "3") == ("length", 0.5)
    assert Asking.seen == ["step 2", f"result {value}", "cut "]
    (turn,) = t.every_turn
    assert (turn.text, turn.calls()) == ("2", [("echo", "2", value)])


async def test_an_environment_that_calls_for_ever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Asking, "endless", True)
    pool = Rebuilt(lossy=False)
    t = Trajectory(0, 0, 0, 0, 0)
    t.recorded = False
    t.begin(await pool.begin({}))
    with pytest.raises(ToolFailed, match=f"over {CALLS} tool calls"):
        await turns(runner_of(pool), t, "2")


@pytest.mark.parametrize("member, length", [(0, 3), (1, 1), (2, 3)])
async def test_a_trajectory_is_cut_at_its_forced_length(member: int, length: int) -> None:
    pool = Rebuilt(lossy=False)
    t = Trajectory(0, member, 0, 0, 0)
    t.recorded = False
    t.begin(await pool.begin({}))
    job = runner_of(pool, lengths=[3, 1])
    stay = Saying(t, "234567", Finish.LENGTH)
    assert await JobTurns(job, stay, {}).play() == ("length", 0.5)  # type: ignore[arg-type]
    assert stay.limits == [t.prompt_length + length]
    assert t.length == t.prompt_length + length
    assert Asking.seen == [f"cut {'234567'[:length]}"]


class Ends(Rebuilt):
    """A pool whose environment ends with a last observation."""

    async def step(self, _: int, ids: list[int], replay: Any) -> Any:
        return TOKENIZER.decode(ids), "last", [TOKENIZER.encode("=4"), 0.5]


async def test_a_last_observation_is_in_the_ledger_with_the_end() -> None:
    pool = Ends()
    opening = await pool.begin({})
    t = Trajectory(0, 0, 0, 0, 0)
    t.recorded = False
    t.begin(opening)
    assert await turns(runner_of(pool), t, "2") == ("done", 0.5)
    assert TOKENIZER.decode(t.tokens.tolist()) == "1+1=2=4"
    said = (TOKENIZER.encode("2"), "2")
    again = restored(
        opening, said, (Kind.APPEND, [KEY, t.last]), (Kind.END, [KEY, "done", 0.5, ""])
    )
    assert again.tokens.tolist() == t.tokens.tolist()
    assert again.ending is not None and again.ending.reward == 0.5
