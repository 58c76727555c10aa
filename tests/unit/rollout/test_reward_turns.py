"""Turns that `reward(row, turns)` receives, of every kind in docs/use/job-file.md."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest

from meshrl.common.api.engine import FinishReason
from meshrl.common.base.errors import ToolFailed
from meshrl.common.grading.answers import extract_answer
from meshrl.common.job.config import EnvironmentConfig, JobConfig, RewardConfig, RolloutConfig
from meshrl.common.model.chat.chat_format import ChatFormat
from meshrl.common.model.tokens.tokenizer import Tokenizer, build_character_tokenizer
from meshrl.common.records.ledger import RecordKind
from meshrl.services.environment.environments import Environments
from meshrl.services.environment.model_tools import JobTool, ModelTool
from meshrl.services.rollout.runner import TrajectoryRunner, fill_supervised
from meshrl.services.rollout.trajectories.failures import TrajectoryFailed
from meshrl.services.rollout.trajectories.trajectory import NOT_SAMPLED, Trajectory
from meshrl.services.rollout.trajectories.transcript import Transcript
from meshrl.services.sandbox.workers.worker import OK, REWARD, run_call
from tests.unit.common.model.chatting import qwen3_tokenizer
from tests.unit.rollout.test_trajectory_turns import arrays, restore_trajectory

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .?=+!;"
STOP = ";"
SEEN: dict[str, Any] = {}
ROW = {"prompt": "1+1=", "answer": 2, "more": {"kept": [1, None]}}


class ToolEnvironment:
    """Environment that calls a tool, appends the tool's value, calls again and ends at `2;`."""

    def open(self, row: dict[str, Any]) -> str:
        SEEN["opened"] = row
        return str(row["prompt"])

    def step(self, text: str) -> dict[str, Any]:
        SEEN.setdefault("steps", []).append(text)
        return {"done": True} if text == "2;" else {"tool": "double", "input": {"of": text}}

    def result(self, value: Any) -> dict[str, Any]:
        return {"append": f" {value['is']} so?"}

    def cut(self, text: str) -> float:
        SEEN["cut"] = text
        return 0.25

    def close(self) -> None:
        return None


def reward(row: dict[str, Any], turns: list[dict[str, Any]]) -> float:
    SEEN["row"], SEEN["turns"] = row, turns
    return 0.5


def double(of: str) -> str:
    """Double a number."""
    return of * 2


@pytest.fixture
def tokenizer(tmp_path: Any) -> Tokenizer:
    SEEN.clear()
    return build_character_tokenizer(CHARACTERS, tmp_path / "tokenizer.json")


class ScriptedAssignment:
    """Trajectory at an engine that samples the given texts in order."""

    def __init__(self, t: Trajectory, texts: list[list[int]]) -> None:
        self.trajectory, self._says = t, texts

    async def generate(self, limit: int) -> FinishReason:
        ids = self._says.pop(0)
        room = limit - self.trajectory.length
        self.trajectory.append_sampled(*arrays(ids[:room]))
        return FinishReason.STOP if len(ids) <= room else FinishReason.LENGTH

    def finish(self) -> None:
        assert self.trajectory.outcome is None


def create_job(
    served: Environments, tokenizer: Tokenizer, stop: str, **rollout: Any
) -> TrajectoryRunner:
    async def perform(operation: str, key: int, argument: Any, *_: Any) -> Any:
        status, answer = served.run_operation(key, operation, argument)
        assert status == "ok", answer
        return answer

    def operation(name: str) -> Callable[..., Any]:
        return lambda *arguments: perform(name, *arguments)

    async def tool(name: str, argument: Any, *_: Any) -> Any:
        return {"is": double(argument["of"])} if isinstance(argument, dict) else double(argument)

    async def scored(row: dict[str, Any], turns: list[dict[str, Any]]) -> float:
        name = f"{REWARD}0"
        _, status, value, error = run_call({name: reward}, [1, name, msgpack.packb([row, turns])])
        assert status == OK, error
        return float(value)

    job = TrajectoryRunner.__new__(TrajectoryRunner)
    job.config = JobConfig(
        rollout=RolloutConfig(**rollout),
        reward=RewardConfig(use="m:reward"),
        environment=EnvironmentConfig(use="m:f"),
    )
    pool = SimpleNamespace(
        begin=operation("begin"),
        step=operation("step"),
        send_tool_result=operation("result"),
        end_early=operation("cut"),
    )
    job.environment_pool = pool  # type: ignore[assignment]
    job.router = SimpleNamespace(on_tool_return=lambda assignment: None)  # type: ignore[assignment]
    job.sandbox_client = SimpleNamespace(  # type: ignore[assignment]
        call_tool=tool, compute_reward=scored
    )
    job.judge = None
    ids = tokenizer.encode(stop)
    job.transcript = Transcript(tokenizer.decode, frozenset(ids), job.config.rollout.stop_text)
    return job


