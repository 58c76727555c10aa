"""Reads which arguments of tests `pytest.mark.parametrize` gives, as far as the source says."""

from __future__ import annotations

import ast

ANY = "*"  # in place of a name: the source does not say which


def given(mark: ast.Call) -> set[str]:
    """The arguments that a call of `parametrize` gives; ANY where the source does not say which."""
    by_name = (keyword.value for keyword in mark.keywords if keyword.arg == "argnames")
    named = mark.args[0] if mark.args else next(by_name, None)
    if isinstance(named, ast.Constant) and isinstance(named.value, str):
        return {name.strip() for name in named.value.split(",")}
    if isinstance(named, ast.List | ast.Tuple):
        return {str(e.value) if isinstance(e, ast.Constant) else ANY for e in named.elts}
    return {ANY}


def elsewhere(tree: ast.Module) -> bool:
    """Whether a mark is made anywhere but as a decorator, as in `pytestmark = ...`: then which
    tests have it is not certain.
    """
    decorating = {
        id(decorator.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
    }
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "parametrize"
        and id(node) not in decorating
        for node in ast.walk(tree)
    )
