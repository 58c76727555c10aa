"""Chat environments: calls go to tools one by one, and what is wrong with them to the model."""

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
    """A user who says higher or lower until the model has guessed it."""

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
    """What a shard does with an environment's answers, over one trajectory's ids."""

    def __init__(self, served: Environments, tokenizer: Tokenizer, row: dict[str, Any]) -> None:
        self.served, self.tokenizer, self.row = served, tokenizer, row
        self.ids: list[int] = self.perform("begin", row)
        self.told: list[Any] = []

    def perform(self, operation: str, argument: Any) -> Any:
        status, value = self.served.run_operation(1, operation, argument)
        assert status == "ok", value
        return value

    def step(self, said: str) -> list[Any]:
        ids = self.tokenizer.encode(said)
        self.ids += ids
        self.told.append(["step", ids])
        text, *action = self.perform("step", ids)
        assert text == said
        return self.take(action)

    def result(self, value: Any) -> list[Any]:
        self.told.append(["result", value])
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


def test_a_turn_without_calls_ends_the_conversation(
    served: Environments, tokenizer: Tokenizer
) -> None:
    t = Trajectory(served, tokenizer, {"prompt": "1+1?"})
    opening = tokenizer.decode(t.ids)
    assert '"name": "add"' in opening and opening.endswith(
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert t.step("2<|im_end|>") == ["done", None]
    assert t.perform("cut", tokenizer.encode("2")) == ["2", None]


def test_a_prompt_may_be_a_conversation(served: Environments, tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "sure?"},
    ]
    opening = tokenizer.decode(Trajectory(served, tokenizer, {"prompt": messages}).ids)
    assert "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\nsure?<|im_end|>" in opening


def test_the_calls_of_a_turn_are_made_one_after_another_and_answered_together(
    served: Environments, tokenizer: Tokenizer
) -> None:
    t = Trajectory(served, tokenizer, {"prompt": "go"})
    two = calls(call("add", a=1, b=2), call("shout", text="hé"))
    assert t.step(two) == ["tool", ["add", {"a": 1, "b": 2}]]
    assert t.result(3) == ["tool", ["shout", "hé"]]
    action, said = t.result("HÉ")
    assert action == "append" and said == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\nHÉ\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert t.step("3<|im_end|>") == ["done", None]


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    ("body", "says"),
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
def test_a_call_that_cannot_be_made_is_answered_with_what_is_wrong(
    served: Environments, tokenizer: Tokenizer, body: Any, says: str
) -> None:
    t = Trajectory(served, tokenizer, {"prompt": "go"})
    action, said = t.step(calls(body))
    assert action == "append" and "error: " in said and says in said
    assert t.step(calls(call("add", a=1, b=2)))[0] == "tool", "the model may try again"


def test_good_calls_beside_bad_ones_are_made(served: Environments, tokenizer: Tokenizer) -> None:
    t = Trajectory(served, tokenizer, {"prompt": "go"})
    assert t.step(calls("{", call("add", a=1, b=2), call("none")))[0] == "tool"
    _, said = t.result(3)
    assert said.index("invalid json") < said.index("\n3\n") < said.index("no tool 'none'")


def test_an_environment_of_messages_sees_turns_without_calls(tokenizer: Tokenizer) -> None:
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


def test_a_lost_conversation_goes_on_where_it_was(tokenizer: Tokenizer) -> None:
    chat = ChatFormat.load("qwen3", {}, tokenizer)
    served = Environments(None, tokenizer, "prompt", chat, TOOLS)
    t = Trajectory(served, tokenizer, {"prompt": "go"})
    t.step(calls(call("add", a=1, b=2)))
    t.result(3)
    before = list(t.ids)
    t.step(calls(call("shout", text="a"), call("add", a=1, b=1)))
    t.result("A")
    again = Environments(None, tokenizer, "prompt", chat, TOOLS)
    assert again.run_operation(1, "restore", [t.row, t.told, before]) == ("ok", None)
    assert again.run_operation(1, "result", 2) == t.served.run_operation(1, "result", 2)


