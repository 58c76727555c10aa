"""One trajectory's environment inside an environment process: token ids in, actions out.

The shard acts on the answers of a session: `["tool", [name, input]]`, `["append", ids]`, `["done",
score]`, or `["last", [ids, score]]` for an end with a last observation. The score is a number, or
with metrics as in `reward_numbers`, and None when it is left to the job's reward.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from meshrl.common.base.errors import BadMessage
from meshrl.common.environment.framing import pack_message, replace_surrogates
from meshrl.common.model.chat.chat_format import ChatConversation, ChatFormat, ParsedToolCall
from meshrl.common.model.chat.messages import Message, parse_conversation, parse_message
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.services.environment.answers import InvalidAnswer, call_environment, call_for_reward
from meshrl.services.environment.model_tools import InvalidToolCall, ModelTool

Action = list[Any]
MAX_PIECES_IN_ERROR = 5  # pieces of a text that an error shows


class EnvironmentSession(ABC):
    """Environment of one trajectory, which exchanges text or messages."""

    def __init__(self, environment: Any, tokenizer: Tokenizer) -> None:
        self._environment, self._tokenizer = environment, tokenizer

    @abstractmethod
    def start(self, row: dict[str, Any]) -> list[int]:
        """Open the environment and return the prompt's ids."""

    @abstractmethod
    def encode_answer(self, value: Any) -> list[int]:
        """Return the ids of a supervised turn, right after `start`."""

    @abstractmethod
    def step(self, ids: list[int]) -> Action:
        """Return the action that follows a turn of the model."""

    def result(self, value: Any) -> Action:
        """Return the action that follows a tool's value."""
        return self._call_for_action(self._environment.result, value)

    def truncate(self, ids: list[int]) -> Any:
        """Return the score of a trajectory that ends before its environment does; most leave it
        open.

        The ids are those of the unfinished turn, if there is one.
        """
        cut = getattr(self._environment, "cut", None)
        return None if cut is None else call_for_reward(cut, self._decode_turn(ids))

    def check_replay(self, ids: list[int]) -> None:
        """Raise unless a replayed trajectory begins with these logged ids."""
        return None

    def close(self) -> None:
        self._environment.close()

    @abstractmethod
    def _decode_turn(self, ids: list[int]) -> str:
        """Decode a turn for the environment."""

    @abstractmethod
    def _encode_append(self, value: Any, function: Any) -> list[int]:
        """Return the ids of what the environment's function appends; InvalidAnswer for an invalid
        value.
        """

    def _call_for_action(self, function: Callable[..., Any], argument: Any) -> Action:
        """Call a function of the environment and return the action that its answer requests."""
        answer = call_environment(function, argument)
        if answer.tool:
            return ["tool", [answer.tool, answer.input]]
        ids = None if answer.append is None else self._encode_append(answer.append, function)
        if not answer.done:
            return ["append", ids]
        return ["done", answer.reward] if ids is None else ["last", [ids, answer.reward]]


class TextSession(EnvironmentSession):
    """Environment that exchanges text: turns are decoded, and only what it appends is encoded.

    `quotes`: special tokens in its texts are text. `ends`: tokens that may end an answer.
    """

    def __init__(
        self,
        environment: Any,
        tokenizer: Tokenizer,
        *,
        escapes_special_tokens: bool,
        end_tokens: Sequence[str],
    ) -> None:
        super().__init__(environment, tokenizer)
        self._escapes_special_tokens, self._end_tokens = escapes_special_tokens, end_tokens

    def start(self, row: dict[str, Any]) -> list[int]:
        text = self._environment.open(row)
        if not isinstance(text, str):
            problem = f"open() returned {type(text).__name__}, but the prompt must be a str"
            raise InvalidAnswer(
                f"{problem}; set environment.chat to use messages", self._environment.open
            )
        check_encodable(self._tokenizer, text, self._environment.open)
        return self._tokenizer.encode_start(text, escape=self._escapes_special_tokens)

    def encode_answer(self, value: Any) -> list[int]:
        if not isinstance(value, str):
            raise TypeError(f"an answer must be a str, not {type(value).__name__}")
        end = max((end for end in self._end_tokens if value.endswith(end)), key=len, default="")
        return self._encode(value.removesuffix(end), end)

    def step(self, ids: list[int]) -> Action:
        text = self._tokenizer.decode(ids)
        return [text, *self._call_for_action(self._environment.step, text)]

    def _decode_turn(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)

    def _encode(self, text: str, end: str = "") -> list[int]:
        """Return the ids of the author's text, and of the token that ends it."""
        quoted = self._tokenizer.escape(text) if self._escapes_special_tokens else text
        return self._tokenizer.encode(quoted + end)

    def _encode_append(self, value: Any, function: Any) -> list[int]:
        if not isinstance(value, str):
            problem = f"{function.__name__}() appends {value!r:.80}, but must append a str"
            raise InvalidAnswer(f"{problem}; set environment.chat to use messages", function)
        return self._encode(value)


