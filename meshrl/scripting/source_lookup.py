"""Source text of functions and classes that a notebook's cell or a script defines."""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import sys
import textwrap
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, TypeGuard

from meshrl.common.base.errors import ConfigError

DefinitionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign


@dataclass(frozen=True)
class Definition:
    """Statement that defines a function or a class."""

    text: str  # with its decorators, without the indentation of its surroundings
    origin: str  # file name, or the cell as `In[3]`
    line: int  # of the text's first line there, from 1


def find_definition(value: Any) -> Definition:
    """Return the statement that defined a function or a class.

    Raises ConfigError if its source is not available.
    """
    name = value.__qualname__.rpartition(".")[2]
    places = _list_class_places(value) if isinstance(value, type) else _list_function_place(value)
    for file, line in places:
        for node in _find_nodes(file, name, isinstance(value, type)):
            decorators = getattr(node, "decorator_list", [])
            first, last = min(n.lineno for n in (node, *decorators)), node.end_lineno or 0
            if line == 0 or first <= line <= last:
                text = "".join(linecache.getlines(file)[first - 1 : last])
                return Definition(_dedent(text, node), name_origin(file), first)
    raise ConfigError(
        f"the source of {name} is not available, or its file has changed since",
        fix=f"Define {name} in a notebook's cell, or in a file that is imported again",
    )


def find_scope(value: Any, users_scope: dict[str, Any] | None) -> dict[str, Any]:
    """Return the module-level names that the code of a function or class sees.

    A class without functions has those of its user, or of its module.
    """
    functions = [value] if not isinstance(value, type) else _list_methods(value)
    if functions:
        return functions[0].__globals__
    return vars(sys.modules[value.__module__]) if users_scope is None else users_scope


def find_closed_name(value: Any) -> str:
    """Return a variable of a surrounding function that the code uses; empty if there is none."""
    functions = [value] if not isinstance(value, type) else _list_methods(value)
    names = (n for each in functions for n in each.__code__.co_freevars if n != "__class__")
    return next(names, "")


def name_origin(file: str) -> str:
    """Return the name of a source file for messages; of a notebook's cell `In[3]`."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    format_name = getattr(getattr(shell, "compile", None), "format_code_name", None)
    label = format_name(file) if format_name is not None else None
    return str(label[1]) if label else os.path.basename(file)


def _list_function_place(function: Any) -> list[tuple[str, int]]:
    code: CodeType = function.__code__
    return [(_resolve_file(code.co_filename), code.co_firstlineno)]


def _list_class_places(cls: type[Any]) -> list[tuple[str, int]]:
    """Return the places where a class may be defined, the most likely one first.

    A class does not record its file, but its methods do. Line 0: unknown.
    """
    for method in _list_methods(cls):
        return _list_function_place(method)
    # Cells have no time of modification. The last executed one comes last.
    cells = [name for name, entry in linecache.cache.items() if len(entry) > 1 and not entry[1]]
    module_file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return [(file, 0) for file in (*reversed(cells), module_file) if file]


def _list_methods(cls: type[Any]) -> list[FunctionType]:
    """Return the functions in a class statement, without generated ones."""
    values = (getattr(each, "fget", None) or each for each in vars(cls).values())
    methods = (inspect.unwrap(getattr(each, "__func__", each)) for each in values)
    return [
        each
        for each in methods
        if isinstance(each, FunctionType)
        and each.__qualname__.startswith(f"{cls.__qualname__}.")
        and linecache.getlines(_resolve_file(each.__code__.co_filename))
    ]


def _resolve_file(file: str) -> str:
    """Return the file of a code object; a script's may be relative to an earlier directory."""
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    if main_file and not os.path.isabs(file) and os.path.basename(file) == file:
        return main_file if os.path.basename(main_file) == file else file
    return file


def _find_nodes(file: str, name: str, is_class: bool) -> list[DefinitionNode]:
    """Return the definitions of a name in a file, the last one first."""
    source = "".join(linecache.getlines(file))
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT  # cells may await
    try:
        tree = compile(source, file, "exec", flags=flags, dont_inherit=True)
    except (SyntaxError, ValueError):
        return []
    return [node for node in reversed(list(ast.walk(tree))) if _defines(node, name, is_class)]


def _defines(node: ast.AST, name: str, is_class: bool) -> TypeGuard[DefinitionNode]:
    """Return True for a statement that defines a function, or a class, also by a call."""
    if isinstance(node, ast.Assign):
        targets = [t.id for t in node.targets if isinstance(t, ast.Name)]
        return is_class and targets == [name] and isinstance(node.value, ast.Call)
    types = ast.ClassDef if is_class else ast.FunctionDef | ast.AsyncFunctionDef
    return isinstance(node, types) and node.name == name


def _dedent(text: str, node: DefinitionNode) -> str:
    text = textwrap.dedent(text).rstrip()
    try:
        ast.parse(text)
    except SyntaxError:  # a text in the code is indented less than the code
        return ast.unparse(node)
    return text
