"""Conversations, environments' answers and texts that would train otherwise than they read."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from loadtests.mistakes.job import CODE, LETTERS, lines
from loadtests.mistakes.mistake import Mistake

_THIRD = r"train\.jsonl, line 3\b"
_ROWS: list[dict[str, Any]] = [{"prompt": f"{a}+9=", "answer": str(a + 9)} for a in range(1, 9)]
_TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '$' }}{% endfor %}"
_CHAT = {
    "model/chat_template.jinja": _TEMPLATE,
    "model/tokenizer_config.json": json.dumps({"eos_token": "$"}),
}
_ENVIRONMENT = """

class Environment:
    def open(self, row):
        return row["prompt"]

    def step(self, text):
        return {"done": True, "reward": 1.0}

    def cut(self, text):
        return 0.0


def environment():
    return Environment()
"""
_STEP = r"mine\.py:13 in step"  # where `step` begins
_OPEN = r"mine\.py"


def _special() -> str:
    """The tokenizer of `job.make_model` with `#` as a special token, as a file."""
    backend = Tokenizer(models.WordLevel({c: i for i, c in enumerate(LETTERS)}, unk_token="."))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.add_special_tokens([AddedToken("#", special=True, normalized=False)])
    return backend.to_str()


def _with(row: dict[str, Any]) -> dict[str, str]:
    """Good rows, and this one on line 3."""
    return {"train.jsonl": lines([*_ROWS[:2], row | {"answer": "2"}, *_ROWS[2:]])}


def _in_messages(name: str, prompt: Any, *says: str) -> Mistake:
    return Mistake(
        f"conversation: {name}",
        (_THIRD, *says),
        set={"environment.chat": "template"},
        files=_CHAT | _with({"prompt": prompt}),
    )


def _in_a_row(name: str, row: dict[str, Any], *says: str, **set_: Any) -> Mistake:
    keys = {key.replace("__", "."): value for key, value in set_.items()}
    return Mistake(f"conversation: {name}", (_THIRD, *says), set=keys, files=_with(row))


def _environment(old: str, new: str) -> dict[str, str]:
    assert old in _ENVIRONMENT
    return {"mine.py": CODE + _ENVIRONMENT.replace(old, new)}


def _in_open(name: str, new: str, *says: str, chat: str = "") -> Mistake:
    keys: dict[str, Any] = {"environment.use": "mine:environment", "environment.chat": chat}
    files = _environment('return row["prompt"]', new) | (_CHAT if chat else {})
    return Mistake(f"conversation: {name}", says, set=keys, files=files)


def _in_step(name: str, answer: str, *says: str) -> Mistake:
    # Any letter ends a turn, so that every trajectory comes to the environment's step.
    keys = {"environment.use": "mine:environment", "rollout.stop": list(LETTERS)}
    files = _environment('{"done": True, "reward": 1.0}', answer)
    says = ("step", _STEP, *says)
    return Mistake(f"environment's answer: {name}", says, running=True, set=keys, files=files)


MISTAKES = (
    _in_a_row(
        "messages without a chat",
        {"prompt": [{"role": "user", "content": "1+1="}]},
        r"environment\.chat",
        "messages",
    ),
    _in_messages("an empty list", [], "list of messages is empty"),
    _in_messages("no role", [{"from": "human", "value": "1+1="}], "no role", "'from'"),
    _in_messages("a role that is none", [{"role": "human", "content": "a"}], "'human'", "user"),
    _in_messages("no content", [{"role": "user", "content": None}], "no content", "message 1"),
    _in_messages(
        "an image", [{"role": "user", "content": [{"type": "image_url"}]}], "image_url", "text"
    ),
    _in_messages(
        "calls that are none",
        [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"name": "f"}]}],
        "message 2",
        "tool call",
        "function",
    ),
    Mistake(
        "conversation: an answer of sft that is a message, without a chat",
        (r"train\.jsonl, line 1\b", r"environment\.chat", "response"),
        set={"algorithm.name": "sft", "algorithm.group_size": 1, "reward.use": None},
        files={
            "train.jsonl": lines([r | {"response": {"role": "assistant"}} for r in _ROWS]),
        },
    ),
    _in_a_row("NaN in a row", {"prompt": "1+1=", "x": float("nan")}, "'x'", "NaN", "finite"),
    Mistake(
        "conversation: 1e999 in a row",
        (_THIRD, "'x'", "1e999", "finite"),
        files={"train.jsonl": lines(_ROWS[:2]) + '{"prompt": "1+1=", "answer": "2", "x": 1e999}\n'},
    ),
    _in_a_row("characters that the tokenizer replaces", {"prompt": "1+1=é"}, "é", "replaces"),
    Mistake(
        "conversation: special tokens in prompts without a chat",
        (_THIRD, "'#'", r"environment\.special_tokens"),
        files=_with({"prompt": "#1+1="}) | {"model/tokenizer.json": _special()},
    ),
    _in_open(
        "an environment whose later prompts are not of the vocabulary",
        'return row["prompt"].replace("8+", "é+")',
        "é",
        "replaces",
        r"held_out\.jsonl, line \d+",
    ),
    _in_open(
        "an environment that opens messages without content",
        'return [{"role": "user"}]',
        "no content",
        _OPEN + r"|environment\.use",
        chat="template",
    ),
    _in_open(
        "an environment that fails at a later row",
        'return {"8": {}}.get(row["prompt"][0], row)["prompt"]',
        "KeyError",
        _OPEN,
        r"held_out\.jsonl, line \d+",
    ),
    _in_step("None", "None", "None", "append"),
    _in_step("an end beside a tool", '{"tool": "look", "done": True}', "'tool'", "'done'"),
    _in_step("a reward in the middle", '{"append": "1", "reward": 1.0}', "'reward'", "'done'"),
    _in_step("a reward that is a text", '{"done": True, "reward": "1.0"}', "'1.0'", "number"),
    _in_step("a reward that is infinite", '{"done": True, "reward": 1e999}', "inf", "finite"),
    _in_step("a key that is none", '{"done": True, "rewrad": 1.0}', "rewrad"),
    _in_step("done that is a number", '{"done": 1}', "'done'", "True or False"),
    _in_step("messages without a chat", '{"append": [{"role": "user"}]}', r"environment\.chat"),
)
