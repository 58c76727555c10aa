"""Notices that a program has changed what judges it: pytest, unittest, built-in functions.

It runs in the program's own interpreter, where nothing is safe from a program that looks for it;
it keeps the usual ways of patching a verdict from paying.
"""

from __future__ import annotations

import sys
import types
from typing import Any

PACKAGES = ("_pytest", "pytest", "pluggy", "unittest", "jail")
MODULES = ("builtins", "math", "operator")
REPLACED = {"input", "print", "open", "_"}  # what tests themselves replace and leave so
CALLABLE = (types.FunctionType, types.BuiltinFunctionType, type, classmethod, staticmethod)


class VerdictGuard:
    """Remembers functions and classes, and says whether they are the same."""

    def __init__(self) -> None:
        self._seen: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._plugins: Any = None
        self._names: set[str] = set()

    def look(self, plugins: Any) -> None:
        """Remembers them as they are. `plugins` is pytest's plugin manager."""
        self._plugins, self._names = plugins, _names(plugins)
        classes: set[int] = set()
        for name, module in list(sys.modules.items()):
            if name in MODULES or name.partition(".")[0] in PACKAGES:
                self._look_in(vars(module), classes, name.partition(".")[0])

    def _look_in(self, names: Any, classes: set[int], package: str) -> None:
        for name, value in list(names.items()):
            if not isinstance(value, (*CALLABLE, property)) or name in REPLACED:
                continue
            self._seen.append((names, name, value, getattr(value, "__code__", None)))
            if isinstance(value, type) and id(value) not in classes:
                classes.add(id(value))
                if value.__module__.partition(".")[0] == package and package != "builtins":
                    self._look_in(vars(value), classes, package)

    def unchanged(self) -> bool:
        """Whether all of it is what it was, with the same plugins, and nothing is traced."""
        for names, name, value, code in self._seen:
            if names.get(name) is not value or getattr(value, "__code__", None) is not code:
                return False
        traced = sys.gettrace() is not None or sys.getprofile() is not None
        return not traced and _names(self._plugins) == self._names


def _names(plugins: Any) -> set[str]:
    """The names of plugins that are there; those of collected modules are not among them."""
    return {name for name, plugin in plugins.list_name_plugin() if plugin is not None}


def code_of(item: Any) -> Any:
    """The code of a collected test; None for one that is no function."""
    return getattr(getattr(item, "function", None), "__code__", None)
