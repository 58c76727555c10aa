"""One trajectory's environment inside an environment process: token ids in, actions out.

What a session answers is what the shard acts on: `["tool", [name, input]]`, `["append", ids]` or
`["done", score]`, the score None when it is left to the job's reward.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from common.environment.framing import encodable, packed
from common.errors import BadMessage
from common.model.chat import Chat, Conversation, Message, ParsedCall
from common.model.tokenizer import Tokenizer
from services.environment.tools import BadCall, BuiltIn

Action = list[Any]


class Session(Protocol):
    def begin(self, row: dict[str, Any]) -> list[int]:
        """Opens the environment; the prompt's ids."""

    def answer(self, value: Any) -> list[int]:
        """The ids of a turn that is given, right after `begin`."""

    def step(self, ids: list[int]) -> Action:
        """After a turn of the model: the turn's text, then the action."""

    def result(self, value: Any) -> Action:
        """After a tool's value."""

    def cut(self, ids: list[int]) -> float | None:
        """The score of a trajectory that ends before the environment does, in mid-turn (with the
        ids of that turn) or not.
        """

    def check(self, ids: list[int]) -> None:
        """After a replay: raises unless the trajectory began with these ids, which were logged."""

    def close(self) -> None: ...


class TextSession:
    """An environment that speaks text: turns are decoded, only what it appends is encoded.

    `quotes`: special tokens in its texts are text. `ends`: tokens that may end an answer.
    """

    def __init__(
        self,
        environment: Any,
        tokenizer: Tokenizer,
        *,
        quotes: bool = True,
        ends: Sequence[str] = (),
    ) -> None:
        self._environment, self._tokenizer = environment, tokenizer
        self._quotes, self._ends = quotes, ends

    def begin(self, row: dict[str, Any]) -> list[int]:
        text = self._environment.open(row)
        if not isinstance(text, str):
            raise TypeError(
                f"open() returned {type(text).__name__}, not the prompt as str; messages take "
                "environment.chat"
            )
        return self._tokenizer.begin(text, quote=self._quotes)

    def answer(self, value: Any) -> list[int]:
        if not isinstance(value, str):
            raise TypeError(f"an answer is str, not {type(value).__name__}")
        end = max((end for end in self._ends if value.endswith(end)), key=len, default="")
        return self._encode(value.removesuffix(end), end)

    def step(self, ids: list[int]) -> Action:
        text = self._tokenizer.decode(ids)
        return [text, *self._action(self._environment.step(text))]

    def result(self, value: Any) -> Action:
        return self._action(self._environment.result(value))

    def cut(self, ids: list[int]) -> float | None:
        return scored(self._environment, self._tokenizer.decode(ids))

    def check(self, ids: list[int]) -> None:
        return None

    def close(self) -> None:
        self._environment.close()

    def _encode(self, text: str, end: str = "") -> list[int]:
        """The ids of the author's text, and of the token that ends it."""
        quoted = self._tokenizer.quote(text) if self._quotes else text
        return self._tokenizer.encode(quoted + end)

    def _action(self, action: Any) -> Action:
        if isinstance(action, dict) and isinstance(action.get("append"), str):
            return ["append", self._encode(action["append"])]
        return plain(action, "str")


