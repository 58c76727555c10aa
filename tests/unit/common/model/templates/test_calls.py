"""Tool calls are read in the forms that templates teach, and what is none is told, not raised."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.model.chat.calls import PARSERS, parser_of
from tests.unit.common.model.templates.formats import FORMATS

ADD: tuple[str, Any, str] = ("add", {"a": 1}, "")
BROKEN = "invalid json"
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
TAGS = "use <tool_call>, </tool_call>, [TOOL_CALLS] and [ARGS] or <|python_end|>; {"
SAYS: tuple[str, Any, str] = ("say", {"a": TAGS}, "")
SAID = json.dumps({"name": "say", "arguments": {"a": TAGS}})
HERMES = f"<tool_call>{SAID}</tool_call>"
ARGUMENTS = json.dumps({"a": TAGS})
LOST: tuple[str, Any, str] = ("", {}, BROKEN)
NOW: tuple[str, Any, str] = ("now", {}, "")
MORE: list[tuple[str, str, str, list[tuple[str, Any, str]]]] = [
    ("hermes", f"so {HERMES}\n{HERMES}", "so ", [SAYS, SAYS]),
    ("hermes", f"<tool_call>{{</tool_call>{HERMES}", "", [LOST, SAYS]),
    ("hermes", f"<tool_call>{{{HERMES}", "", [LOST, SAYS]),
    ("hermes", f"<tool_call>{SAID} and more</tool_call>", "", [LOST]),
    ("hermes", f"<tool_call>{SAID}", "", [("say", {"a": TAGS}, "unclosed")]),
    ("hermes", f"<tool_call>{SAID}{HERMES}", "", [("say", {"a": TAGS}, "unclosed"), SAYS]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "null"}</tool_call>', "", [NOW]),
    ("llama3_json", SAID, "", [SAYS]),
    ("llama3_json", f"<|python_start|>{SAID}<|python_end|>; {SAID}", "", [SAYS, SAYS]),
    ("llama3_json", '{"name": "now", "parameters": null}', "", [NOW]),
    ("mistral", f"so [TOOL_CALLS][{SAID}, {SAID}]", "so ", [SAYS, SAYS]),
    ("mistral", f"[TOOL_CALLS]say[ARGS]{ARGUMENTS}[TOOL_CALLS][{SAID}]", "", [SAYS, SAYS]),
    ("mistral", '[TOOL_CALLS]add[TOOL_CALLS]add{"a": 1}', "", [("add", {}, BROKEN), ADD]),
    ("mistral", '[TOOL_CALLS]add{"a": 1} so[TOOL_CALLS][]', "", [("add", {}, BROKEN)]),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": null}]', "", [NOW]),
]
NUMBERS: list[tuple[str, str, str]] = [  # parser, text, the call's name
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": [N]}}</tool_call>', ""),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": N}"}</tool_call>', "add"),
    ("llama3_json", '{"name": "add", "parameters": {"a": N}}', ""),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": N}}]', ""),
    ("mistral", '[TOOL_CALLS]add{"a": N}', "add"),
]
MORE += [
    (parser, text.replace("N", number), "", [(name, {}, f"{number} is not a finite number")])
    for number in ("NaN", "-Infinity", "1e999")
    for parser, text, name in NUMBERS
]


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES)
def test_calls_are_read(
    parser: str, text: str, content: str, calls: list[tuple[str, Any, str]]
) -> None:
    written = PARSERS[parser](text)
    assert written.content == content
    assert [(c.name, c.arguments, c.problem) for c in written.calls] == calls


def test_tags_in_strings_no_arguments_and_numbers_that_are_none_are_read_or_told() -> None:
    for parser, text, content, calls in MORE:
        written = PARSERS[parser](text)
        assert written.content == content, text
        assert [(c.name, c.arguments, c.problem) for c in written.calls] == calls, text


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