def run_to_end(
    job: TrajectoryRunner, t: Trajectory, tokenizer: Tokenizer, texts: list[str], row: Any = None
) -> str:
    """Run a trajectory that samples these turns; return the reason of its end."""
    t.is_recorded = False
    assignment = ScriptedAssignment(t, [tokenizer.encode(text) for text in texts])
    ending = asyncio.run(job.run_to_end(assignment, ROW if row is None else row))  # type: ignore[arg-type]
    assert ending.reward == 0.5, ending.error
    return ending.reason


def fresh() -> Trajectory:
    return Trajectory(0, 0, 0, 0, 0)


MODEL = {"role": "model", "text": "1+1;", "stop": ";", "truncated": False}
TOOL = {
    "role": "tool",
    "text": '{"is": "1+1;1+1;"}',
    "name": "double",
    "input": {"of": "1+1;"},
    "value": {"is": "1+1;1+1;"},
}
APPENDED = {"role": "environment", "text": " 1+1;1+1; so?"}


def test_reward_receives_turns_of_model_tools_and_appended_texts(tokenizer: Tokenizer) -> None:
    served = Environments(ToolEnvironment, tokenizer, "")
    t = fresh()
    assert run_to_end(create_job(served, tokenizer, STOP), t, tokenizer, ["1+1;", "2;"]) == "done"
    last = {"role": "model", "text": "2;", "stop": ";", "truncated": False}
    assert SEEN["turns"] == [MODEL, TOOL, APPENDED, last]
    assert SEEN["steps"] == ["1+1;", "2;"], "an environment reads the stop token, too"
    assert SEEN["row"] == SEEN["opened"] == ROW
    assert extract_answer(SEEN["turns"], {}) == "2"


def test_truncated_turn_is_marked(tokenizer: Tokenizer) -> None:
    served = Environments(ToolEnvironment, tokenizer, "")
    job = create_job(served, tokenizer, STOP, max_tokens=len("1+1=1+1; 1+1;1+1; so?ab"))
    assert run_to_end(job, fresh(), tokenizer, ["1+1;", "abcdef"]) == "length"
    last = {"role": "model", "text": "ab", "stop": "", "truncated": True}
    assert SEEN["turns"] == [MODEL, TOOL, APPENDED, last]
    assert SEEN["cut"] == "ab"


def test_complete_last_turn_is_marked_truncated_with_its_stop_token(tokenizer: Tokenizer) -> None:
    served = Environments(ToolEnvironment, tokenizer, "")
    job = create_job(served, tokenizer, STOP, max_turns=1)
    assert run_to_end(job, fresh(), tokenizer, ["1+1;"]) == "turns"
    assert SEEN["turns"] == [MODEL | {"truncated": True}, TOOL], "nothing was appended any more"


def test_stop_text_and_its_whole_token_belong_to_the_turn(tokenizer: Tokenizer) -> None:
    served = Environments(ToolEnvironment, tokenizer, "")
    job = create_job(served, tokenizer, "", stop_text=["so"], max_turns=1)
    assert run_to_end(job, fresh(), tokenizer, ["2 so!"]) == "turns"
    assert (SEEN["turns"][0]["text"], SEEN["turns"][0]["stop"]) == ("2 so!", "so!")


