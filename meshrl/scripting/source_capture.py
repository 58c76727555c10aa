"""Capture of functions and classes that no importable module has, as the text of a module.

A cell's or a script's code cannot be imported by the processes of a mesh. So the definitions that a
job names are copied as source, with the module-level names that they use: imports, functions,
classes and constants.
"""

from __future__ import annotations

import builtins
import importlib.util
import inspect
import logging
import re
import sys
import sysconfig
from pathlib import Path, PurePath
from types import FunctionType, ModuleType
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.bundle.source_locations import GENERATED_MODULE, format_mark
from meshrl.scripting.free_names import find_free_names
from meshrl.scripting.source_lookup import find_closed_name, find_definition, find_scope

MAX_CONSTANT_CHARS = 1 << 20  # of a constant that is copied into the module
CONTAINERS = (list, tuple, set, frozenset)
SCALARS = (bool, int, float, complex, str, bytes, type(None), type(...))
MOVE_FIX = "Create it inside the function, or move the code into a module file and import that"
HEADER = '''"""Code of a job that was started from Python."""

from __future__ import annotations

from math import inf, nan
'''


class CodeCapture:
    """Code that a job takes along: one generated module, and modules of the user's own."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}  # by name in the generated module
        self._parts: list[str] = []
        self.module_roots: dict[str, str] = {}  # directories of the user's own modules

    @property
    def text(self) -> str:
        """Text of the generated module; empty if all code is importable."""
        return "\n\n".join([HEADER, *self._parts]) + "\n" if self._parts else ""

    def add(self, key: str, value: Any) -> str:
        """Return the `module:name` by which processes of a mesh import a function or class.

        Raises ConfigError if it cannot be carried there.
        """
        if found := self._find_import(value):
            return ":".join(found)
        name = getattr(value, "__name__", "")
        if name == "<lambda>":
            raise ConfigError(
                f"{key} is a lambda, which has no name to import", fix="Define it with def"
            )
        if not isinstance(inspect.unwrap(value), FunctionType | type):
            raise ConfigError(
                f"{key} is an object of type {type(value).__name__}, not a function or class",
                fix="Pass its class, or a function (def) that creates or calls it",
            )
        self._define(name, value, key)
        return f"{GENERATED_MODULE}:{name}"

    def _define(
        self, name: str, value: Any, user: str, users_scope: dict[str, Any] | None = None
    ) -> None:
        """Add the definition of a function or class, after those that it uses."""
        original = inspect.unwrap(value)
        if closed := find_closed_name(original):
            raise ConfigError(
                f"{user}: {name} uses {closed!r}, a variable of the function around it",
                fix=f"Define {name} and {closed} at the top level of the cell or file",
            )
        if not self._claim(name, value, user):
            return
        found = find_definition(original)
        defined_name = original.__name__
        names = find_free_names(found.text, defined_name)
        scope = find_scope(original, users_scope)
        for used in names.needed:
            if used not in scope:
                if hasattr(builtins, used):
                    continue
                raise ConfigError(
                    f"{user}: {name} uses {used!r}, which is not defined",
                    fix="Define it first; in a notebook, run its cell",
                )
            self._carry(used, scope, names.attribute_paths, f"{user}: {name}")
        for used in names.in_annotations:
            if used in scope and self._is_simple(scope[used]):
                self._carry(used, scope, set(), f"{user}: {name}")
        alias = "" if defined_name == name else f"\n\n\n{name} = {defined_name}"
        self._parts.append(f"\n{format_mark(found.origin, found.line)}\n{found.text}{alias}")

    def _carry(self, name: str, scope: dict[str, Any], paths: set[str], user: str) -> None:
        """Add what binds `name` in the generated module to its value in `scope`."""
        value = scope[name]
        if isinstance(value, ModuleType) and value.__name__ != "__main__":
            if self._claim(name, value, user):
                self._note_module(value.__name__)
                alias = "" if name == value.__name__ else f" as {name}"
                self._parts.append(f"import {value.__name__}{alias}")
            for submodule in _list_submodules(name, value.__name__, paths):
                self._note_module(submodule)
                self._parts.append(f"import {submodule}")
        elif found := self._find_import(value):
            if self._claim(name, value, user):
                alias = "" if name == found[1] else f" as {name}"
                self._parts.append(f"from {found[0]} import {found[1]}{alias}")
        elif isinstance(inspect.unwrap(value), FunctionType | type):
            if value.__name__ == "<lambda>":
                raise ConfigError(
                    f"{user} uses {name!r}, which is a lambda", fix="Define it with def"
                )
            self._define(name, value, user, scope)
        else:
            text = format_constant(value)
            if not text or len(text) > MAX_CONSTANT_CHARS:
                why = f"is over {MAX_CONSTANT_CHARS} characters long" if text else "is no constant"
                raise ConfigError(
                    f"{user} uses {name!r}, whose value of type {type(value).__name__} {why}, so "
                    "other processes cannot have it",
                    fix=MOVE_FIX,
                )
            if self._claim(name, value, user):
                self._parts.append(f"{name} = {text}")

    def _claim(self, name: str, value: Any, user: str) -> bool:
        """Return True if a name is new; raise ConfigError if it is bound to something else."""
        if name not in self._values:
            self._values[name] = value
            return True
        if self._values[name] is not value:
            raise ConfigError(
                f"{user}: there are two different objects named {name!r} in the job's code",
                fix="Rename one of them",
            )
        return False

    def _is_simple(self, value: Any) -> bool:
        """Return True for a value that needs no further definitions."""
        return isinstance(value, ModuleType) or bool(self._find_import(value))

    def _find_import(self, value: Any) -> tuple[str, str] | None:
        """Return (module, name) by which any process imports a value; None if none does."""
        module = getattr(value, "__module__", None)
        name = getattr(value, "__qualname__", None)
        if module == "typing":
            name = name or getattr(value, "_name", None)
        if not isinstance(module, str) or not isinstance(name, str) or not name.isidentifier():
            return None
        if module == "__main__" or getattr(sys.modules.get(module), name, None) is not value:
            return None
        if getattr(sys.modules[module], "__spec__", None) is None:
            return None
        self._note_module(module)
        return module, name

    def _note_module(self, module: str) -> None:
        """Record the directory of a module that is not installed."""
        file = getattr(sys.modules[module], "__file__", None) or ""
        if file.endswith(".py") and not is_installed(Path(file)):
            parts = module.count(".") + (2 if Path(file).name == "__init__.py" else 1)
            self.module_roots[module] = str(Path(file).resolve().parents[parts - 1])


def is_installed(path: Path) -> bool:
    """Return True for a file of the standard library, an installed package or MeshRL."""
    if {"site-packages", "dist-packages"} & set(path.parts):
        return True
    meshrl = importlib.util.find_spec("meshrl")
    roots = [*(meshrl.submodule_search_locations or [] if meshrl else [])]
    roots += [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    return any(path.resolve().is_relative_to(Path(root).resolve()) for root in roots)


def format_constant(value: Any) -> str:
    """Return an expression that gives an equal constant; empty if there is none."""
    if isinstance(value, re.Pattern):
        return f"__import__('re').compile({value.pattern!r}, {value.flags})"
    if isinstance(value, logging.Logger):
        return f"__import__('logging').getLogger({value.name!r})"
    if isinstance(value, PurePath):
        return f"__import__('pathlib').{type(value).__name__}({str(value)!r})"
    try:
        return repr(value) if _is_literal(value) else ""
    except RecursionError:
        return ""


def _is_literal(value: Any) -> bool:
    if type(value) is dict:
        return all(_is_literal(k) and _is_literal(v) for k, v in value.items())
    if type(value) in CONTAINERS:
        return all(map(_is_literal, value))
    return type(value) in SCALARS


def _list_submodules(name: str, module: str, paths: set[str]) -> list[str]:
    """Return the imported submodules that attribute paths from `name` pass through."""
    found: set[str] = set()
    for path in paths:
        root, *attributes = path.split(".")
        reached = module
        for attribute in attributes if root == name else ():
            reached = f"{reached}.{attribute}"
            if reached not in sys.modules:
                break
            found.add(reached)
    return sorted(found)