def test_a_replay_that_differs_from_what_was_logged_fails(tokenizer: Tokenizer) -> None:
    chat = ChatFormat.load("qwen3", {}, tokenizer)
    t = Trajectory(Environments(None, tokenizer, "prompt", chat), tokenizer, {"prompt": "go"})
    other = Environments(None, tokenizer, "prompt", chat)
    status, why = other.run_operation(1, "restore", [{"prompt": "no"}, [], t.ids])
    assert status == "raised" and "differs from what was logged" in why


def test_tools_are_described_by_their_signature() -> None:
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


def test_types_are_as_json_schema_has_them() -> None:
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
    taken: dict[str, Any] = {
        "word": None,
        "page": 3.0,
        "pages": [1, 2.0],
        "share": 3.0,
        "other": [1],
        "free": {},
    }
    assert repr(tool.prepare_input(taken)) == repr({**taken, "page": 3, "pages": [1, 2]})
    assert tool.prepare_input({"word": "a"}) == {"word": "a"}
    for refused, says in (
        ({"word": 1}, "word must be of type string or null"),
        ({"pages": [1, 2.5]}, r"pages\[1\] must be of type integer"),
        ({"share": True}, "share must be of type integer or number"),
    ):
        with pytest.raises(InvalidToolCall, match=says):
            tool.prepare_input(refused)


def test_what_cannot_travel_is_told_and_not_sent(tokenizer: Tokenizer) -> None:
    class Odd(Guess):
        def step(self, text: str) -> Any:
            if text == "raise":
                raise ValueError("\ud800")
            return {"tool": "shout", "input": 1 << 64}

    served = Environments(Odd, tokenizer, "", ChatFormat.load("qwen3", {}, tokenizer))
    served.run_operation(1, "begin", {"secret": 1})
    raised = "ValueError: ? (test_sessions.py:"
    for text, says in (("raise", raised), ("x", "BadMessage: OverflowError")):
        status, why = served.run_operation(1, "step", tokenizer.encode(text + "<|im_end|>"))
        assert status == "raised" and says in why


def test_an_environment_that_answers_nonsense_is_told_what_it_may_answer(
    tokenizer: Tokenizer,
) -> None:
    class Odd(Guess):
        def step(self, text: str) -> Any:
            return {"done": True, "reward": float("nan")} if text == "nan" else {"append": 5}

    served = Environments(Odd, tokenizer, "", ChatFormat.load("qwen3", {}, tokenizer))
    served.run_operation(1, "begin", {"secret": 1})
    for text, says in (("nan", "must be finite"), ("x", "messages are a text or a list")):
        status, why = served.run_operation(1, "step", tokenizer.encode(text + "<|im_end|>"))
        assert status == "raised" and says in why
    plain = Environments(Guess, tokenizer, "")
    status, why = plain.run_operation(1, "begin", {"secret": 1})
    assert status == "raised" and "environment.chat" in why


def test_text_begins_with_the_beginning_of_text_and_goes_on_without(tmp_path: Path) -> None:
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
def test_a_models_own_template_calls_tools_and_is_told_what_was_wrong(
    tmp_path: Path, name: str
) -> None:
    own = Tokenizer.load(directory_of(FORMATS[name], tmp_path))
    chat = ChatFormat.load("template", {}, own)
    end = chat.stop_tokens[0]

    def said(*written: dict[str, Any]) -> str:
        if name == "qwen2.5":
            return calls(*written).replace("<|im_end|>", end)
        if name == "mistral":
            return "[TOOL_CALLS]" + json.dumps(written) + end
        return json.dumps(written[0]).replace("arguments", "parameters") + end

    messages = [{"role": "system", "content": "sum"}, {"role": "user", "content": "1+2?"}]
    t = Trajectory(Environments(None, own, "prompt", chat, TOOLS), own, {"prompt": messages})
    assert "1+2?" in own.decode(t.ids) and "Adds two" in own.decode(t.ids)
    assert t.step(said(call("add", a=1, b=2))) == ["tool", ["add", {"a": 1, "b": 2}]]
    action, told = t.result(3)
    assert action == "append" and "3" in told
    action, told = t.step(said(call("add", a="x", b=2)))
    assert action == "append" and "error" in told
    action, told = t.step(said(call("sub", a=1, b=2)))
    assert action == "append" and "there is no tool" in told
    assert t.step("3" + end) == ["done", None]
    again = Environments(None, own, "prompt", chat, TOOLS)
    assert again.run_operation(1, "restore", [t.row, t.told, t.ids]) == ("ok", None)
