"""Tool calls are read in the forms that templates teach, and what is none is told, not raised."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.model.templates.calls import PARSERS, parser_of
from tests.unit.common.model.templates.formats import FORMATS

ADD: tuple[str, Any, str] = ("add", {"a": 1}, "")
BAD = "a call is a name and an object of arguments"

CASES: list[tuple[str, str, str, list[tuple[str, Any, str]]]] = [
    ("hermes", "no call", "no call", []),
    ("hermes", 'so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "so ", [ADD]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [ADD]),
    ("hermes", "<tool_call>\n{nonsense\n</tool_call>", "", [("", {}, "invalid json")]),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1}}',
        "",
        [("add", {"a": 1}, "unclosed")],
    ),
    ("hermes", '<tool_call>{"arguments": [1]}</tool_call>', "", [("", {}, BAD)]),
    ("hermes", "<tool_call>3</tool_call>", "", [("", {}, "a call is a JSON object")]),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}}', "", [ADD]),
    ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", [ADD]),
    (
        "llama3_json",
        '{"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}',
        "",
        [ADD],
    ),
    ("llama3_json", '{"name": "add", "parameters"', "", [("", {}, "invalid json")]),
    ("llama3_json", '{"sum": 3}', '{"sum": 3}', []),
    ("llama3_json", "It is 3.", "It is 3.", []),
    (
        "mistral",
        'so [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]',
        "so ",
        [ADD],
    ),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add{"a": 1}', "", [ADD, ADD]),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}', "", [ADD]),
    ("mistral", "[TOOL_CALLS][{", "", [("", {}, "invalid json")]),
    ("mistral", "[TOOL_CALLS]add{nonsense", "", [("add", {}, "invalid json")]),
    ("none", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
]


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES)
def test_calls_are_read(
    parser: str, text: str, content: str, calls: list[tuple[str, Any, str]]
) -> None:
    written = PARSERS[parser](text)
    assert written.content == content
    assert [(c.name, c.arguments, c.problem) for c in written.calls] == calls


def test_the_parser_is_what_the_template_teaches() -> None:
    found = {name: parser_of(template) for name, template in FORMATS.items()}
    assert found == {
        "qwen2.5": "hermes",
        "qwen3": "hermes",
        "llama-3": "llama3_json",
        "mistral": "mistral",
        "smollm2": "none",
        "tinyllama": "none",
        "gemma": "none",
    }


MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
JSON = ["[", "{", "}", '"name"', ":", '"add"', '"arguments"', "null", "1", ",", "]", "[" * 5000]
PIECES = st.lists(st.sampled_from([*MARKS, *JSON]), max_size=20).map("".join)


@given(text=PIECES)
@pytest.mark.parametrize("parser", PARSERS)
def test_whatever_is_written_is_read_or_told(parser: str, text: str) -> None:
    for call in PARSERS[parser](text).calls:
        assert isinstance(call.arguments, dict) and (call.problem or call.name)
