"""Validation of TOML documents against dataclasses: types, ranges, choices and known keys.

Validation is by pydantic; this module translates its errors into the terms of the file.
"""

from __future__ import annotations

import copy
import difflib
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, time
from types import UnionType
from typing import Any, Generic, TypeVar, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.type_hints import resolve_hints
from meshrl.common.job.config import JobConfig
from meshrl.common.job.constraints import NestedValueError
from meshrl.common.job.familiar_keys import FAMILIAR_KEYS, FAMILIAR_VALUES
from meshrl.common.job.renamed_keys import RENAMED_JOB_KEYS, describe_old_keys, replace_old_keys

MakeError = Callable[[str, str, str], ConfigError]  # key, message, fix
T = TypeVar("T")
_BOUND_ERRORS = {  # pydantic's error type -> (phrase, name of the bound in the error)
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}
_TYPE_ERRORS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "bool_type": "true or false",
    "dict_type": "a table",
    "dataclass_type": "a table",
}
_FIXED_MESSAGES = {
    "missing": "is missing",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
}
_PLURALS = {int: "whole numbers", str: "strings", float: "numbers"}
_SCALAR = re.compile(r"true|false|[+-]?\d[\d_]*(\.\d+)?([eE][+-]?\d+)?")


class Schema(Generic[T]):
    """Schema of one kind of file: the dataclass of its top level, whose fields are keys and
    tables.
    """

    def __init__(
        self, top: type[T], fallback_fix: str, renamed: Mapping[str, str] | None = None
    ) -> None:
        """Create a schema.

        `fallback_fix` is the fix for an unknown key without a similar valid key; `renamed` has the
        new names of old keys, which are accepted.
        """
        self._top, self._fallback_fix, self._renamed = top, fallback_fix, renamed or {}
        # dotted key -> type, for every key of a file; tables map to their dataclass
        self.types_by_key = _collect_types(top)
        self._adapter = TypeAdapter(top)

    def validate(self, document: dict[str, Any], make_error: MakeError) -> T:
        """Return the value that a document describes.

        For an invalid document, raise `make_error` of its first mistake. Unknown keys come first,
        as they often explain a missing key.
        """
        document = copy.deepcopy(document)
        old_by_new = {new: old for old, new in replace_old_keys(document, self._renamed).items()}
        if old_by_new:
            make_error = _locate_old_keys(make_error, old_by_new)
        try:
            return self._adapter.validate_python(document)
        except ValidationError as error:
            errors = error.errors(include_url=False)
        first = min(errors, key=lambda e: _error_sort_key(document, e))
        if first["type"] == "unexpected_keyword_argument":
            raise self._unknown_key_error(
                self._format_key(first["loc"]), first["input"], make_error
            )
        key = self._format_key(first["loc"])
        requirements = dict.fromkeys(
            self._describe_requirement(key, e) for e in errors if self._format_key(e["loc"]) == key
        )
        raise make_error(
            *self._format_error(key, first, ", or ".join(requirements)),
            self._suggest_fix(key, first),
        )

    def describe_old_keys(self, document: dict[str, Any]) -> list[str]:
        """Return a notice for each old key of a document."""
        return describe_old_keys(replace_old_keys(copy.deepcopy(document), self._renamed))

    def find_nearest_key(self, key: str) -> str:
        """Return the valid key that a mistyped one most likely means; empty if none is close."""
        known = list(self.types_by_key)
        if key in known:
            return key
        table, _, last = key.rpartition(".")
        plain = last.replace("-", "_").lower()
        familiar = FAMILIAR_KEYS.get(key) or FAMILIAR_KEYS.get(plain, "")
        siblings = {name: f"{table}.{name}" if table else name for name in self._list_keys(table)}
        elsewhere = {k.rpartition(".")[2]: k for k in reversed(known)}
        if familiar in self.types_by_key and last not in siblings:
            return familiar
        for names, cutoff in ((siblings, 0.75), (elsewhere, 0.85)):
            if matches := difflib.get_close_matches(last, names, n=1, cutoff=cutoff):
                return names[matches[0]]
        present = [name for name, key in FAMILIAR_KEYS.items() if key in known]
        if near := difflib.get_close_matches(last, present, n=1, cutoff=0.85):
            return FAMILIAR_KEYS[near[0]]
        part = [name for name in siblings if name.startswith(last) or name.endswith(f"_{last}")]
        return siblings[part[0]] if last and part else ""

    def _format_error(self, key: str, error: ErrorDetails, requirement: str) -> tuple[str, str]:
        """Return (key of the error, sentence)."""
        sort, value = error["type"], _format_value(error["input"])
        misfit = error.get("ctx", {}).get("error")
        if isinstance(misfit, NestedValueError):
            key = f"{key}.{misfit.subkey}"
        if sort in _TYPE_ERRORS or sort == "list_type":
            return key, f"{key} must be {requirement}, not {value}"
        if sort in _FIXED_MESSAGES or isinstance(misfit, NestedValueError):
            return key, f"{key} {requirement}"
        return key, f"{key} = {value} {requirement}"

    def _list_keys(self, table: str) -> list[str]:
        """Return the keys of a table, which may be in a list; none if the table does not exist."""
        kind = self.types_by_key.get(table.partition("[")[0], None if table else self._top)
        kind = get_args(kind)[0] if get_origin(kind) is list else kind
        return [field.name for field in fields(kind)] if is_dataclass(kind) else []

    def _find_type(self, key: str) -> Any:
        """Return the type of a key, which may be of a table in a list."""
        found: Any = self.types_by_key.get(key)
        if found is not None:
            return found
        found = self._top
        for part in re.sub(r"\[\d+\]", "", key).split("."):
            found = resolve_hints(found)[part]
            found = get_args(found)[0] if get_origin(found) is list else found
        return found

    def _format_key(self, loc: tuple[int | str, ...]) -> str:
        """Return the dotted key of a location, without the union member that pydantic tried."""
        key = ""
        for part in loc:
            if isinstance(self.types_by_key.get(key), UnionType):
                break
            key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else part
        return key

    def _unknown_key_error(self, key: str, value: Any, fail: MakeError) -> ConfigError:
        """Return the error of an unknown key.

        For a table without a similar valid key, name the table's first key.
        """
        while not (guess := self.find_nearest_key(key)) and isinstance(value, dict) and value:
            name, value = next(iter(value.items()))
            key = f"{key}.{name}"
        table = key.rpartition(".")[0]
        if guess:
            fix = f"Did you mean {guess}?"
        elif table and (names := self._list_keys(table)):
            fix = f"{table} has {', '.join(names)}"
        else:
            fix = self._fallback_fix
        return fail(key, f"unknown key {key}", fix)

    def _describe_requirement(self, key: str, error: ErrorDetails) -> str:
        """Return the requirement that a value violates, as text."""
        sort = error["type"]
        if sort in _TYPE_ERRORS:
            return _TYPE_ERRORS[sort]
        if sort == "list_type":
            return f"a list of {_plural_of_items(self.types_by_key.get(key))}"
        if sort == "literal_error":
            choices = [choice or "''" for choice in get_args(self._find_type(key))]
            return f"must be {'one of ' if len(choices) > 1 else ''}{', '.join(choices)}"
        if sort in _BOUND_ERRORS:
            words, name = _BOUND_ERRORS[sort]
            return f"must be {words} {str(error['ctx'][name]).removesuffix('.0')}"
        if sort == "value_error":
            return str(error["ctx"]["error"])
        return _FIXED_MESSAGES.get(sort, error["msg"])

    def _suggest_fix(self, key: str, error: ErrorDetails) -> str:
        sort, value = error["type"], error["input"]
        if meant := FAMILIAR_VALUES.get((key, str(value).lower())):
            return meant
        if sort == "literal_error":
            close = difflib.get_close_matches(
                str(value).lower(), get_args(self._find_type(key)), 1, 0.75
            )
            return f"Did you mean {close[0]}?" if close else ""
        familiar = FAMILIAR_KEYS.get(key, "")
        if sort == "dataclass_type" and isinstance(value, str) and familiar.startswith(f"{key}."):
            return f"Did you mean {familiar}?"
        if sort == "dataclass_type":
            table = f"[[{key.rpartition('[')[0]}]]" if key.endswith("]") else f"[{key}]"
            return f"Write {table}, and put its keys below it"
        if sort == "list_type":
            if _plural_of_items(self.types_by_key.get(key)) == "tables":
                return f"Write [[{key}]] for each table"
            return f"Write [{_format_value(value)}]"
        if isinstance(value, str) and _SCALAR.fullmatch(value) and sort in _TYPE_ERRORS:
            return f"Write {value} without quotes"
        return ""


