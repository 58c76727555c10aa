"""Messages of rows and environments: what is taken, and what is wrong with the others."""

from __future__ import annotations

from typing import Any

import pytest

from meshrl.common.model.chat.messages import ROLES, BadMessages, conversation_of, message_of

USER = {"role": "user", "content": "hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
NULL = {"a": None}
TAKEN: list[tuple[Any, list[dict[str, Any]]]] = [
    ("hi", [USER]),
    ([USER], [USER]),
    ([USER | {"name": None, "tool_calls": None, "tool_call_id": None}], [USER]),
    ([{"role": "developer", "content": "Be brief."}, USER], [{"role": "developer"}, USER]),
    ([USER | {"content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}], [USER]),
    ([USER | {"content": [{"type": "text", "text": "hi", "image_url": None}]}], [USER]),
    ([USER | {"content": ["h", "i"]}], [USER]),
    ([USER | {"content": ""}], [USER | {"content": ""}]),
    (
        [{"role": "assistant", "content": None, "tool_calls": [CALL]}],
        [{"role": "assistant", "content": "", "tool_calls": [CALL]}],
    ),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": None}}]}],
        [{"content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}],
    ),
    (  # as Arrow fills what another call of the column has
        [
            USER | {"tool_calls": None},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"function": {"name": "add", "arguments": {"a": 1, "to": None}}, "id": None}
                ],
            },
        ],
        [USER, {"tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}],
    ),
    (  # a null that somebody wrote
        [
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": NULL}}],
            }
        ],
        [{"tool_calls": [{"function": {"name": "f", "arguments": NULL}}]}],
    ),
]
REFUSED: list[tuple[Any, str]] = [
    (None, "messages are a text or a list, not None"),
    (5, "messages are a text or a list, not 5"),
    (USER, "messages are a text or a list, not {'role'"),
    ([], "the list of messages is empty"),
    (["hi"], "message 1 is no {'role', 'content'}, but 'hi'"),
    ([USER, None], "message 2 is no {'role', 'content'}, but None"),
    ([{"content": "hi"}], "message 1 has no role; it has 'content'"),
    ([{"from": "human", "value": "hi"}], "message 1 has no role; it has 'from', 'value'"),
    (
        [USER, {"role": "nobody", "content": ""}],
        "message 2 has the role 'nobody'; known are",
    ),
    ([{"role": 5, "content": ""}], "message 1 has the role 5"),
    ([{"role": "user"}], "message 1 (user) has no content"),
    ([USER | {"content": None}], "message 1 (user) has no content"),
    ([{"role": "assistant", "content": None, "tool_calls": []}], "(assistant) has no content"),
    ([USER | {"content": 5}], "message 1 (user): its content is of type 'int'"),
    ([USER | {"content": {"text": "hi"}}], "its content is of type 'dict', not a text"),
    ([USER | {"content": [{"type": "image_url"}]}], "is of type 'image_url', not a text"),
    ([USER | {"content": [5]}], "is of type 'int', not a text"),
    ([USER | {"tool_calls": {"name": "f"}}], "its tool_calls are of type 'dict', not a list"),
    ([USER | {"tool_calls": [{"name": "f"}]}], "a tool call is no {'function'"),
    ([USER | {"tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}], "arguments of a"),
]


def test_messages_are_taken_without_what_stands_for_nothing() -> None:
    for value, expected in TAKEN:
        found = conversation_of(value, ROLES)
        assert len(found) == len(expected), value
        for message, part in zip(found, expected, strict=True):
            assert message | part == message, value
            assert None not in message.values(), value


def test_messages_that_no_format_takes_are_each_told_in_a_sentence_of_their_own() -> None:
    for value, says in REFUSED:
        with pytest.raises(BadMessages) as caught:
            conversation_of(value, ROLES)
        assert says in str(caught.value), value


def test_an_environment_may_name_a_role_of_its_format() -> None:
    assert conversation_of([{"role": "ipython", "content": "3"}])[0]["role"] == "ipython"
    with pytest.raises(BadMessages, match="the answer has the role 'user'; known are assistant"):
        message_of(USER, "the answer", ("assistant",))
