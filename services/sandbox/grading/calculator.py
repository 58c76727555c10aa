"""The calculator tool: evaluates arithmetic, and refuses what takes long or is not a number."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

DIGITS = 4000  # most in a whole number; more is an error
CHARACTERS = 1000
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_MATH = "sqrt exp log log2 log10 sin cos tan asin acos atan floor ceil gcd"
FUNCTIONS: dict[str, Callable[..., Any]] = {name: getattr(math, name) for name in _MATH.split()}
FUNCTIONS |= {"abs": abs, "round": round, "min": min, "max": max}
CONSTANTS = {"pi": math.pi, "e": math.e}


class Unreadable(Exception):
    """An expression that is none, or too large."""


def calculator(expression: str) -> str:
    """The value, or what is wrong as `error: ...`, which the model reads."""
    try:
        if not isinstance(expression, str) or len(expression) > CHARACTERS:
            raise Unreadable(f"an expression is a text of at most {CHARACTERS} characters")
        value = _value(ast.parse(expression.replace("^", "**").strip(), mode="eval").body)
        return f"{value:.12g}" if isinstance(value, float) else str(value)
    except (Unreadable, ValueError, TypeError, ArithmeticError, SyntaxError) as error:
        return f"error: {error}"
    except (RecursionError, MemoryError):
        return "error: too deeply nested"


def _value(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _power(_value(node.left), _value(node.right))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return _bounded(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return _bounded(OPERATORS[type(node.op)](_value(node.operand)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id not in FUNCTIONS:
            raise Unreadable(f"no function {node.func.id}; there are {', '.join(FUNCTIONS)}")
        return _bounded(FUNCTIONS[node.func.id](*map(_value, node.args)))
    raise Unreadable("an expression has numbers, + - * / // % **, brackets and functions")


def _power(base: int | float, exponent: int | float) -> int | float:
    whole = isinstance(base, int) and isinstance(exponent, int) and exponent > 0
    if whole and abs(base) > 1 and exponent * math.log10(abs(base)) > DIGITS:
        raise Unreadable(f"a number of over {DIGITS} digits")
    value = base**exponent
    if isinstance(value, complex):
        raise Unreadable("not a real number")
    return _bounded(value)


def _bounded(value: Any) -> int | float:
    if isinstance(value, int) and value.bit_length() > DIGITS * 3.33:
        raise Unreadable(f"a number of over {DIGITS} digits")
    if not isinstance(value, int | float):
        raise Unreadable("not a number")
    return value