def test_trajectory_restored_from_the_ledger_has_equal_turns(tokenizer: Tokenizer) -> None:
    served = Environments(ToolEnvironment, tokenizer, "")
    job = create_job(served, tokenizer, STOP)
    appended = tokenizer.encode(APPENDED["text"])
    call = (RecordKind.TOOL, [0, "double", TOOL["input"], TOOL["value"]])
    opening = served.run_operation(0, "begin", ROW)[1]
    t = restore_trajectory(
        opening, (tokenizer.encode("1+1;"), "1+1;"), call, (RecordKind.APPEND, [0, appended])
    )
    run_to_end(job, t, tokenizer, ["2;"])
    assert SEEN["turns"][:3] == [MODEL, TOOL, APPENDED]


def test_chat_turns_use_the_models_format(tmp_path: Any) -> None:
    tokenizer = qwen3_tokenizer(tmp_path)
    SEEN.clear()

    class Twice:
        said = 0

        def open(self, row: dict[str, Any]) -> Any:
            return row["prompt"]

        def step(self, text: str) -> dict[str, Any]:
            SEEN.setdefault("steps", []).append(text)
            self.said += 1
            again = [{"role": "user", "content": "sure?"}]
            return {"append": again} if self.said == 1 else {"done": True}

        def cut(self, text: str) -> None:
            SEEN["cut"] = text

        def close(self) -> None:
            return None

    chat = ChatFormat.load("qwen3", {}, tokenizer)
    tools: dict[str, ModelTool] = {"double": JobTool("double", double)}
    end = "<|im_end|>"
    job = create_job(
        Environments(Twice, tokenizer, "", chat, tools), tokenizer, end, max_tokens=2048
    )
    call = '<tool_call>\n{"name": "double", "arguments": {"of": "ab"}}\n</tool_call>' + end
    thought = "<think>\nhm\n</think>\n\n4" + end
    row = {"prompt": [{"role": "user", "content": "2+2?"}]}
    texts = [call, thought, "4" + end]
    assert run_to_end(job, fresh(), tokenizer, texts, row) == "done"
    roles = [turn["role"] for turn in SEEN["turns"]]
    assert roles == ["model", "tool", "environment", "model", "environment", "model"]
    model, tool, answered, second, second_call, _ = SEEN["turns"]
    assert (model["text"], model["stop"]) == (call, end)
    assert tool == tool | {"name": "double", "input": "ab", "value": "abab", "text": "abab"}
    assert "<tool_response>\nabab\n</tool_response>" in answered["text"]
    assert second["text"] == thought, "with reasoning and the format's tokens"
    assert "<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant" in second_call["text"]
    assert SEEN["steps"] == ["4", "4"], "without them"
    assert SEEN["row"] == row


def test_cut_of_a_chat_receives_the_same_text_as_a_step(tmp_path: Any) -> None:
    tokenizer = qwen3_tokenizer(tmp_path)
    prompt_text: list[str] = []

    class Cut(ToolEnvironment):
        def open(self, row: dict[str, Any]) -> Any:
            return row["prompt"]

        def cut(self, text: str) -> float:
            prompt_text.append(text)
            return 0.0

    served = Environments(Cut, tokenizer, "", ChatFormat.load("qwen3", {}, tokenizer))
    served.run_operation(0, "begin", {"prompt": "2+2?"})
    ids = tokenizer.encode("<think>\nhm\n</think>\n\nit is")
    assert served.run_operation(0, "cut", ids) == ("ok", ["<think>\nhm\n</think>\n\nit is", 0.0])
    assert prompt_text == ["it is"]


class EndsAfterFirstTurn:
    """Environment that shows the outcome of a turn and ends."""

    def open(self, row: dict[str, Any]) -> str:
        return str(row["prompt"])

    def step(self, text: str) -> dict[str, Any]:
        return {"append": " over!", "done": True, "reward": 0.25}

    def close(self) -> None:
        return None


def test_last_observation_reaches_the_reward_and_counts(tokenizer: Tokenizer) -> None:
    t = fresh()
    job = create_job(
        Environments(EndsAfterFirstTurn, tokenizer, ""), tokenizer, STOP, max_tokens=40
    )
    assert run_to_end(job, t, tokenizer, ["2;"]) == "done"
    assert [turn["text"] for turn in SEEN["turns"]] == ["2;", " over!"]
    assert tokenizer.decode(t.tokens.tolist()) == "1+1=2; over!" and t.last_observation
    full = fresh()
    job = create_job(
        Environments(EndsAfterFirstTurn, tokenizer, ""), tokenizer, STOP, max_tokens=10
    )
    assert run_to_end(job, full, tokenizer, ["2;"]) == "done"
    assert [turn["text"] for turn in SEEN["turns"]] == ["2;"] and not full.last_observation


