"""Chat environments: tool calls are executed in order; invalid ones are answered with an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import pytest

from loadtests.chat_templates.comparing import directory_of
from meshrl.common.model.chat.chat_format import ChatFormat
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.services.environment.environments import Environments
from meshrl.services.environment.model_tools import InvalidToolCall, JobTool, ModelTool
from tests.unit.common.model.chatting import qwen3_tokenizer
from tests.unit.common.model.templates.formats import FORMATS
from tests.unit.common.model.test_tokenizer import byte_tokenizer


class Sum(TypedDict):
    a: int
    b: int
    how: NotRequired[Literal["fast", "slow"]]


def add(sum: Sum) -> int:
    """Adds two
    numbers.

    Not for the model.
    """
    return sum["a"] + sum["b"]


def shout(text: str) -> str:
    return text.upper()


class Guess:
    """Environment of a user who answers higher or lower until the model finds the number."""

    def open(self, row: dict[str, Any]) -> Any:
        self.secret = row["secret"]
        return [{"role": "system", "content": "guess"}, {"role": "user", "content": "what is it?"}]

    def step(self, text: str) -> dict[str, Any]:
        if not text.isdigit():
            return {"tool": "shout", "input": text}
        if int(text) == self.secret:
            return {"done": True, "reward": 1}
        return {"append": "higher" if int(text) < self.secret else "lower"}

    def result(self, value: Any) -> dict[str, Any]:
        return {"append": [{"role": "user", "content": f"{value}?"}]}

    def cut(self, text: str) -> float:
        return 0.25

    def close(self) -> None:
        pass


TOOLS: dict[str, ModelTool] = {"add": JobTool("add", add), "shout": JobTool("shout", shout)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return qwen3_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def served(tokenizer: Tokenizer) -> Environments:
    return Environments(None, tokenizer, "prompt", ChatFormat.load("qwen3", {}, tokenizer), TOOLS)


class Trajectory:
    """Shard's side of an environment, over the token ids of one trajectory."""

    def __init__(self, served: Environments, tokenizer: Tokenizer, row: dict[str, Any]) -> None:
        self.served, self.tokenizer, self.row = served, tokenizer, row
        self.ids: list[int] = self.perform("begin", row)
        self.calls: list[Any] = []

    def perform(self, operation: str, argument: Any) -> Any:
        status, value = self.served.run_operation(1, operation, argument)
        assert status == "ok", value
        return value

    def step(self, turn: str) -> list[Any]:
        ids = self.tokenizer.encode(turn)
        self.ids += ids
        self.calls.append(["step", ids])
        text, *action = self.perform("step", ids)
        assert text == turn
        return self.take(action)

    def result(self, value: Any) -> list[Any]:
        self.calls.append(["result", value])
        return self.take(self.perform("result", value))

    def take(self, action: list[Any]) -> list[Any]:
        if action[0] == "append":
            self.ids += action[1]
            return ["append", self.tokenizer.decode(action[1])]
        return action


def calls(*bodies: Any) -> str:
    texts = (b if isinstance(b, str) else json.dumps(b) for b in bodies)
    return "".join(f"<tool_call>\n{t}\n</tool_call>" for t in texts) + "<|im_end|>"


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def test_turn_without_calls_ends_the_conversation(
    served: Environments, tokenizer: Tokenizer
) -> None:
    t = Trajectory(served, tokenizer, {"prompt": "1+1?"})
    opening = tokenizer.decode(t.ids)
    assert '"name": "add"' in opening and opening.endswith(
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert t.step("2<|im_end|>") == ["done", None]
    assert t.perform("cut", tokenizer.encode("2")) == ["2", None]


def test_prompt_can_be_a_conversation(served: Environments, tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "sure?"},
    ]
    opening = tokenizer.decode(Trajectory(served, tokenizer, {"prompt": messages}).ids)
    assert "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\nsure?<|im_end|>" in opening


