"""The packages of pytest that lie in our own environment, for jails whose interpreter has none."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

from services.sandbox.isolation.outer_jail.interpreters import Interpreter

PACKAGES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")


def with_pytest(interpreter: Interpreter) -> Interpreter:
    """The same one with pytest imported: its own, or else ours, by packages alone. Where neither
    has it, jails say so.
    """
    warm = (*interpreter.warm, "pytest")
    places = [_place(name) for name in PACKAGES]
    if not all(places):
        return replace(interpreter, warm=warm)
    return replace(interpreter, warm=warm, packages=tuple(places))


def _place(package: str) -> str:
    """Its directory, or the file that it is; empty if it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return ""
    return next(iter(spec.submodule_search_locations or ()), spec.origin or "")
