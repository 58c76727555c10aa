"""Answers that the dataset gives, as trajectories that were never sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.common.base.errors import ToolFailed
from meshrl.common.model.chat.chat import Chat
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.services.environment.environments import Environments
from meshrl.services.rollout.runner import supervise
from meshrl.services.rollout.trajectories.trajectory import NOT_SAMPLED, Trajectory
from tests.unit.common.model.chatting import qwen3_tokenizer

ROOT = Path(__file__).parents[3]
PLAIN = Tokenizer.load(str(ROOT / "examples/calculator/tokenizer.json"))
VERSION = 5


class Pool:
    """The operations of an environment process, in this one."""

    def __init__(self, tokenizer: Tokenizer, chat: Chat | None = None) -> None:
        self.served = Environments(None, tokenizer, "prompt", chat, ends=["$"])

    async def answer(self, key: int, row: dict[str, Any], value: Any) -> tuple[Any, Any]:
        status, found = self.served.perform(key, "answer", [row, value])
        if status != "ok":
            raise ToolFailed(found)
        return found[0], found[1]


async def supervised(pool: Pool, row: dict[str, Any], max_tokens: int = 64) -> Trajectory:
    t = Trajectory(3, 0, 7, VERSION, seed=0)
    await supervise(t, row, "response", pool, max_tokens)  # type: ignore[arg-type]
    return t


async def test_the_answer_is_what_is_trained_and_the_prompt_is_not() -> None:
    t = await supervised(Pool(PLAIN), {"prompt": "1+1=", "response": "2$"})
    assert PLAIN.decode(t.tokens.tolist()) == "1+1=2$"
    assert t.versions.tolist() == [NOT_SAMPLED] * 4 + [VERSION] * 2
    assert not t.logprobs.any()
    assert t.ending is not None and (t.ending.reason, t.ending.reward) == ("done", 1.0)
    assert not t.recorded


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "1+1=", "response": ""}, "no token"),
        ({"prompt": "1+1=", "response": "2" * 64}, "68 tokens"),
        ({"prompt": "1+1="}, "an answer is str"),
        ({"response": "2"}, "prompt"),
    ],
)
async def test_a_row_that_cannot_be_learned_fails_by_type(row: dict[str, Any], why: str) -> None:
    pool = Pool(PLAIN)
    t = await supervised(pool, row)
    assert t.ending is not None and t.ending.reward is None
    assert t.ending.error.startswith("row 7: ") and why in t.ending.error
    assert pool.served.perform(t.id, "step", [])[0] == "unknown", "nothing stays open"


async def test_an_answer_in_a_chat_is_what_the_format_writes_up_to_its_end(tmp_path: Path) -> None:
    tokenizer = qwen3_tokenizer(tmp_path)
    pool = Pool(tokenizer, Chat.load("qwen3", {"enable_thinking": False}, tokenizer))
    t = await supervised(pool, {"prompt": "hi", "response": "the sum"}, 400)
    assert t.ending is not None and t.ending.error == ""
    sampled = t.versions != NOT_SAMPLED
    assert tokenizer.decode(t.tokens[sampled].tolist()) == "the sum<|im_end|>"
    told = tokenizer.decode(t.tokens[~sampled].tolist())
    assert told.startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert np.flatnonzero(sampled)[0] == (~sampled).sum()


async def test_an_answer_in_a_chat_may_be_a_message_with_reasoning_and_calls(
    tmp_path: Path,
) -> None:
    tokenizer = qwen3_tokenizer(tmp_path)
    pool = Pool(tokenizer, Chat.load("qwen3", {}, tokenizer))
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    message = {"content": "", "reasoning_content": "adding", "tool_calls": [call]}
    t = await supervised(pool, {"prompt": "1+1", "response": message}, 400)
    assert t.ending is not None and t.ending.error == ""
    said = tokenizer.decode(t.tokens[t.versions != NOT_SAMPLED].tolist())
    assert "adding" in said and '"name": "add"' in said and said.endswith("<|im_end|>")


async def test_nothing_stays_open_after_an_answer() -> None:
    pool = Pool(PLAIN)
    t = await supervised(pool, {"prompt": "1+1=", "response": "2$"})
    assert pool.served.perform(t.id, "step", [])[0] == "unknown"
