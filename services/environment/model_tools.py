"""Descriptions of tools as JSON schemas, and conversion of the model's calls to tool calls."""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable
from typing import Any

from meshrl.common.job import builtin

JSON_TYPE_OF: dict[Any, str] = {str: "string", int: "integer", float: "number"}
JSON_TYPE_OF |= {bool: "boolean", list: "array", dict: "object"}
JSON_TYPES = (*JSON_TYPE_OF.values(), "null")


class InvalidToolCall(Exception):
    """Error raised for a call that the tool cannot take; the model reads its text."""


class ModelTool:
    """Built-in tool or an MCP server's tool, as far as it is known without its code."""

    def __init__(
        self, name: str, description: str, parameters: dict[str, Any], single: str = ""
    ) -> None:
        self.name, self.description, self.parameters = name, description, parameters
        self._single_argument = (
            single  # the argument that is passed alone; empty: all of them, as an object
        )

    @classmethod
    def from_builtin(cls, name: str, tool: builtin.BuiltinTool) -> ModelTool:
        parameters = make_single_argument_schema(tool.argument, {"type": "string"})
        return cls(name, tool.description, parameters, tool.argument)

    @property
    def description_for_template(self) -> dict[str, Any]:
        """Description of the tool in the form that chat templates take."""
        about = {"name": self.name, "description": self.description}
        return {"type": "function", "function": about | {"parameters": self.parameters}}

    def prepare_input(self, arguments: dict[str, Any]) -> Any:
        """Return the tool's input; InvalidToolCall when the arguments do not match its schema."""
        if problem := find_mismatch(self.parameters, arguments):
            raise InvalidToolCall(problem)
        arguments = convert_integers(self.parameters, arguments)
        return arguments[self._single_argument] if self._single_argument else arguments


class JobTool(ModelTool):
    """Tool of the job's author, `f(input)`, which a model calls with named arguments.

    The names of the arguments come from a TypedDict as the type of `input`, or from the attribute
    `parameters` of the function, a JSON schema; `input` is then the whole object. Otherwise there
    is one argument, named like the function's parameter.
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
            parameters = make_schema(kind)
        else:
            single = parameter
            parameters = make_single_argument_schema(parameter, make_schema(kind))
        doc_summary = (inspect.getdoc(function) or "").partition("\n\n")[0].replace("\n", " ")
        super().__init__(name, doc_summary, parameters, single)


def make_single_argument_schema(name: str, kind: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {name: kind}, "required": [name]}


def make_schema(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a type annotation; without one, a schema that accepts any value."""
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (typing.Required, typing.NotRequired, typing.Annotated):
        return make_schema(arguments[0])
    if typing.is_typeddict(origin):
        hints = typing.get_type_hints(origin, include_extras=True)
        return {
            "type": "object",
            "properties": {key: make_schema(hint) for key, hint in hints.items()},
            "required": [key for key, hint in hints.items() if _is_required(hint, origin)],
            "additionalProperties": False,
        }
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [make_schema(a) for a in arguments]}
    if origin is type(None):
        return {"type": "null"}
    if origin is list and arguments:
        return {"type": "array", "items": make_schema(arguments[0])}
    return {"type": JSON_TYPE_OF[origin]} if origin in JSON_TYPE_OF else {}


def _is_required(hint: Any, table: Any) -> bool:
    origin = typing.get_origin(hint)
    return origin is typing.Required or (origin is not typing.NotRequired and table.__total__)


def find_mismatch(schema: Any, value: Any, path: str = "") -> str:
    """Explain how a value differs from a schema; empty when it matches.

    Types, enums, required and additional properties are checked. The tool itself must check other
    keywords, and types that JSON schema does not know.
    """
    if not isinstance(schema, dict):  # `true`, which accepts any value
        return ""
    name = path or "the arguments"
    if options := schema.get("anyOf"):
        problems = [find_mismatch(option, value, path) for option in options]
        return problems[0] if all(problems) else ""
    if "enum" in schema and value not in schema["enum"]:
        return f"{name} must be one of {json.dumps(schema['enum'])}"
    kinds = _list_types(schema)
    if kinds and not any(kind not in JSON_TYPES or _is_of_type(kind, value) for kind in kinds):
        return f"{name} must be of type {' or '.join(kinds)}"
    if "array" in kinds and "items" in schema and isinstance(value, list):
        found = (find_mismatch(schema["items"], v, f"{path}[{i}]") for i, v in enumerate(value))
        return next(filter(None, found), "")
    return (
        _find_object_mismatch(schema, value, path)
        if "object" in kinds and isinstance(value, dict)
        else ""
    )


def convert_integers(schema: Any, value: Any) -> Any:
    """Convert integers that were written as 3.0, in a value that matches a schema."""
    if not isinstance(schema, dict):
        return value
    if options := schema.get("anyOf"):
        return convert_integers(next(o for o in options if not find_mismatch(o, value)), value)
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        return {key: convert_integers(properties.get(key), item) for key, item in value.items()}
    if isinstance(value, list):
        return [convert_integers(schema.get("items"), item) for item in value]
    kinds = _list_types(schema)
    if isinstance(value, float) and "integer" in kinds and "number" not in kinds:
        return int(value) if value.is_integer() else value
    return value


def _list_types(schema: dict[str, Any]) -> list[str]:
    """List the types that a schema names: one, several or none."""
    kinds = schema.get("type", [])
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _find_object_mismatch(schema: dict[str, Any], value: dict[str, Any], path: str) -> str:
    properties = schema.get("properties", {})
    for key in schema.get("required", ()):
        if key not in value:
            return f"{path + '.' if path else ''}{key} is missing"
    for key, item in value.items():
        place = f"{path}.{key}" if path else key
        if key in properties:
            if problem := find_mismatch(properties[key], item, place):
                return problem
        elif properties and not schema.get("additionalProperties"):
            return f"there is no {place}; there are {', '.join(properties)}"
    return ""


def _is_of_type(kind: str, value: Any) -> bool:
    if kind == "null":
        return value is None
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "number":
        return isinstance(value, int | float)
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return any(name == kind and isinstance(value, of) for of, name in JSON_TYPE_OF.items())
