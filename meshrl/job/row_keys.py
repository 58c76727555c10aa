"""Row keys that the job's rewards read, and the rows that lack one.

A built-in reward's options name them. For the author's own reward its source does: `row["key"]` in
a statement that every call reaches, where no earlier one returns because of the row or tests which
keys it has.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from meshrl.common.base.errors import ConfigError
from meshrl.common.grading.row_values import format_keys, has_value
from meshrl.common.job import builtin
from meshrl.common.job.config import JobConfig, RewardPartConfig
from meshrl.job import references
from meshrl.job.row_files.dataset_row import DatasetRow

ANSWER_KEY = "answer"  # the row's key, and the group of a pattern, that rewards compare with


@dataclass(frozen=True)
class RequiredKey:
    key: str
    reader: str  # what reads it, for messages
    job_key: str  # the key of the job file that names the reward
    key_option: str = ""  # the option that names another key; empty: there is none

    def has_value(self, row: Mapping[str, Any]) -> bool:
        """Return True if a row has the key; only keys that an option names may be dotted."""
        return has_value(row, self.key) if self.key_option else self.key in row


def find_required_keys(config: JobConfig, base: Path) -> list[RequiredKey]:
    """Return the keys that all rows must have, with their readers."""
    found: list[RequiredKey] = []
    for i, part in enumerate(config.reward.reward_parts):
        table = f"reward.parts[{i}]" if config.reward.parts else "reward"
        if builtin.is_builtin(part.use):
            found += _find_builtin_keys(part, table)
        else:
            found += _find_custom_keys(part.use, f"{table}.use", base)
    return found


def find_missing_key(row: DatasetRow, keys: list[RequiredKey]) -> tuple[str, str, str] | None:
    """Return (setting, error, fix) for the first key that a row lacks."""
    for needed in keys:
        if not needed.has_value(row.value):
            present_keys = format_keys(row.value)
            wrong = f"{row.location}: the row has no {needed.key!r}, which {needed.reader} reads"
            choose = f", or set {needed.key_option} to the row's key" if needed.key_option else ""
            return (
                needed.job_key,
                f"{wrong}; it has {present_keys}",
                f"Add the key to every row{choose}",
            )
    return None


def _find_builtin_keys(part: RewardPartConfig, table: str) -> Iterator[RequiredKey]:
    by, options = f"the reward {part.use!r}", part.options
    name = "tests" if part.use == "code_tests" else ANSWER_KEY
    known = builtin.REWARDS.get(part.use)
    if known is None or name not in known.options:
        return
    if part.use == "regex" and not has_answer_group(options.get("pattern")):
        return
    key = options.get(name, name)
    if isinstance(key, str):
        yield RequiredKey(key, by, f"{table}.use", f"{table}.options.{name}")


def has_answer_group(pattern: object) -> bool:
    """Return True if a pattern has the group that is compared with the row."""
    try:
        return isinstance(pattern, str) and ANSWER_KEY in re.compile(pattern).groupindex
    except re.error:  # reported by the check of options
        return False


def _find_custom_keys(use: str, setting: str, base: Path) -> Iterator[RequiredKey]:
    module, _, name = use.partition(":")
    path = references.find_module_file(base, module)
    try:
        tree = references.parse_module(path) if path else ast.Module([], [])
    except ConfigError:  # reported by the check of references
        return
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            for key, line in find_unconditional_keys(node):
                yield RequiredKey(key, f"{path}, line {line},", setting)


def find_unconditional_keys(function: ast.FunctionDef) -> Iterator[tuple[str, int]]:
    """Yield (key, line) of each `row["key"]` that every call of a function reaches.

    `row` is its first parameter.
    """
    parameters = [*function.args.posonlyargs, *function.args.args]
    if not parameters or function.decorator_list:
        return
    row = parameters[0].arg
    for statement in function.body:
        if _uses_whole_row(statement, row):
            return  # what follows may depend on what the row has
        if isinstance(statement, ast.If | ast.Try | ast.Match | ast.For | ast.While):
            first = {ast.If: "test", ast.Match: "subject", ast.For: "iter"}.get(type(statement))
            always = [getattr(statement, first)] if first else []
            yield from _find_subscripts(always, row)
            if any(isinstance(node, ast.Return) for node in ast.walk(statement)) and any(
                isinstance(node, ast.Name) and node.id == row
                for part in always
                for node in ast.walk(part)
            ):
                return
            continue
        yield from _find_subscripts([statement], row)
        if isinstance(statement, ast.Return | ast.Raise):
            return


def _find_subscripts(parts: list[ast.AST], row: str) -> Iterator[tuple[str, int]]:
    """Yield the keys in completely evaluated parts, without those in parts that may be skipped."""
    pending = list(parts)
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.BoolOp):
            pending.append(node.values[0])
        elif isinstance(node, ast.IfExp):
            pending.append(node.test)
        elif isinstance(node, ast.Lambda | ast.FunctionDef | ast.ClassDef | _COMPREHENSIONS):
            continue
        else:
            key = node.slice if _is_row_subscript(node, row) else None
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value, key.lineno
            pending.extend(ast.iter_child_nodes(node))


_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def _is_row_subscript(node: ast.AST, row: str) -> TypeGuard[ast.Subscript]:
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Load)
        and isinstance(node.value, ast.Name)
        and node.value.id == row
    )


def _uses_whole_row(statement: ast.stmt, row: str) -> bool:
    """Return True if a statement uses the row otherwise than by `row[key]`.

    It may test which keys the row has, or change it.
    """
    subscripted_ids = {
        id(node.value) for node in ast.walk(statement) if _is_row_subscript(node, row)
    }
    return any(
        isinstance(node, ast.Name) and node.id == row and id(node) not in subscripted_ids
        for node in ast.walk(statement)
    )
