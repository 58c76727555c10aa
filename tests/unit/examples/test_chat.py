"""Chat example: its demonstrations match the chat format's rendering of the conversations."""

from __future__ import annotations

import json
import random
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.model.chat.chat_format import ChatFormat
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.job.job_reader import load_config
from meshrl.services.environment.environments import Environments
from meshrl.services.environment.model_tools import JobTool, ModelTool

# `importlib`, because mypy resolves the name to the folder
example: Any = import_module("examples.chat")
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(EXAMPLES / "chat/tokenizer.json")


@pytest.fixture(scope="module")
def chat_environment(tokenizer: Tokenizer) -> Environments:
    tools: dict[str, ModelTool] = {"add": JobTool("add", example.add)}
    return Environments(None, tokenizer, "prompt", ChatFormat.load("qwen3", {}, tokenizer), tools)


@pytest.mark.parametrize("progress", [0.0, 0.9])
def test_demonstrations_are_trajectories_of_the_environment(
    chat_environment: Environments, tokenizer: Tokenizer, progress: float
) -> None:
    rng = random.Random(3)
    rewards = []
    for key in range(20):
        pieces = example.demonstrate(rng, progress)
        ids = [tokenizer.encode(text) for text, _ in pieces]
        prompt = pieces[0][0].split("user\n")[-1].split("<|im_end|>")[0]
        assert chat_environment.run_operation(key, "begin", {"prompt": prompt}) == ("ok", ids[0])
        turns = []
        for turn, answer in zip(ids[1::2], [*ids[2::2], None], strict=True):
            _, (text, action, value) = chat_environment.run_operation(key, "step", turn)
            turns.append({"role": "model", "text": text})
            if action == "tool":
                name, argument = value
                assert name == "add"
                action, value = chat_environment.run_operation(
                    key, "result", example.add(argument)
                )[1]
            assert [action, value] == (["append", answer] if answer else ["done", None])
        a, b = prompt.rstrip("?").split("+")
        rewards.append(example.reward({"answer": int(a) + int(b)}, turns))
    assert 0 < sum(rewards) < len(rewards)


def test_job_file_is_valid_and_uses_the_formats_stop_tokens() -> None:
    config, _ = load_config(EXAMPLES / "chat.toml", [])
    assert config.rollout.stop == ["<|im_end|>", "<|endoftext|>"]
    rows = [json.loads(line) for line in (EXAMPLES / "chat/train.jsonl").open()]
    assert len(rows) == example.LARGEST**2 - example.HELD_OUT
