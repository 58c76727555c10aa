"""Messages of rows and environments, and conversations in a chat format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.chat.chat_format import ChatFormat, detect_format
from meshrl.common.model.chat.messages import (
    ROLES,
    InvalidMessages,
    parse_conversation,
    parse_message,
)
from meshrl.common.model.tokens.tokenizer import Tokenizer
from tests.unit.common.model.chatting import qwen3_tokenizer

USER = {"role": "user", "content": "hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
NULL = {"a": None}
ACCEPTED: list[tuple[Any, list[dict[str, Any]]]] = [
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
    (  # as Arrow fills keys of another call of the column
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
    (  # a null of the row's author
        [
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": NULL}}],
            }
        ],
        [{"tool_calls": [{"function": {"name": "f", "arguments": NULL}}]}],
    ),
]
REJECTED: list[tuple[Any, str]] = [
    (None, "messages must be a text or a list, not None"),
    (5, "messages must be a text or a list, not 5"),
    (USER, "messages must be a text or a list, not {'role'"),
    ([], "the list of messages is empty"),
    (["hi"], "message 1 must be {'role', 'content'}, not 'hi'"),
    ([USER, None], "message 2 must be {'role', 'content'}, not None"),
    ([{"content": "hi"}], "message 1 has no role; it has 'content'"),
    ([{"from": "human", "value": "hi"}], "message 1 has no role; it has 'from', 'value'"),
    (
        [USER, {"role": "nobody", "content": ""}],
        "message 2 has the unknown role 'nobody'; roles are",
    ),
    ([{"role": 5, "content": ""}], "message 1 has the unknown role 5"),
    ([{"role": "user"}], "message 1 (user) has no content"),
    ([USER | {"content": None}], "message 1 (user) has no content"),
    ([{"role": "assistant", "content": None, "tool_calls": []}], "(assistant) has no content"),
    ([USER | {"content": 5}], "message 1 (user): its content is of type 'int'"),
    ([USER | {"content": {"text": "hi"}}], "its content is of type 'dict', not a text"),
    ([USER | {"content": [{"type": "image_url"}]}], "is of type 'image_url', not a text"),
    ([USER | {"content": [5]}], "is of type 'int', not a text"),
    ([USER | {"tool_calls": {"name": "f"}}], "its tool_calls are of type 'dict', not a list"),
    ([USER | {"tool_calls": [{"name": "f"}]}], "a tool call must be {'function'"),
    ([USER | {"tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}], "arguments of a"),
]


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


pytestmark = pytest.mark.group("transformers")  # imported by one worker for all tests of the group


# ChatML with Hermes tools as a Jinja template, as Qwen3's treats turns without reasoning.
TEMPLATE = r"""
{%- if tools -%}
{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' -%}{{ messages[0].content + '\n\n' }}{%- endif -%}
{{ '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
{%- for tool in tools -%}{{ '\n' }}{{ tool | tojson }}{%- endfor -%}
{{ '\n</tools>\n\nFor each function call, return a json object with function name and ' }}
{{- 'arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' -%}
{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.previtem.role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\n' }}{%- endif -%}
{%- elif m.role != 'system' -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat")
    qwen3_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def chat(tokenizer: Tokenizer) -> ChatFormat:
    return ChatFormat.load("qwen3", {}, tokenizer)


@pytest.fixture(scope="module")
def template(directory: Path) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    reference.chat_template = TEMPLATE
    return reference


words = st.text(
    st.characters(codec="utf-8", exclude_characters="<|>"), min_size=1, max_size=12
).map(lambda t: t.strip() or "x")


answers = st.lists(
    st.one_of(
        st.builds(lambda c: {"role": "user", "content": c}, words),
        st.builds(lambda c: {"role": "tool", "name": "add", "content": c}, words),
    ),
    min_size=1,
    max_size=3,
)


# any ids: parts of characters, special tokens in odd positions, turns cut short or unclosed
turns = st.lists(st.integers(0, 328), min_size=1, max_size=24)


relaxed = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@relaxed
@given(opening=words, rounds=st.lists(st.tuples(turns, answers), min_size=1, max_size=6))
def test_earlier_ids_are_unchanged_by_any_sampled_turn(
    chat: ChatFormat, tokenizer: Tokenizer, opening: str, rounds: list[tuple[list[int], Any]]
) -> None:
    conversation = chat.start_conversation([{"role": "user", "content": opening}], [TOOL])
    for sampled, messages in rounds:
        before = list(conversation.ids)
        conversation.append_turn(sampled)
        assert conversation.ids == before + sampled
        added = conversation.append_messages(messages)
        assert conversation.ids == before + sampled + added
        text = tokenizer.decode(added)
        assert all(m["content"] in text for m in messages)
        assert text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("name", "options"), [("qwen3", {"enable_thinking": False}), ("prime-qwen3", {})]
)
@relaxed
@given(rounds=st.lists(st.tuples(turns, answers), min_size=1, max_size=4))
def test_ids_only_grow_in_other_formats(
    tokenizer: Tokenizer, name: str, options: dict[str, Any], rounds: list[tuple[list[int], Any]]
) -> None:
    conversation = ChatFormat.load(name, options, tokenizer).start_conversation(
        [{"role": "user", "content": "go"}]
    )
    for sampled, messages in rounds:
        before = list(conversation.ids)
        conversation.append_turn(sampled)
        added = conversation.append_messages(messages)
        assert conversation.ids == before + sampled + added and added


def test_truncated_turn_is_closed_before_the_next(chat: ChatFormat, tokenizer: Tokenizer) -> None:
    conversation = chat.start_conversation([{"role": "user", "content": "go"}])
    conversation.append_turn(tokenizer.encode("the sum"))
    added = conversation.append_messages([{"role": "user", "content": "on"}])
    assert tokenizer.decode(added) == (
        "<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"
    )


@relaxed
@given(
    system=st.one_of(st.none(), words),
    tools=st.booleans(),
    opening=words,
    rounds=st.lists(st.tuples(words, answers), max_size=4),
)
def test_well_formed_conversations_match_the_template(
    chat: ChatFormat,
    tokenizer: Tokenizer,
    template: PreTrainedTokenizerFast,
    system: str | None,
    tools: bool,
    opening: str,
    rounds: list[tuple[str, Any]],
) -> None:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": opening})
    specs: list[Any] = [TOOL] if tools else []
    conversation = chat.start_conversation(messages, specs)
    for answer, replies in rounds:
        conversation.append_turn(tokenizer.encode(answer + "<|im_end|>"))
        conversation.append_messages(replies)
        messages = [*messages, {"role": "assistant", "content": answer}, *replies]
    expected = template.apply_chat_template(
        messages, tools=specs or None, add_generation_prompt=True, tokenize=False
    )
    assert tokenizer.decode(conversation.ids) == expected
    assert conversation.ids == template(expected, add_special_tokens=False)["input_ids"]


def test_each_call_is_parsed_with_its_problem(chat: ChatFormat, tokenizer: Tokenizer) -> None:
    conversation = chat.start_conversation([{"role": "user", "content": "go"}], [TOOL])
    valid_call = json.dumps({"name": "add", "arguments": {"a": 1}})
    texts = (
        valid_call,
        "{not json",
        '{"arguments": {}}',
        '{"name": 5, "arguments": []}',
        valid_call,
    )
    turn_text = "<think>\nhm\n</think>\n\nso" + "".join(
        f"<tool_call>\n{t}\n</tool_call>" for t in texts
    )
    reply = conversation.append_turn(tokenizer.encode(turn_text + "<tool_call>{"))
    assert reply.reasoning == "hm" and reply.content == "so"
    assert [c.problem for c in reply.calls] == [
        "",
        "invalid json",
        "missing name",
        "a call is a name and an object of arguments",
        "",
        "unclosed block",
    ]
    assert reply.calls[0].arguments == reply.calls[4].arguments == {"a": 1}
    assert len({c.id for c in reply.calls}) == len(reply.calls)


def test_unknown_format_error_lists_the_known_ones(chat: ChatFormat, tokenizer: Tokenizer) -> None:
    assert chat.stop_tokens == ["<|im_end|>", "<|endoftext|>"]
    with pytest.raises(ConfigError, match=r"no chat format 'qwen33'.*Use one of.*qwen3"):
        ChatFormat.load("qwen33", {}, tokenizer)
    with pytest.raises(ConfigError, match=r"'gpt-oss'"):
        ChatFormat.load("gpt-oss", {}, tokenizer)
    with pytest.raises(ConfigError, match="enable_thoughts"):
        ChatFormat.load("qwen3", {"enable_thoughts": True}, tokenizer)


def test_format_is_detected_from_the_model_name(tmp_path: Path) -> None:
    import renderers.base

    published = renderers.base.MODEL_RENDERER_MAP
    for name in ("Qwen/Qwen3-8B", "zai-org/GLM-4.5-Air"):
        assert detect_format(tmp_path / name) == published[name]
        cached = tmp_path / f"models--{name.replace('/', '--')}/snapshots/abc"
        assert detect_format(cached) == published[name]
    (tmp_path / "config.json").write_text('{"_name_or_path": "Qwen/Qwen3.5-4B"}')
    assert detect_format(tmp_path) == "qwen3.5"
    with pytest.raises(ConfigError, match=r"Set environment\.chat"):
        detect_format(tmp_path / "mine")


def test_calls_with_tags_null_arguments_and_non_finite_numbers(chat: ChatFormat) -> None:
    tagged = json.dumps({"name": "add", "arguments": {"a": "</tool_call> and <tool_call>"}})
    for body, arguments, problem in (
        (tagged, {"a": "</tool_call> and <tool_call>"}, ""),
        ('{"name": "add", "arguments": null}', {}, ""),
        ('{"name": "add", "arguments": {"a": NaN}}', {"a": ...}, "not finite"),
        ('{"name": "add", "arguments": {"a": 1e999}}', {"a": ...}, "not finite"),
    ):
        conversation = chat.start_conversation([{"role": "user", "content": "hi"}], [TOOL])
        text = f"So.\n<tool_call>\n{body}\n</tool_call><|im_end|>"
        reply = conversation.append_turn(chat.tokenizer.encode(text))
        assert reply.content == "So." and len(reply.calls) == 1
        (call,) = reply.calls
        assert (
            call.name == "add" and problem in call.problem and bool(problem) == bool(call.problem)
        )
        if not problem:
            assert call.arguments == arguments


def test_messages_are_parsed_without_null_values() -> None:
    for value, expected in ACCEPTED:
        parsed = parse_conversation(value, ROLES)
        assert len(parsed) == len(expected), value
        for message, expected_fields in zip(parsed, expected, strict=True):
            assert message | expected_fields == message, value
            assert None not in message.values(), value


def test_invalid_messages_raise_specific_errors() -> None:
    for value, message in REJECTED:
        with pytest.raises(InvalidMessages) as caught:
            parse_conversation(value, ROLES)
        assert message in str(caught.value), value


def test_environment_may_name_a_role_of_its_format() -> None:
    assert parse_conversation([{"role": "ipython", "content": "3"}])[0]["role"] == "ipython"
    with pytest.raises(
        InvalidMessages, match="the answer has the unknown role 'user'; roles are assistant"
    ):
        parse_message(USER, "the answer", ("assistant",))
