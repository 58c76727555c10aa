"""One trajectory's environment inside an environment process: token ids in, actions out.

What a session answers is what the shard acts on: `["tool", [name, input]]`, `["append", ids]`,
`["done", score]`, or `["last", [ids, score]]` for an end with a last observation. The score is None
when it is left to the job's reward.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from meshrl.common.base.errors import BadMessage
from meshrl.common.environment.framing import encodable, packed
from meshrl.common.model.chat.chat import Chat, ChatConversation, ParsedCall
from meshrl.common.model.chat.messages import Message, conversation_of, message_of
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.services.environment.actions import BadAnswer, call_for_answer, score
from meshrl.services.environment.tools import BadCall, BuiltIn

Action = list[Any]
SHOWN = 5  # pieces of a text that an error names


class EnvironmentSession(ABC):
    """One trajectory's environment, which speaks text or messages."""

    def __init__(self, environment: Any, tokenizer: Tokenizer) -> None:
        self._environment, self._tokenizer = environment, tokenizer

    @abstractmethod
    def begin(self, row: dict[str, Any]) -> list[int]:
        """Opens the environment; the prompt's ids."""

    @abstractmethod
    def answer(self, value: Any) -> list[int]:
        """The ids of a turn that is given, right after `begin`."""

    @abstractmethod
    def step(self, ids: list[int]) -> Action:
        """After a turn of the model: the turn's text, then the action."""

    def result(self, value: Any) -> Action:
        """After a tool's value."""
        return self._action(self._environment.result, value)

    def cut(self, ids: list[int]) -> float | None:
        """The score of a trajectory that ends before the environment does, in mid-turn (with the
        ids of that turn) or not; most environments leave it open.
        """
        cut = getattr(self._environment, "cut", None)
        return None if cut is None else score(cut, self._said(ids))

    def check(self, ids: list[int]) -> None:
        """After a replay: raises unless the trajectory began with these ids, which were logged."""
        return None

    def close(self) -> None:
        self._environment.close()

    @abstractmethod
    def _said(self, ids: list[int]) -> str:
        """What the environment sees of a turn."""

    @abstractmethod
    def _appended(self, value: Any, function: Any) -> list[int]:
        """The ids of what the environment's function appends; BadAnswer if it is none."""

    def _action(self, function: Callable[..., Any], argument: Any) -> Action:
        """What the shard is to do, by the answer of a function of the environment's."""
        answer = call_for_answer(function, argument)
        if answer.tool:
            return ["tool", [answer.tool, answer.input]]
        ids = None if answer.append is None else self._appended(answer.append, function)
        if not answer.done:
            return ["append", ids]
        return ["done", answer.reward] if ids is None else ["last", [ids, answer.reward]]


class TextSession(EnvironmentSession):
    """An environment that speaks text: turns are decoded, only what it appends is encoded.

    `quotes`: special tokens in its texts are text. `ends`: tokens that may end an answer.
    """

    def __init__(
        self, environment: Any, tokenizer: Tokenizer, *, quotes: bool, ends: Sequence[str]
    ) -> None:
        super().__init__(environment, tokenizer)
        self._quotes, self._ends = quotes, ends

    def begin(self, row: dict[str, Any]) -> list[int]:
        text = self._environment.open(row)
        if not isinstance(text, str):
            said = f"open() returned {type(text).__name__}, not the prompt as str"
            raise BadAnswer(f"{said}; messages take environment.chat", self._environment.open)
        check_written(self._tokenizer, text, self._environment.open)
        return self._tokenizer.begin(text, quote=self._quotes)

    def answer(self, value: Any) -> list[int]:
        if not isinstance(value, str):
            raise TypeError(f"an answer is str, not {type(value).__name__}")
        end = max((end for end in self._ends if value.endswith(end)), key=len, default="")
        return self._encode(value.removesuffix(end), end)

    def step(self, ids: list[int]) -> Action:
        text = self._tokenizer.decode(ids)
        return [text, *self._action(self._environment.step, text)]

    def _said(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)

    def _encode(self, text: str, end: str = "") -> list[int]:
        """The ids of the author's text, and of the token that ends it."""
        quoted = self._tokenizer.quote(text) if self._quotes else text
        return self._tokenizer.encode(quoted + end)

    def _appended(self, value: Any, function: Any) -> list[int]:
        if not isinstance(value, str):
            said = f"{function.__name__}() appends {value!r:.80}, not a str"
            raise BadAnswer(f"{said}; messages take environment.chat", function)
        return self._encode(value)