def _locate_old_keys(make_error: MakeError, old_by_new: Mapping[str, str]) -> MakeError:
    """Return `make_error` that looks up a renamed key under the name that the file has."""

    def make(key: str, message: str, fix: str) -> ConfigError:
        name = key.partition("[")[0]
        return make_error(old_by_new.get(name, name) + key[len(name) :], message, fix)

    return make


def _collect_types(cls: type[Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    hints = resolve_hints(cls)
    for field in fields(cls):
        kind = hints[field.name]
        found[prefix + field.name] = kind
        if is_dataclass(kind) and isinstance(kind, type):
            found |= _collect_types(kind, f"{prefix}{field.name}.")
    return found


def _error_sort_key(document: Any, error: ErrorDetails) -> tuple[bool, list[int]]:
    """Return a sort key: unknown keys first, then in the document's order, missing keys last."""
    places = []
    for part in error["loc"]:
        if isinstance(document, dict):
            places.append([*document, part].index(part))
        elif isinstance(part, int):
            places.append(part)
        is_present = isinstance(part, int) or (isinstance(document, dict) and part in document)
        document = document[part] if is_present else None
    return error["type"] != "unexpected_keyword_argument", places


def _plural_of_items(kind: Any) -> str:
    (of,) = get_args(kind) if get_origin(kind) is list else (str,)
    return "tables" if is_dataclass(of) else _PLURALS[of]


def _format_value(value: Any) -> str:
    """Return a value as in TOML, abbreviated if it is long."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    if isinstance(value, date | time):
        return f"the {type(value).__name__} {value}"
    return reprlib.repr(value)


JOB_SCHEMA = Schema(JobConfig, "`meshrl run --dry-run --all` prints all keys", RENAMED_JOB_KEYS)