class ChatSession(EnvironmentSession):
    """Environment that exchanges messages, in the model's own chat format.

    The session sends calls that the model writes to the job's tools, one by one. Their values, and
    the errors of invalid calls, return as tool messages. The environment receives turns without
    calls: `step` and `truncate` get the model's text, without its reasoning and the format's own
    tokens.
    """

    def __init__(
        self, environment: Any, chat: ChatFormat, tools: dict[str, ModelTool], tokenizer: Tokenizer
    ) -> None:
        super().__init__(environment, tokenizer)
        self._chat, self._tools = chat, tools
        self._conversation: ChatConversation | None = None
        self._prompt: tuple[list[Message], Any] = ([], [])
        self._pending_calls: deque[ParsedToolCall] = deque()
        self._current_call: ParsedToolCall | None = None  # the call whose value the shard will send
        self._tool_messages: list[Message] = []

    @property
    def conversation(self) -> ChatConversation:
        if self._conversation is None:
            raise RuntimeError("the environment is not open")
        return self._conversation

    def start(self, row: dict[str, Any]) -> list[int]:
        opened: Any = self._environment.open(row)
        specs: Any = [tool.description_for_template for tool in self._tools.values()]
        try:
            if isinstance(opened, dict):
                opened, specs = split_opening(opened, specs)
            self._prompt = parse_conversation(opened), specs
        except ValueError as error:
            problem = f"the prompt is not a valid conversation: {error}"
            raise InvalidAnswer(problem, self._environment.open) from None
        for message in self._prompt[0]:
            check_encodable(self._tokenizer, message["content"], self._environment.open)
        self._conversation = self._chat.start_conversation(*self._prompt)
        return self._conversation.ids

    def encode_answer(self, value: Any) -> list[int]:
        message = {"content": value} if isinstance(value, str) else value
        if isinstance(message, dict):
            message = {"role": "assistant"} | message
        messages, specs = self._prompt
        answer = parse_message(message, "the answer", ("assistant",))
        return self._chat.encode_answer(messages, answer, specs)

    def step(self, ids: list[int]) -> Action:
        reply = self.conversation.append_turn(ids)
        text = self._tokenizer.decode(ids)
        if not reply.calls:
            return [text, *self._call_for_action(self._environment.step, reply.content)]
        self._pending_calls, self._tool_messages = deque(reply.calls), []
        return [text, *self._start_next_call()]

    def result(self, value: Any) -> Action:
        if self._current_call is None:
            return super().result(value)
        content = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        self._add_tool_message(self._current_call, content)
        return self._start_next_call()

    def _decode_turn(self, ids: list[int]) -> str:
        return self.conversation.append_turn(ids).content if ids else ""

    def check_replay(self, ids: list[int]) -> None:
        if self.conversation.ids[: len(ids)] != ids:
            raise RuntimeError("a replay of the environment differs from the log")

    def _start_next_call(self) -> Action:
        while self._pending_calls:
            self._current_call = self._pending_calls.popleft()
            try:
                return ["tool", [self._current_call.name, self._prepare_input(self._current_call)]]
            except InvalidToolCall as problem:
                self._add_tool_message(self._current_call, f"error: {problem}")
        self._current_call = None
        return ["append", self.conversation.append_messages(self._tool_messages)]

    def _prepare_input(self, call: ParsedToolCall) -> Any:
        if call.problem:
            raise InvalidToolCall(f"the call could not be read: {call.problem}")
        if call.name not in self._tools:
            known = ", ".join(self._tools) or "none"
            raise InvalidToolCall(f"there is no tool {call.name!r}; there are {known}")
        value = self._tools[call.name].prepare_input(call.arguments)
        try:
            pack_message(value)
        except BadMessage as error:
            raise InvalidToolCall(f"the arguments cannot be passed on: {error}") from error
        return value

    def _add_tool_message(self, call: ParsedToolCall, content: str) -> None:
        message = {"role": "tool", "tool_call_id": call.id, "content": replace_surrogates(content)}
        self._tool_messages.append(
            message | ({"name": replace_surrogates(call.name)} if call.name else {})
        )

    def _encode_append(self, value: Any, function: Any) -> list[int]:
        try:
            messages = parse_conversation(value)
        except ValueError as error:
            problem = f"{function.__name__}() appends invalid messages: {error}"
            raise InvalidAnswer(problem, function) from None
        return self.conversation.append_messages(messages)


def check_encodable(tokenizer: Tokenizer, prompt: str, function: Any) -> None:
    """Raise InvalidAnswer when the tokenizer would drop some characters of a prompt."""
    if lost := tokenizer.find_lossy_pieces(prompt):
        some = ", ".join(map(repr, lost[:MAX_PIECES_IN_ERROR]))
        problem = f"the tokenizer drops or replaces {some} of the prompt {prompt!r:.80}"
        raise InvalidAnswer(problem, function)


def split_opening(opened: dict[str, Any], specs: list[Message]) -> tuple[Any, list[Message]]:
    """Return messages and tools of an `open` that has both, or its messages and the job's tools."""
    if unknown := [key for key in opened if key not in ("messages", "tools")]:
        raise ValueError(f"there is no key {unknown[0]!r}; there are 'messages' and 'tools'")
    tools = specs if opened.get("tools") is None else opened["tools"]
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"'tools' must be a list of JSON schemas of functions, not {tools!r:.80}")
    return opened.get("messages"), list(tools)