class ChatSession(EnvironmentSession):
    """An environment that speaks messages, in the model's own chat format.

    Calls that the model writes go to the job's tools one by one; their values, and what is wrong
    with calls that cannot be made, come back as tool messages. The environment sees turns without
    calls: `step` and `cut` get what the model said, without its reasoning and the format's own
    tokens.
    """

    def __init__(
        self, environment: Any, chat: Chat, tools: dict[str, BuiltIn], tokenizer: Tokenizer
    ) -> None:
        super().__init__(environment, tokenizer)
        self._chat, self._tools = chat, tools
        self._conversation: ChatConversation | None = None
        self._opening: tuple[list[Message], Any] = ([], [])
        self._waiting: deque[ParsedCall] = deque()
        self._calling: ParsedCall | None = None  # the call whose value the shard will bring
        self._answers: list[Message] = []

    @property
    def conversation(self) -> ChatConversation:
        if self._conversation is None:
            raise RuntimeError("the environment has not been opened")
        return self._conversation

    def begin(self, row: dict[str, Any]) -> list[int]:
        opened: Any = self._environment.open(row)
        specs: Any = [tool.spec for tool in self._tools.values()]
        try:
            if isinstance(opened, dict):
                opened, specs = parts_of(opened, specs)
            self._opening = conversation_of(opened), specs
        except ValueError as error:
            said = f"the prompt is none that a chat takes: {error}"
            raise BadAnswer(said, self._environment.open) from None
        for message in self._opening[0]:
            check_written(self._tokenizer, message["content"], self._environment.open)
        self._conversation = self._chat.begin(*self._opening)
        return self._conversation.ids

    def answer(self, value: Any) -> list[int]:
        message = {"content": value} if isinstance(value, str) else value
        if isinstance(message, dict):
            message = {"role": "assistant"} | message
        messages, specs = self._opening
        said = message_of(message, "the answer", ("assistant",))
        return self._chat.answer(messages, said, specs)

    def step(self, ids: list[int]) -> Action:
        reply = self.conversation.sampled(ids)
        text = self._tokenizer.decode(ids)
        if not reply.calls:
            return [text, *self._action(self._environment.step, reply.content)]
        self._waiting, self._answers = deque(reply.calls), []
        return [text, *self._next_call()]

    def result(self, value: Any) -> Action:
        if self._calling is None:
            return super().result(value)
        content = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        self._answer(self._calling, content)
        return self._next_call()

    def _said(self, ids: list[int]) -> str:
        return self.conversation.sampled(ids).content if ids else ""

    def check(self, ids: list[int]) -> None:
        if self.conversation.ids[: len(ids)] != ids:
            raise RuntimeError("a replay of the environment differs from what was logged")

    def _next_call(self) -> Action:
        while self._waiting:
            self._calling = self._waiting.popleft()
            try:
                return ["tool", [self._calling.name, self._input(self._calling)]]
            except BadCall as problem:
                self._answer(self._calling, f"error: {problem}")
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

    def _appended(self, value: Any, function: Any) -> list[int]:
        try:
            messages = conversation_of(value)
        except ValueError as error:
            said = f"{function.__name__}() appends no messages: {error}"
            raise BadAnswer(said, function) from None
        return self.conversation.extend(messages)


def check_written(tokenizer: Tokenizer, prompt: str, function: Any) -> None:
    """BadAnswer when a prompt would be trained without some of its characters."""
    if lost := tokenizer.lost(prompt):
        some = ", ".join(map(repr, lost[:SHOWN]))
        said = f"the tokenizer drops or replaces {some} of the prompt {prompt!r:.80}"
        raise BadAnswer(said, function)


def parts_of(opened: dict[str, Any], specs: list[Message]) -> tuple[Any, list[Message]]:
    """Messages and tools of an `open` that returns both, or its messages and the job's tools."""
    if unknown := [key for key in opened if key not in ("messages", "tools")]:
        raise ValueError(f"there is no key {unknown[0]!r}; there are 'messages' and 'tools'")
    tools = specs if opened.get("tools") is None else opened["tools"]
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"tools are a list of JSON schemas of functions, not {tools!r:.80}")
    return opened.get("messages"), list(tools)
