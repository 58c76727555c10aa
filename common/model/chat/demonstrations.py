"""Demonstrations: conversations in rows of a dataset, whose assistant messages are learned."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from meshrl.common.model.chat.chat_format import ChatFormat
from meshrl.common.model.chat.messages import (
    ROLES,
    InvalidMessages,
    Message,
    parse_conversation,
)

MESSAGES_KEY, TOOLS_KEY = "messages", "tools"  # keys of a row
LAST = "last"  # only the last message of the assistant is learned
EncodedPiece = tuple[list[int], bool]  # token ids, and True if they are learned


def is_demonstration(row: Mapping[str, Any], answer: Any) -> bool:
    """Return True if a row has a conversation to learn, and no `answer` of its own."""
    return answer is None and isinstance(row.get(MESSAGES_KEY), list)


def parse_demonstration(row: Mapping[str, Any]) -> tuple[list[Message], list[Message] | None]:
    """Return the messages and the tools of a row; None: the row has no tools of its own.

    Tools are a list of JSON schemas, or its JSON text. Raises InvalidMessages.
    """
    messages = parse_conversation(row[MESSAGES_KEY], ROLES)
    for number, (message, after) in enumerate(pairwise(messages), 1):
        if message["role"] == after["role"] == "assistant":
            raise InvalidMessages(
                f"messages {number} and {number + 1} are both of the assistant; join them"
            )
    return messages, _parse_tools(row.get(TOOLS_KEY))


def _parse_tools(value: Any) -> list[Message] | None:
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InvalidMessages(f"{TOOLS_KEY!r} is not JSON: {error}") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise InvalidMessages(
            f"{TOOLS_KEY!r} must be a list of JSON schemas of functions, not {value!r:.80}"
        )
    return [_drop_nulls(tool) for tool in value]


def _drop_nulls(value: Any) -> Any:
    """Return a value without the null keys that Arrow adds to the tables of a column."""
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


def find_learned_turns(messages: Sequence[Message], train_on: str) -> list[int]:
    """Return the places of the assistant messages to learn: all of them, or the `last`.

    A message before the first one of a user or tool, such as a greeting, is part of the prompt.
    """
    first = next((i for i, m in enumerate(messages) if m["role"] in ("user", "tool")), 0)
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i > first]
    return turns[-1:] if train_on == LAST else turns


def encode_demonstration(
    chat: ChatFormat, messages: Sequence[Message], tools: Sequence[Message], train_on: str
) -> list[EncodedPiece]:
    """Encode a conversation up to its last assistant message, as if the model had sampled it.

    The first piece is the prompt. Returns nothing if the conversation has no message to learn.
    Earlier turns stay as they were learned, even if the format would render them differently later.
    Raises ChatFormatError if the format cannot render the conversation.
    """
    turns = find_learned_turns(messages, train_on)
    if not turns:
        return []
    conversation = chat.start_conversation(messages[: turns[0]], tools)
    pieces: list[EncodedPiece] = [(conversation.ids, False)]
    for turn, after in zip(turns, [*turns[1:], None], strict=True):
        answer = chat.encode_answer(messages[:turn], messages[turn], tools)
        pieces.append((answer, True))
        if after is not None:
            conversation.append_turn(answer)
            pieces.append((conversation.append_messages(messages[turn + 1 : after]), False))
    return pieces
