"""Reads the tool calls in what a model wrote, in the three forms that most templates teach.

The names are those of vLLM's tool-call parsers, whose documentation describes the forms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.model.chat import ParsedCall

AUTO, NONE = "auto", "none"
OPEN, CLOSE = "<tool_call>", "</tool_call>"
TOOL_CALLS, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
PYTHON = "<|python_tag|>"
SPANS = "<|python_start|>", "<|python_end|>"  # Llama 4's
_DECODER = json.JSONDecoder()


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
    """`<tool_call>{"name": .., "arguments": {..}}</tool_call>`, as Hermes and Qwen write calls."""
    content, *rest = text.split(OPEN)
    calls = []
    for part in rest:
        body, closed, _ = part.partition(CLOSE)
        call = _from_text(body.strip())
        problem = call.problem or ("" if closed else "unclosed")
        calls.append(_problem(call, problem))
    return Written(content, calls)


def llama3_json(text: str) -> Written:
    """`{"name": .., "parameters": {..}}` as the whole turn, as Llama 3.x writes calls; more than
    one are separated by semicolons.
    """
    tagged = text.lstrip().startswith(PYTHON)
    rest = text.strip().removeprefix(PYTHON).strip()
    for mark in SPANS:
        rest = rest.replace(mark, "").strip()
    if not tagged and not re.match(r'\{\s*"(name|type|parameters|function)"', rest):
        return Written(text)
    calls = []
    while rest:
        try:
            found, end = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            calls.append(ParsedCall("", {}, "", "invalid json", rest))
            break
        calls.append(_from_object(found, rest[:end]))
        rest = rest[end:].lstrip(" \n;,")
    return Written("", calls)


def mistral(text: str) -> Written:
    """`[TOOL_CALLS][{"name": .., "arguments": {..}, "id": ..}, ..]`, or `[TOOL_CALLS]name{..}` with
    or without `[CALL_ID]` and `[ARGS]`, as versions of Mistral's tokenizer write calls.
    """
    content, *parts = text.split(TOOL_CALLS)
    calls: list[ParsedCall] = []
    for part in parts:
        body = part.strip()
        if body.startswith("["):
            calls += _listed(body)
            continue
        head, _, arguments = body.partition("{")
        name, _, identity = head.replace(ARGUMENTS, "").partition(CALL_ID)
        call = _from_text('{"arguments": {' + arguments + "}")
        problem = call.problem if call.problem == "invalid json" else ""
        calls.append(ParsedCall(name.strip(), call.arguments, identity.strip(), problem, body))
    return Written(content, calls)


PARSERS: dict[str, Callable[[str], Written]] = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "mistral": mistral,
    NONE: Written,
}


def _listed(body: str) -> list[ParsedCall]:
    try:
        found, _ = _DECODER.raw_decode(body)
    except (ValueError, RecursionError):
        return [ParsedCall("", {}, "", "invalid json", body)]
    return [_from_object(call, json.dumps(call)) for call in found]


def _from_text(text: str) -> ParsedCall:
    try:
        return _from_object(json.loads(text), text)
    except (ValueError, RecursionError):
        return ParsedCall("", {}, "", "invalid json", text)


def _from_object(found: Any, raw: str) -> ParsedCall:
    """A call of a JSON object with a name and an object of arguments, or of their JSON text."""
    if not isinstance(found, dict):
        return ParsedCall("", {}, "", "a call is a JSON object", raw)
    if isinstance(found.get("function"), dict):
        found = {"id": found.get("id"), **found["function"]}
    name = found.get("name")
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    identity = found.get("id")
    call = ParsedCall(
        name if isinstance(name, str) else "",
        arguments if isinstance(arguments, dict) else {},
        identity if isinstance(identity, str) else "",
        raw=raw,
    )
    good = isinstance(name, str) and isinstance(arguments, dict)
    return call if good else _problem(call, "a call is a name and an object of arguments")


def _problem(call: ParsedCall, problem: str) -> ParsedCall:
    return ParsedCall(call.name, call.arguments, call.id, problem, call.raw)
