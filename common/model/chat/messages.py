"""Validation of messages from rows and environments for chat formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]  # {"role": ..., "content": ...}
ROLES = ("system", "developer", "user", "assistant", "tool")


class InvalidMessages(ValueError):
    """Error of a text, conversation or message that no chat format accepts; it names the
    message.
    """


def parse_conversation(value: Any, roles: Sequence[str] = ()) -> list[Message]:
    """Return messages with texts as contents, and without null keys.

    A text is a message of the user. Arrow gives all messages of a column all keys of the others, as
    nulls, and all arguments of calls likewise. If there are such keys, null arguments are left out,
    too. Roles are names; with `roles`, one of them.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, Mapping) or not isinstance(value, Sequence):
        raise InvalidMessages(f"messages must be a text or a list, not {value!r:.80}")
    if not value:
        raise InvalidMessages("the list of messages is empty")
    filled = any(
        isinstance(message, dict) and any(v is None for k, v in message.items() if k != "content")
        for message in value
    )
    return [
        parse_message(message, f"message {number}", roles, filled)
        for number, message in enumerate(value, 1)
    ]


def add_system_prompt(prompt: Any, system: str) -> Any:
    """Return a prompt that is a text as messages, after a system prompt; others unchanged."""
    if not system or not isinstance(prompt, str):
        return prompt
    return [{"role": "system", "content": system}, {"role": "user", "content": prompt}]


def extract_text(value: Any) -> str:
    """Return the text of a prompt; for messages, all their texts."""
    if isinstance(value, list):
        return "".join(extract_text(message) for message in value)
    if isinstance(value, dict):  # a message, or a part of one
        return extract_text(value.get("content", value.get("text")))
    return value if isinstance(value, str) else ""


def parse_message(
    value: Any, name: str, roles: Sequence[str] = (), has_filled_nulls: bool = False
) -> Message:
    """Parse one message, which errors call `name`."""
    if not isinstance(value, dict):
        raise InvalidMessages(f"{name} must be {{'role', 'content'}}, not {value!r:.80}")
    message = {key: item for key, item in value.items() if item is not None}
    role = message.get("role")
    if role is None:
        raise InvalidMessages(
            f"{name} has no role; it has {', '.join(map(repr, value)) or 'no key'}"
        )
    if not (isinstance(role, str) and role.isidentifier()) or (roles and role not in roles):
        raise InvalidMessages(
            f"{name} has the unknown role {role!r}; roles are {', '.join(roles or ROLES)}"
        )
    calls = message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = _parse_tool_calls(calls, f"{name} ({role})", has_filled_nulls)
    content = _parse_content(message.get("content"), f"{name} ({role})")
    if content is None and not calls:
        raise InvalidMessages(
            f"{name} ({role}) has no content; only a message with calls may omit it"
        )
    return message | {"content": content or ""}


def _parse_content(content: Any, name: str) -> str | None:
    """Return the text of a content: a text, or a list of parts that are texts."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidMessages(
            f"{name}: its content is of type {type(content).__name__!r}, not a text"
        )
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str) or (isinstance(part, dict) and part.get("type") != "text"):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InvalidMessages(f"{name}: a part of its content is of type {kind!r}, not a text")
        texts.append(text)
    return "".join(texts)


def _parse_tool_calls(value: Any, name: str, has_filled_nulls: bool) -> list[Message]:
    if not isinstance(value, list):
        raise InvalidMessages(
            f"{name}: its tool_calls are of type {type(value).__name__!r}, not a list"
        )
    calls = []
    for call in value:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidMessages(
                f"{name}: a tool call must be {{'function': {{'name', 'arguments'}}}}"
            )
        arguments = function.get("arguments")
        if arguments is None:
            arguments = {}
        elif isinstance(arguments, dict):
            arguments = {k: v for k, v in arguments.items() if not (has_filled_nulls and v is None)}
        elif not isinstance(arguments, str):
            raise InvalidMessages(
                f"{name}: arguments of a tool call must be a table or a text, not {arguments!r:.80}"
            )
        function = {"name": function["name"], "arguments": arguments}
        calls.append({k: v for k, v in call.items() if v is not None} | {"function": function})
    return calls
