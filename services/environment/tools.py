"""Describes tools to a model by JSON schemas, and turns the calls that it writes into tool
calls.
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable
from typing import Any

from meshrl.common.job import builtin

NAMES: dict[Any, str] = {str: "string", int: "integer", float: "number"}
NAMES |= {bool: "boolean", list: "array", dict: "object"}
KINDS = (*NAMES.values(), "null")


class BadCall(Exception):
    """A call that the model wrote and the tool would not understand; its text is for the model."""


class BuiltIn:
    """A tool that MeshRL brings along, or an MCP server's: what is known of it without its code."""

    def __init__(
        self, name: str, description: str, parameters: dict[str, Any], single: str = ""
    ) -> None:
        self.name, self.description, self.parameters = name, description, parameters
        self._single = single  # the argument that is passed alone; empty: all of them, as a table

    @classmethod
    def of(cls, name: str, tool: builtin.Tool) -> BuiltIn:
        parameters = one_argument(tool.argument, {"type": "string"})
        return cls(name, tool.description, parameters, tool.argument)

    @property
    def spec(self) -> dict[str, Any]:
        """The tool's description in the form that chat templates take."""
        about = {"name": self.name, "description": self.description}
        return {"type": "function", "function": about | {"parameters": self.parameters}}

    def input(self, arguments: dict[str, Any]) -> Any:
        """What the tool is called with; BadCall when the arguments are not what it takes."""
        if problem := mismatch(self.parameters, arguments):
            raise BadCall(problem)
        arguments = whole(self.parameters, arguments)
        return arguments[self._single] if self._single else arguments


class JobTool(BuiltIn):
    """A tool of the job's author, `f(input)`, as what a model calls with named arguments.

    A TypedDict as the type of `input`, or an attribute `parameters` of the function, which is a
    JSON schema, names the arguments, and `input` is the whole object; else there is one argument,
    called as the function's parameter is.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        parameter = next(iter(inspect.signature(function).parameters))
        hints = typing.get_type_hints(function)
        kind = hints.get(parameter, Any)
        declared = getattr(function, "parameters", None)
        single = ""
        if isinstance(declared, dict):
            parameters = declared
        elif typing.is_typeddict(kind):
            parameters = schema(kind)
        else:
            single = parameter
            parameters = one_argument(parameter, schema(kind))
        said = (inspect.getdoc(function) or "").partition("\n\n")[0].replace("\n", " ")
        super().__init__(name, said, parameters, single)


def one_argument(name: str, kind: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {name: kind}, "required": [name]}


def schema(kind: Any) -> dict[str, Any]:
    """The JSON schema of a type annotation; of one that has none, a schema that takes anything."""
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (typing.Required, typing.NotRequired, typing.Annotated):
        return schema(arguments[0])
    if typing.is_typeddict(origin):
        hints = typing.get_type_hints(origin, include_extras=True)
        return {
            "type": "object",
            "properties": {key: schema(hint) for key, hint in hints.items()},
            "required": [key for key, hint in hints.items() if _required(hint, origin)],
            "additionalProperties": False,
        }
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [schema(a) for a in arguments]}
    if origin is type(None):
        return {"type": "null"}
    if origin is list and arguments:
        return {"type": "array", "items": schema(arguments[0])}
    return {"type": NAMES[origin]} if origin in NAMES else {}


def _required(hint: Any, table: Any) -> bool:
    origin = typing.get_origin(hint)
    return origin is typing.Required or (origin is not typing.NotRequired and table.__total__)


def mismatch(wanted: Any, value: Any, at: str = "") -> str:
    """Why a value is not what a schema asks for; empty when it is.

    Types, enums, required and further properties are looked at; other keywords, and types that JSON
    schema does not know, are the tool's own business.
    """
    if not isinstance(wanted, dict):  # `true`, which takes anything
        return ""
    name = at or "the arguments"
    if options := wanted.get("anyOf"):
        problems = [mismatch(option, value, at) for option in options]
        return problems[0] if all(problems) else ""
    if "enum" in wanted and value not in wanted["enum"]:
        return f"{name} must be one of {json.dumps(wanted['enum'])}"
    kinds = _kinds(wanted)
    if kinds and not any(kind not in KINDS or _is(kind, value) for kind in kinds):
        return f"{name} must be of type {' or '.join(kinds)}"
    if "array" in kinds and "items" in wanted and isinstance(value, list):
        found = (mismatch(wanted["items"], v, f"{at}[{i}]") for i, v in enumerate(value))
        return next(filter(None, found), "")
    return _object(wanted, value, at) if "object" in kinds and isinstance(value, dict) else ""


def whole(wanted: Any, value: Any) -> Any:
    """A value that a schema takes, with integers that were written as 3.0 as integers."""
    if not isinstance(wanted, dict):
        return value
    if options := wanted.get("anyOf"):
        return whole(next(o for o in options if not mismatch(o, value)), value)
    if isinstance(value, dict):
        properties = wanted.get("properties", {})
        return {key: whole(properties.get(key), item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(wanted.get("items"), item) for item in value]
    kinds = _kinds(wanted)
    if isinstance(value, float) and "integer" in kinds and "number" not in kinds:
        return int(value) if value.is_integer() else value
    return value


def _kinds(wanted: dict[str, Any]) -> list[str]:
    """The types that a schema names: one, several or none."""
    kinds = wanted.get("type", [])
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _object(wanted: dict[str, Any], value: dict[str, Any], at: str) -> str:
    properties = wanted.get("properties", {})
    for key in wanted.get("required", ()):
        if key not in value:
            return f"{at + '.' if at else ''}{key} is missing"
    for key, item in value.items():
        place = f"{at}.{key}" if at else key
        if key in properties:
            if problem := mismatch(properties[key], item, place):
                return problem
        elif properties and not wanted.get("additionalProperties"):
            return f"there is no {place}; there are {', '.join(properties)}"
    return ""


def _is(kind: str, value: Any) -> bool:
    if kind == "null":
        return value is None
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "number":
        return isinstance(value, int | float)
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return any(name == kind and isinstance(value, of) for of, name in NAMES.items())