def test_calls_of_a_turn_run_in_order_and_are_answered_together(
    served: Environments, tokenizer: Tokenizer
) -> None:
    t = Trajectory(served, tokenizer, {"prompt": "go"})
    two = calls(call("add", a=1, b=2), call("shout", text="hé"))
    assert t.step(two) == ["tool", ["add", {"a": 1, "b": 2}]]
    assert t.result(3) == ["tool", ["shout", "hé"]]
    action, text = t.result("HÉ")
    assert action == "append" and text == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\nHÉ\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert t.step("3<|im_end|>") == ["done", None]


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    ("body", "expected_error"),
    [
        ("{", "could not be read: invalid json"),
        ({"arguments": {}}, "could not be read: missing name"),
        (call("divide", a=1), "there is no tool 'divide'; there are add, shout"),
        (call("add", a=1), "b is missing"),
        (call("add", a=1, b="2"), "b must be of type integer"),
        (call("add", a=True, b=2), "a must be of type integer"),
        (call("add", a=1, b=2, c=3), "there is no c; there are a, b, how"),
        (call("add", a=1, b=2, how="later"), 'how must be one of ["fast", "slow"]'),
        (call("shout"), "text is missing"),
        (call("shout", text="\ud800"), "the arguments cannot be passed on: UnicodeEncodeError"),
        (call("add", a=1, b=10**23), "the arguments cannot be passed on: OverflowError"),
        (call("add", a=1, b=1e300), "the arguments cannot be passed on: OverflowError"),
        (call("add", a=1, b=1.5), "b must be of type integer"),
        (call("div\ud800", **{"\ud800": 1}), "there is no tool 'div\\ud800'"),
        (call("add", a=1, b=2, **{"\ud800": 3}), "there is no ?; there are"),
        ({"name": ["add"], "arguments": 5}, "a call is a name and an object"),
        ("[" * 100_000, "could not be read"),
    ],
)
def test_invalid_call_is_answered_with_its_error(
    served: Environments, tokenizer: Tokenizer, body: Any, expected_error: str
) -> None:
    t = Trajectory(served, tokenizer, {"prompt": "go"})
    action, text = t.step(calls(body))
    assert action == "append" and "error: " in text and expected_error in text
    assert t.step(calls(call("add", a=1, b=2)))[0] == "tool", "the model may try again"


def test_valid_calls_beside_invalid_ones_are_executed(
    served: Environments, tokenizer: Tokenizer
) -> None:
    t = Trajectory(served, tokenizer, {"prompt": "go"})
    assert t.step(calls("{", call("add", a=1, b=2), call("none")))[0] == "tool"
    _, text = t.result(3)
    assert text.index("invalid json") < text.index("\n3\n") < text.index("no tool 'none'")


def test_message_environment_receives_turns_without_calls(tokenizer: Tokenizer) -> None:
    chat = ChatFormat.load("qwen3", {}, tokenizer)
    t = Trajectory(Environments(Guess, tokenizer, "", chat, TOOLS), tokenizer, {"secret": 7})
    assert tokenizer.decode(t.ids).startswith("<|im_start|>system\nguess")
    assert "user\nhigher<|im_end|>" in t.step("<think>\nlow\n</think>\n\n5<|im_end|>")[1]
    assert t.step(calls(call("add", a=5, b=2)))[0] == "tool"
    assert "\n7\n" in t.result(7)[1]
    assert t.step("seven<|im_end|>") == ["tool", ["shout", "seven"]]
    assert "user\nSEVEN?<|im_end|>" in t.result("SEVEN")[1]
    assert t.perform("cut", tokenizer.encode("6")) == ["6", 0.25]
    assert t.step("7<|im_end|>") == ["done", 1.0]


