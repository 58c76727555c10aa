"""Reads the tool calls in what a model wrote, in the three forms that most templates teach.

The names are those of vLLM's tool-call parsers, whose documentation describes the forms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from meshrl.common.base.encoding.finite_json import DECODER, NotFinite
from meshrl.common.model.chat.chat import ParsedCall

AUTO, NONE = "auto", "none"
OPEN, CLOSE = "<tool_call>", "</tool_call>"
TOOL_CALLS, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
PYTHON = "<|python_tag|>"
INVALID = "invalid json"
_TAG = re.compile(f"{OPEN}|{CLOSE}")
# Before, between and after the calls of Llama's turns; Llama 4 has tags of its own.
_BETWEEN = re.compile(r"(?:[\s;,]|<\|python_tag\|>|<\|python_start\|>|<\|python_end\|>)*")


@dataclass(slots=True)
class Written:
    """A turn's text without its calls, and the calls."""

    content: str
    calls: list[ParsedCall] = field(default_factory=list)


def parser_of(template: str) -> str:
    """The parser for what a template's text teaches; none when it teaches none of these."""
    if TOOL_CALLS in template:
        return "mistral"
    if OPEN in template and "<function=" not in template:
        return "hermes"
    if '"parameters"' in template and ("ipython" in template or PYTHON in template):
        return "llama3_json"
    return NONE


def hermes(text: str) -> Written:
    """`<tool_call>{"name": .., "arguments": {..}}</tool_call>`, as Hermes and Qwen write calls.

    A tag inside a string of a call's JSON is part of the string.
    """
    content, opened, rest = text.partition(OPEN)
    calls = []
    while opened:
        call, end = _object_at(rest)
        tag = _TAG.search(rest, max(end, 0))
        stop = tag.start() if tag else len(rest)
        if end < 0 or rest[end:stop].strip():
            problem = call.problem if end < 0 else INVALID
            call = ParsedCall("", {}, "", problem, rest[:stop].strip())
        elif not (tag and tag[0] == CLOSE):
            call = replace(call, problem=call.problem or "unclosed")
        calls.append(call)
        _, opened, rest = rest[stop:].partition(OPEN)
    return Written(content, calls)


def llama3_json(text: str) -> Written:
    """`{"name": .., "parameters": {..}}` as the whole turn, as Llama 3.x writes calls; more than
    one are separated by semicolons.
    """
    tagged = text.lstrip().startswith(PYTHON)
    rest = _BETWEEN.sub("", text, count=1).rstrip()
    if not tagged and not re.match(r'\{\s*"(name|type|parameters|function)"', rest):
        return Written(text)
    calls = []
    while rest:
        call, end = _object_at(rest)
        calls.append(call)
        if end < 0:
            break
        rest = _BETWEEN.sub("", rest[end:], count=1)
    return Written("", calls)


def mistral(text: str) -> Written:
    """`[TOOL_CALLS][{"name": .., "arguments": {..}, "id": ..}, ..]`, or `[TOOL_CALLS]name{..}` with
    or without `[CALL_ID]` and `[ARGS]`, as versions of Mistral's tokenizer write calls.
    """
    content, opened, rest = text.partition(TOOL_CALLS)
    calls: list[ParsedCall] = []
    while opened:
        rest = rest.lstrip()
        if rest.startswith("["):
            found, end = _listed(rest)
        else:
            found, end = _named(rest)
        calls += found
        _, opened, rest = rest[end:].partition(TOOL_CALLS)
    return Written(content, calls)


PARSERS: dict[str, Callable[[str], Written]] = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "mistral": mistral,
    NONE: Written,
}


def _listed(text: str) -> tuple[list[ParsedCall], int]:
    """The calls of a list in JSON that a text begins with, and where it ends."""
    try:
        found, end = DECODER.raw_decode(text)
    except (ValueError, RecursionError) as error:
        body = text.partition(TOOL_CALLS)[0]
        return [ParsedCall("", {}, "", _unread(error), body)], len(body)
    return [_from_object(call, json.dumps(call)) for call in found], end


def _named(text: str) -> tuple[list[ParsedCall], int]:
    """The call `name{..}` that a text begins with, and where it ends."""
    body = text.partition(TOOL_CALLS)[0]
    head, brace, _ = body.partition("{")
    name, _, identity = head.replace(ARGUMENTS, "").partition(CALL_ID)
    call, size = _object_at(text[len(head) :], arguments=True)
    end = len(head) + size
    problem = call.problem if brace else INVALID
    if not problem and text[end:].partition(TOOL_CALLS)[0].strip():
        problem = INVALID
    if problem:
        end = len(body)
    arguments = {} if problem else call.arguments
    return [ParsedCall(name.strip(), arguments, identity.strip(), problem, text[:end].strip())], end


def _object_at(text: str, arguments: bool = False) -> tuple[ParsedCall, int]:
    """The call, or only its `arguments`, of the JSON that a text begins with, and where it ends;
    -1 when it cannot be read.
    """
    begin = len(text) - len(text.lstrip())
    try:
        found, end = DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError) as error:
        return ParsedCall("", {}, "", _unread(error), text.strip()), -1
    raw = text[begin:end]
    if arguments:
        good = isinstance(found, dict)
        return ParsedCall("", found if good else {}, "", "" if good else INVALID, raw), end
    return _from_object(found, raw), end


def _unread(error: Exception) -> str:
    return f"{error} is not a finite number" if isinstance(error, NotFinite) else INVALID


def _from_object(found: Any, raw: str) -> ParsedCall:
    """A call of a JSON object with a name and an object of arguments, or of their JSON text; no
    arguments are none.
    """
    if not isinstance(found, dict):
        return ParsedCall("", {}, "", "a call is a JSON object", raw)
    if isinstance(found.get("function"), dict):
        found = {"id": found.get("id"), **found["function"]}
    name = found.get("name")
    arguments = found.get("arguments", found.get("parameters"))
    unread = ""
    if isinstance(arguments, str):
        try:
            arguments = DECODER.decode(arguments)
        except (ValueError, RecursionError) as error:
            unread = _unread(error)
    arguments = {} if arguments is None else arguments
    identity = found.get("id")
    good = isinstance(name, str) and isinstance(arguments, dict)
    problem = "" if good else "a call is a name and an object of arguments"
    return ParsedCall(
        name if isinstance(name, str) else "",
        arguments if isinstance(arguments, dict) else {},
        identity if isinstance(identity, str) else "",
        unread if unread and unread != INVALID else problem,
        raw,
    )
