"""Imports that a program is missing and that judges of `class Solution` provide.

LeetCode, and after it the harness of LiveCodeBench (`import_string` of lcb_runner), run programs
behind star imports of the modules below. Here only the names are imported that a program uses and
does not bind itself, so a program with all its imports runs as it is.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import warnings

from common.grading.cases import used_and_bound

# In LiveCodeBench's order: of a name in two modules, the later module's is taken.
MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "sys", "json", "typing"),
)


def prelude_of(program: str) -> str:
    """Return the import statements that `program` needs and lacks; empty if it is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in its texts
            tree = ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    used, bound = used_and_bound(tree)
    modules: set[str] = set()  # of which it takes attributes
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            modules.add(node.value.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used |= _quoted(node.value)
    lines = []
    for name in sorted(used - bound - vars(builtins).keys()):
        source = _provided().get(name)
        if name in MODULES and (name in modules or source is None):
            lines.append(f"import {name}\n")
        elif source is not None:  # an older interpreter may lack it
            lines.append(f"try:\n from {source} import {name}\nexcept ImportError: pass\n")
    return "".join(lines)


def _quoted(text: str) -> set[str]:
    """Names in a text that may be an annotation, as `"List[int]"`."""
    if not text[:1].isupper() or len(text) > 200:
        return set()
    try:
        return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()


@functools.cache
def _provided() -> dict[str, str]:
    """The module of each name that the star imports bring."""
    found: dict[str, str] = {}
    for module in MODULES:
        names = vars(importlib.import_module(module))
        public = names.get("__all__") or [name for name in names if not name.startswith("_")]
        found |= dict.fromkeys(public, module)
    return found