def test_system_prompt_precedes_prompts_that_are_texts(tokenizer: Tokenizer) -> None:
    chat = ChatFormat.load("qwen3", {}, tokenizer)
    served = Environments(None, tokenizer, "extra.question", chat, system="be brief")
    row: dict[str, Any] = {"extra": {"question": "go"}}
    text = tokenizer.decode(Trajectory(served, tokenizer, row).ids)
    assert text.index("system\nbe brief<|im_end|>") < text.index("user\ngo<|im_end|>")
    messages = [{"role": "user", "content": "go"}]
    row = {"extra": {"question": messages}}
    assert "be brief" not in tokenizer.decode(Trajectory(served, tokenizer, row).ids)


def test_lost_conversation_is_restored(tokenizer: Tokenizer) -> None:
    chat = ChatFormat.load("qwen3", {}, tokenizer)
    served = Environments(None, tokenizer, "prompt", chat, TOOLS)
    t = Trajectory(served, tokenizer, {"prompt": "go"})
    t.step(calls(call("add", a=1, b=2)))
    t.result(3)
    before = list(t.ids)
    t.step(calls(call("shout", text="a"), call("add", a=1, b=1)))
    t.result("A")
    again = Environments(None, tokenizer, "prompt", chat, TOOLS)
    assert again.run_operation(1, "restore", [t.row, t.calls, before]) == ("ok", None)
    assert again.run_operation(1, "result", 2) == t.served.run_operation(1, "result", 2)


def test_replay_that_differs_from_the_log_fails(tokenizer: Tokenizer) -> None:
    chat = ChatFormat.load("qwen3", {}, tokenizer)
    t = Trajectory(Environments(None, tokenizer, "prompt", chat), tokenizer, {"prompt": "go"})
    other = Environments(None, tokenizer, "prompt", chat)
    status, why = other.run_operation(1, "restore", [{"prompt": "no"}, [], t.ids])
    assert status == "raised" and "differs from the log" in why


def test_tool_schema_comes_from_the_signature() -> None:
    assert TOOLS["add"].description_for_template == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": "integer"},
                    "how": {"enum": ["fast", "slow"]},
                },
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    }
    assert TOOLS["shout"].parameters == {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
    }

    def find(query: dict[str, Any]) -> None: ...

    find.parameters = {"type": "object", "properties": {"words": {"type": "array"}}}  # type: ignore
    assert JobTool("find", find).parameters["properties"] == {"words": {"type": "array"}}
    assert JobTool("find", find).prepare_input({"words": []}) == {"words": []}


def test_argument_types_follow_json_schema() -> None:
    def find(query: dict[str, Any]) -> None: ...

    find.parameters = {  # type: ignore
        "type": "object",
        "properties": {
            "word": {"type": ["string", "null"]},
            "page": {"anyOf": [{"type": "null"}, {"type": "integer"}]},
            "pages": {"type": "array", "items": {"type": "integer"}},
            "share": {"type": ["integer", "number"]},
            "other": {"type": "any", "items": True},
            "free": True,
        },
    }
    tool = JobTool("find", find)
    accepted: dict[str, Any] = {
        "word": None,
        "page": 3.0,
        "pages": [1, 2.0],
        "share": 3.0,
        "other": [1],
        "free": {},
    }
    assert repr(tool.prepare_input(accepted)) == repr({**accepted, "page": 3, "pages": [1, 2]})
    assert tool.prepare_input({"word": "a"}) == {"word": "a"}
    for invalid_input, expected_error in (
        ({"word": 1}, "word must be of type string or null"),
        ({"pages": [1, 2.5]}, r"pages\[1\] must be of type integer"),
        ({"share": True}, "share must be of type integer or number"),
    ):
        with pytest.raises(InvalidToolCall, match=expected_error):
            tool.prepare_input(invalid_input)