def test_stop_text_twice_in_its_token_is_stripped_whole(tokenizer: Tokenizer) -> None:
    transcript = Transcript(tokenizer.decode, (), ["!!", "\n", "no"])
    for text, stop in (("so!!!!", "!!!!"), ("is\n\n", "\n\n"), ("is no\nno", "no\nno"), ("is", "")):
        assert transcript._find_stop(text, []) == stop


@pytest.mark.parametrize("score", [float("inf"), float("nan")])
def test_non_finite_reward_is_a_named_failure(tokenizer: Tokenizer, score: float) -> None:
    job = create_job(Environments(ToolEnvironment, tokenizer, ""), tokenizer, STOP)

    async def overflowed(*_: Any) -> float:
        return score

    job.sandbox_client = SimpleNamespace(compute_reward=overflowed)  # type: ignore[assignment]
    with pytest.raises(TrajectoryFailed, match=f"the reward is {score}") as failed:
        asyncio.run(job.compute_reward(fresh(), ROW, "done", None))
    assert failed.value.kind == "reward is not finite"


def test_metrics_of_reward_and_environment_are_named_by_their_source(
    tokenizer: Tokenizer,
) -> None:
    job = create_job(Environments(ToolEnvironment, tokenizer, ""), tokenizer, STOP)

    async def compute_reward(*_: Any) -> Any:
        return {"reward": 0.5, "metrics": {"format": 1.0}}

    job.sandbox_client = SimpleNamespace(compute_reward=compute_reward)  # type: ignore[assignment]
    score = {"reward": None, "metrics": {"moves": 3.0}}
    found = asyncio.run(job.compute_reward(fresh(), ROW, "done", score))
    assert found == (0.5, {"environment/moves": 3.0, "reward/format": 1.0})


ROOT = Path(__file__).parents[3]
PLAIN = Tokenizer.load(str(ROOT / "examples/calculator/tokenizer.json"))
VERSION = 5


class LocalPool:
    """Operations of an environment process, executed in this process."""

    def __init__(
        self, tokenizer: Tokenizer, chat: ChatFormat | None = None, train_on: str = "all"
    ) -> None:
        self.train_on = train_on
        self.served = Environments(None, tokenizer, "prompt", chat, end_tokens=["$"])

    async def encode_answer(self, key: int, row: dict[str, Any]) -> Any:
        status, pieces = self.served.run_operation(key, "answer", [row, "response", self.train_on])
        if status != "ok":
            raise ToolFailed(pieces)
        return pieces


async def supervised(pool: LocalPool, row: dict[str, Any], max_tokens: int = 64) -> Trajectory:
    t = Trajectory(3, 0, 7, VERSION, seed=0)
    await fill_supervised(t, row, pool, max_tokens)  # type: ignore[arg-type]
    return t


async def test_supervised_row_trains_the_answer_and_not_the_prompt() -> None:
    t = await supervised(LocalPool(PLAIN), {"prompt": "1+1=", "response": "2$"})
    assert PLAIN.decode(t.tokens.tolist()) == "1+1=2$"
    assert t.versions.tolist() == [NOT_SAMPLED] * 4 + [VERSION] * 2
    assert not t.logprobs.any()
    assert t.outcome is not None and (t.outcome.reason, t.outcome.reward) == ("done", 1.0)
    assert not t.is_recorded


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "1+1=", "response": ""}, "no token"),
        ({"prompt": "1+1=", "response": "2" * 64}, "68 tokens"),
        ({"prompt": "1+1="}, "an answer must be a str"),
        ({"response": "2"}, "prompt"),
    ],
)
async def test_invalid_supervised_row_fails_by_type(row: dict[str, Any], why: str) -> None:
    pool = LocalPool(PLAIN)
    t = await supervised(pool, row)
    assert t.outcome is not None and t.outcome.reward is None
    assert t.outcome.error.startswith("row 7: ") and why in t.outcome.error
    assert pool.served.run_operation(t.id, "step", [])[0] == "unknown", "nothing stays open"


