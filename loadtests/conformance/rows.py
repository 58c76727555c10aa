"""All rows of the conformance set: every module of a style's folder holds some in `ROWS`."""

from __future__ import annotations

import importlib
import pkgutil

import loadtests.conformance as place
from loadtests.conformance.row import Row

STYLES = ("humaneval", "mbpp", "apps", "livecodebench", "unit")


def of(style: str) -> list[Row]:
    """A style's rows, in the order of the modules' names."""
    package = importlib.import_module(f"{place.__name__}.{style}")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    return [row for module in modules for row in module.ROWS]


ALL = [row for style in STYLES for row in of(style)]