def test_unserializable_value_is_reported_as_an_error(tokenizer: Tokenizer) -> None:
    class InvalidEnvironment(Guess):
        def step(self, text: str) -> Any:
            if text == "raise":
                raise ValueError("\ud800")
            return {"tool": "shout", "input": 1 << 64}

    served = Environments(
        InvalidEnvironment, tokenizer, "", ChatFormat.load("qwen3", {}, tokenizer)
    )
    served.run_operation(1, "begin", {"secret": 1})
    raised = "ValueError: ? (test_sessions.py:"
    for text, expected_error in (("raise", raised), ("x", "BadMessage: OverflowError")):
        status, why = served.run_operation(1, "step", tokenizer.encode(text + "<|im_end|>"))
        assert status == "raised" and expected_error in why


def test_invalid_answer_error_lists_valid_answers(
    tokenizer: Tokenizer,
) -> None:
    class InvalidEnvironment(Guess):
        def step(self, text: str) -> Any:
            return {"done": True, "reward": float("nan")} if text == "nan" else {"append": 5}

    served = Environments(
        InvalidEnvironment, tokenizer, "", ChatFormat.load("qwen3", {}, tokenizer)
    )
    served.run_operation(1, "begin", {"secret": 1})
    for text, expected_error in (
        ("nan", "must be finite"),
        ("x", "messages must be a text or a list"),
    ):
        status, why = served.run_operation(1, "step", tokenizer.encode(text + "<|im_end|>"))
        assert status == "raised" and expected_error in why
    without_chat = Environments(Guess, tokenizer, "")
    status, why = without_chat.run_operation(1, "begin", {"secret": 1})
    assert status == "raised" and "environment.chat" in why


def test_only_the_prompt_starts_with_a_bos_token(tmp_path: Path) -> None:
    class Asks:
        def open(self, row: dict[str, Any]) -> str:
            return "what is it?"

        def step(self, text: str) -> dict[str, Any]:
            return {"append": "again"}

        def close(self) -> None: ...

    bos = byte_tokenizer(tmp_path, "<s> $A").token_to_id("<s>")
    assert bos is not None
    tokenizer = Tokenizer.load(tmp_path)
    t = Trajectory(Environments(Asks, tokenizer, ""), tokenizer, {})
    assert t.ids == [bos, *tokenizer.encode("what is it?")]
    assert t.step("so") == ["append", "again"]
    assert t.ids.count(bos) == 1


@pytest.mark.parametrize("name", ["llama-3", "mistral", "qwen2.5"])
def test_models_chat_template_supports_tool_calls_and_errors(tmp_path: Path, name: str) -> None:
    own = Tokenizer.load(directory_of(FORMATS[name], tmp_path))
    chat = ChatFormat.load("template", {}, own)
    end = chat.stop_tokens[0]

    def format_turn(*tool_calls: dict[str, Any]) -> str:
        if name == "qwen2.5":
            return calls(*tool_calls).replace("<|im_end|>", end)
        if name == "mistral":
            return "[TOOL_CALLS]" + json.dumps(tool_calls) + end
        return json.dumps(tool_calls[0]).replace("arguments", "parameters") + end

    messages = [{"role": "system", "content": "sum"}, {"role": "user", "content": "1+2?"}]
    t = Trajectory(Environments(None, own, "prompt", chat, TOOLS), own, {"prompt": messages})
    assert "1+2?" in own.decode(t.ids) and "Adds two" in own.decode(t.ids)
    assert t.step(format_turn(call("add", a=1, b=2))) == ["tool", ["add", {"a": 1, "b": 2}]]
    action, text = t.result(3)
    assert action == "append" and "3" in text
    action, text = t.step(format_turn(call("add", a="x", b=2)))
    assert action == "append" and "error" in text
    action, text = t.step(format_turn(call("sub", a=1, b=2)))
    assert action == "append" and "there is no tool" in text
    assert t.step("3" + end) == ["done", None]
    again = Environments(None, own, "prompt", chat, TOOLS)
    assert again.run_operation(1, "restore", [t.row, t.calls, t.ids]) == ("ok", None)
