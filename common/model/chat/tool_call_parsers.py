"""Parsers of the tool calls in a model's text, in the three formats that most templates use.

The names are those of vLLM's tool-call parsers, whose documentation describes the formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from meshrl.common.base.encoding.finite_json import DECODER, NonFiniteNumber
from meshrl.common.model.chat.chat_format import ParsedToolCall

AUTO_PARSER, NO_PARSER = "auto", "none"
OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"
MISTRAL_CALLS_TAG, MISTRAL_ARGS_TAG, MISTRAL_CALL_ID_TAG = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
PYTHON_TAG = "<|python_tag|>"
INVALID_JSON = "invalid json"
_CALL_TAG = re.compile(f"{OPEN_TAG}|{CLOSE_TAG}")
# Text before, between and after the calls of Llama's turns; Llama 4 has other tags.
_LLAMA_SEPARATORS = re.compile(r"(?:[\s;,]|<\|python_tag\|>|<\|python_start\|>|<\|python_end\|>)*")


@dataclass(slots=True)
class ExtractedToolCalls:
    """Turn's text without its calls, and the calls."""

    content: str
    calls: list[ParsedToolCall] = field(default_factory=list)


def detect_parser(template: str) -> str:
    """Return the parser for the format in a template's text, or none."""
    if MISTRAL_CALLS_TAG in template:
        return "mistral"
    if OPEN_TAG in template and "<function=" not in template:
        return "hermes"
    if '"parameters"' in template and ("ipython" in template or PYTHON_TAG in template):
        return "llama3_json"
    return NO_PARSER


def parse_hermes(text: str) -> ExtractedToolCalls:
    """Parse `<tool_call>{"name": .., "arguments": {..}}</tool_call>`, as of Hermes and Qwen.

    A tag inside a string of a call's JSON is part of the string.
    """
    content, opened, rest = text.partition(OPEN_TAG)
    calls = []
    while opened:
        call, end = _parse_object(rest)
        tag = _CALL_TAG.search(rest, max(end, 0))
        stop = tag.start() if tag else len(rest)
        if end < 0 or rest[end:stop].strip():
            problem = call.problem if end < 0 else INVALID_JSON
            call = ParsedToolCall("", {}, "", problem, rest[:stop].strip())
        elif not (tag and tag[0] == CLOSE_TAG):
            call = replace(call, problem=call.problem or "unclosed")
        calls.append(call)
        _, opened, rest = rest[stop:].partition(OPEN_TAG)
    return ExtractedToolCalls(content, calls)


def parse_llama3_json(text: str) -> ExtractedToolCalls:
    """Parse `{"name": .., "parameters": {..}}` as the whole turn, as of Llama 3.x.

    Several calls are separated by semicolons.
    """
    tagged = text.lstrip().startswith(PYTHON_TAG)
    rest = _LLAMA_SEPARATORS.sub("", text, count=1).rstrip()
    if not tagged and not re.match(r'\{\s*"(name|type|parameters|function)"', rest):
        return ExtractedToolCalls(text)
    calls = []
    while rest:
        call, end = _parse_object(rest)
        calls.append(call)
        if end < 0:
            break
        rest = _LLAMA_SEPARATORS.sub("", rest[end:], count=1)
    return ExtractedToolCalls("", calls)


def parse_mistral(text: str) -> ExtractedToolCalls:
    """Parse the calls of Mistral's tokenizer versions.

    They are `[TOOL_CALLS][{"name": .., "arguments": {..}, "id": ..}, ..]`, or
    `[TOOL_CALLS]name{..}` with or without `[CALL_ID]` and `[ARGS]`.
    """
    content, opened, rest = text.partition(MISTRAL_CALLS_TAG)
    calls: list[ParsedToolCall] = []
    while opened:
        rest = rest.lstrip()
        if rest.startswith("["):
            found, end = _parse_call_list(rest)
        else:
            found, end = _parse_named_call(rest)
        calls += found
        _, opened, rest = rest[end:].partition(MISTRAL_CALLS_TAG)
    return ExtractedToolCalls(content, calls)


PARSERS: dict[str, Callable[[str], ExtractedToolCalls]] = {
    "hermes": parse_hermes,
    "llama3_json": parse_llama3_json,
    "mistral": parse_mistral,
    NO_PARSER: ExtractedToolCalls,
}


def _parse_call_list(text: str) -> tuple[list[ParsedToolCall], int]:
    """Parse a JSON list of calls at the start of a text; return them and the end of the list."""
    try:
        found, end = DECODER.raw_decode(text)
    except (ValueError, RecursionError) as error:
        body = text.partition(MISTRAL_CALLS_TAG)[0]
        return [ParsedToolCall("", {}, "", _describe_parse_error(error), body)], len(body)
    return [_build_call(call, json.dumps(call)) for call in found], end


def _parse_named_call(text: str) -> tuple[list[ParsedToolCall], int]:
    """Parse a call `name{..}` at the start of a text; return it and its end."""
    body = text.partition(MISTRAL_CALLS_TAG)[0]
    head, brace, _ = body.partition("{")
    name, _, identity = head.replace(MISTRAL_ARGS_TAG, "").partition(MISTRAL_CALL_ID_TAG)
    call, size = _parse_object(text[len(head) :], arguments=True)
    end = len(head) + size
    problem = call.problem if brace else INVALID_JSON
    if not problem and text[end:].partition(MISTRAL_CALLS_TAG)[0].strip():
        problem = INVALID_JSON
    if problem:
        end = len(body)
    arguments = {} if problem else call.arguments
    return [
        ParsedToolCall(name.strip(), arguments, identity.strip(), problem, text[:end].strip())
    ], end


def _parse_object(text: str, arguments: bool = False) -> tuple[ParsedToolCall, int]:
    """Parse a JSON object at the start of a text as a call, or only as its `arguments`.

    Return it with its end; -1 if it is invalid.
    """
    begin = len(text) - len(text.lstrip())
    try:
        found, end = DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError) as error:
        return ParsedToolCall("", {}, "", _describe_parse_error(error), text.strip()), -1
    raw = text[begin:end]
    if arguments:
        good = isinstance(found, dict)
        return ParsedToolCall("", found if good else {}, "", "" if good else INVALID_JSON, raw), end
    return _build_call(found, raw), end


def _describe_parse_error(error: Exception) -> str:
    return f"{error} is not a finite number" if isinstance(error, NonFiniteNumber) else INVALID_JSON


def _build_call(found: Any, raw: str) -> ParsedToolCall:
    """Create a call from a JSON object with a name and arguments.

    The arguments are an object, the JSON text of one, or absent.
    """
    if not isinstance(found, dict):
        return ParsedToolCall("", {}, "", "a call is a JSON object", raw)
    if isinstance(found.get("function"), dict):
        found = {"id": found.get("id"), **found["function"]}
    name = found.get("name")
    arguments = found.get("arguments", found.get("parameters"))
    unread = ""
    if isinstance(arguments, str):
        try:
            arguments = DECODER.decode(arguments)
        except (ValueError, RecursionError) as error:
            unread = _describe_parse_error(error)
    arguments = {} if arguments is None else arguments
    identity = found.get("id")
    good = isinstance(name, str) and isinstance(arguments, dict)
    problem = "" if good else "a call is a name and an object of arguments"
    return ParsedToolCall(
        name if isinstance(name, str) else "",
        arguments if isinstance(arguments, dict) else {},
        identity if isinstance(identity, str) else "",
        unread if unread and unread != INVALID_JSON else problem,
        raw,
    )