class ChatSession:
    """An environment that speaks messages, in the model's own chat format.

    Calls that the model writes go to the job's tools one by one; their values, and what is wrong
    with calls that cannot be made, come back as tool messages. The environment sees turns without
    calls: `step` and `cut` get what the model said, without its reasoning and the format's own
    tokens.
    """

    def __init__(
        self, environment: Any, chat: Chat, tools: dict[str, BuiltIn], tokenizer: Tokenizer
    ) -> None:
        self._environment, self._chat, self._tools = environment, chat, tools
        self._tokenizer = tokenizer
        self._conversation: Conversation | None = None
        self._opening: tuple[list[Message], Any] = ([], [])
        self._waiting: deque[ParsedCall] = deque()
        self._calling: ParsedCall | None = None  # the call whose value the shard will bring
        self._answers: list[Message] = []

    @property
    def conversation(self) -> Conversation:
        if self._conversation is None:
            raise RuntimeError("the environment has not been opened")
        return self._conversation

    def begin(self, row: dict[str, Any]) -> list[int]:
        opened: Any = self._environment.open(row)
        specs: Any = [tool.spec for tool in self._tools.values()]
        if isinstance(opened, dict):
            opened, specs = opened.get("messages"), opened.get("tools", specs)
        self._opening = as_messages(opened), specs
        self._conversation = self._chat.begin(*self._opening)
        return self._conversation.ids

    def answer(self, value: Any) -> list[int]:
        message = {"content": value} if isinstance(value, str) else dict(value)
        messages, specs = self._opening
        return self._chat.answer(messages, {"role": "assistant"} | message, specs)

    def step(self, ids: list[int]) -> Action:
        reply = self.conversation.sampled(ids)
        text = self._tokenizer.decode(ids)
        if not reply.calls:
            return [text, *self._action(self._environment.step(reply.content))]
        self._waiting, self._answers = deque(reply.calls), []
        return [text, *self._next_call()]

    def result(self, value: Any) -> Action:
        if self._calling is None:
            return self._action(self._environment.result(value))
        content = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        self._answer(self._calling, content)
        return self._next_call()

    def cut(self, ids: list[int]) -> float | None:
        said = self.conversation.sampled(ids).content if ids else ""
        return scored(self._environment, said)

    def check(self, ids: list[int]) -> None:
        if self.conversation.ids[: len(ids)] != ids:
            raise RuntimeError("a replay of the environment differs from what was logged")

    def close(self) -> None:
        self._environment.close()

    def _next_call(self) -> Action:
        while self._waiting:
            call = self._waiting.popleft()
            try:
                value = self._input(call)
            except BadCall as problem:
                self._answer(call, f"error: {problem}")
                continue
            self._calling = call
            return ["tool", [call.name, value]]
        self._calling = None
        return ["append", self.conversation.extend(self._answers)]

    def _input(self, call: ParsedCall) -> Any:
        if call.problem:
            raise BadCall(f"the call could not be read: {call.problem}")
        if call.name not in self._tools:
            known = ", ".join(self._tools) or "none"
            raise BadCall(f"there is no tool {call.name!r}; there are {known}")
        value = self._tools[call.name].input(call.arguments)
        try:
            packed(value)
        except BadMessage as error:
            raise BadCall(f"the arguments cannot be passed on: {error}") from error
        return value

    def _answer(self, call: ParsedCall, content: str) -> None:
        message = {"role": "tool", "tool_call_id": call.id, "content": encodable(content)}
        self._answers.append(message | ({"name": encodable(call.name)} if call.name else {}))

    def _action(self, action: Any) -> Action:
        if isinstance(action, dict) and action.get("append"):
            return ["append", self.conversation.extend(as_messages(action["append"]))]
        return plain(action, "str or messages")


def as_messages(value: Any) -> list[Message]:
    """Messages as they are; a text is what the user says."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, Sequence) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in value
    ):
        raise TypeError(f"messages are a list of {{'role', 'content'}}, not {value!r:.80}")
    return list(value)


def plain(action: Any, appended: str) -> Action:
    """An action that needs no encoding."""
    if isinstance(action, dict):
        if isinstance(action.get("tool"), str):
            return ["tool", [action["tool"], action.get("input")]]
        if action.get("done") is True:
            return ["done", score(action.get("reward"))]
    raise TypeError(
        "an environment answers {'tool': name, 'input': x}, "
        f"{{'append': {appended}}} or {{'done': True}}"
    )


def scored(environment: Any, text: str) -> float | None:
    """What an environment of the author's gives a trajectory that is cut; most leave it open."""
    cut = getattr(environment, "cut", None)
    return None if cut is None else score(cut(text))


def score(value: Any) -> float | None:
    """A finite number as the reward of a trajectory; None stays None."""
    if value is None:
        return None
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"a reward must be finite, not {value!r}")
    return number