async def test_chat_answer_is_formatted_up_to_its_end(tmp_path: Path) -> None:
    tokenizer = qwen3_tokenizer(tmp_path)
    pool = LocalPool(tokenizer, ChatFormat.load("qwen3", {"enable_thinking": False}, tokenizer))
    t = await supervised(pool, {"prompt": "hi", "response": "the sum"}, 400)
    assert t.outcome is not None and t.outcome.error == ""
    sampled = t.versions != NOT_SAMPLED
    assert tokenizer.decode(t.tokens[sampled].tolist()) == "the sum<|im_end|>"
    prompt_text = tokenizer.decode(t.tokens[~sampled].tolist())
    assert prompt_text.startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert np.flatnonzero(sampled)[0] == (~sampled).sum()


async def test_chat_answer_accepts_a_message_with_reasoning_and_calls(tmp_path: Path) -> None:
    tokenizer = qwen3_tokenizer(tmp_path)
    pool = LocalPool(tokenizer, ChatFormat.load("qwen3", {}, tokenizer))
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    message = {"content": "", "reasoning_content": "adding", "tool_calls": [call]}
    t = await supervised(pool, {"prompt": "1+1", "response": message}, 400)
    assert t.outcome is not None and t.outcome.error == ""
    said = tokenizer.decode(t.tokens[t.versions != NOT_SAMPLED].tolist())
    assert "adding" in said and '"name": "add"' in said and said.endswith("<|im_end|>")


async def test_supervised_answer_closes_its_environment() -> None:
    pool = LocalPool(PLAIN)
    t = await supervised(pool, {"prompt": "1+1=", "response": "2$"})
    assert pool.served.run_operation(t.id, "step", [])[0] == "unknown"


CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "two", "name": None},
    {"role": "user", "content": "thanks"},
]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


async def test_demonstration_trains_its_assistant_messages(tmp_path: Path) -> None:
    tokenizer = qwen3_tokenizer(tmp_path)
    chat = ChatFormat.load("qwen3", {}, tokenizer)
    row = {"messages": CONVERSATION, "tools": json.dumps([ADD]), "prompt": "of other use"}
    whole = await supervised(LocalPool(tokenizer, chat), row, 800)
    assert whole.outcome is not None and whole.outcome.error == ""
    learned = whole.versions != NOT_SAMPLED
    texts = [turn.text for turn in whole.all_turns]
    assert '"name": "add"' in texts[0] and texts[-1].endswith("two<|im_end|>")
    assert tokenizer.decode(whole.tokens[learned].tolist()) == "".join(texts)
    written = tokenizer.decode(whole.tokens.tolist())
    assert written.index("Be brief.") < written.index("1+1?") and "thanks" not in written
    assert "<tool_response>" in written and '"parameters"' in written.partition("1+1?")[0]
    last = await supervised(LocalPool(tokenizer, chat, "last"), row, 800)
    assert last.tokens[last.versions != NOT_SAMPLED].tolist() == tokenizer.encode(texts[-1])
    assert last.prompt_length > whole.prompt_length


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"messages": CONVERSATION[:2]}, "the answer has no tokens"),
        ({"messages": []}, "the list of messages is empty"),
        ({"messages": [*CONVERSATION[:5], CONVERSATION[4]]}, "messages 5 and 6 are both of the"),
        ({"messages": [{"role": "human", "content": "1"}]}, "the unknown role 'human'"),
        ({"messages": CONVERSATION, "tools": "add"}, "'tools' is not JSON"),
        ({"messages": CONVERSATION, "tools": {"name": "add"}}, "'tools' must be a list"),
    ],
)
async def test_invalid_demonstration_fails_by_type(
    row: dict[str, Any], why: str, tmp_path: Path
) -> None:
    tokenizer = qwen3_tokenizer(tmp_path)
    t = await supervised(LocalPool(tokenizer, ChatFormat.load("qwen3", {}, tokenizer)), row)
    assert t.outcome is not None and t.outcome.reward is None
    assert why in t.outcome.error
