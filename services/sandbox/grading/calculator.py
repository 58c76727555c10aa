"""Calculator tool: evaluates arithmetic, and rejects slow expressions and values that are no
numbers.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

DIGITS = 4000  # digits of a whole number; more is an error
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


class InvalidExpression(Exception):
    """Error raised for an invalid or too large expression."""


def calculate(expression: str) -> str:
    """Return the value, or the error as `error: ...`, which the model reads."""
    try:
        if not isinstance(expression, str) or len(expression) > CHARACTERS:
            raise InvalidExpression(f"an expression is a text of at most {CHARACTERS} characters")
        value = _evaluate(ast.parse(expression.replace("^", "**").strip(), mode="eval").body)
        return f"{value:.12g}" if isinstance(value, float) else str(value)
    except (InvalidExpression, ValueError, TypeError, ArithmeticError, SyntaxError) as error:
        return f"error: {error}"
    except (RecursionError, MemoryError):
        return "error: too deeply nested"


def _evaluate(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _check_size(node.value)
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _power(_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return _check_size(OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right)))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return _check_size(OPERATORS[type(node.op)](_evaluate(node.operand)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id not in FUNCTIONS:
            raise InvalidExpression(f"no function {node.func.id}; there are {', '.join(FUNCTIONS)}")
        return _check_size(FUNCTIONS[node.func.id](*map(_evaluate, node.args)))
    raise InvalidExpression("an expression has numbers, + - * / // % **, brackets and functions")


def _power(base: int | float, exponent: int | float) -> int | float:
    is_integer_power = isinstance(base, int) and isinstance(exponent, int) and exponent > 0
    if is_integer_power and abs(base) > 1 and exponent * math.log10(abs(base)) > DIGITS:
        raise InvalidExpression(f"a number of over {DIGITS} digits")
    value = base**exponent
    if isinstance(value, complex):
        raise InvalidExpression("not a real number")
    return _check_size(value)


def _check_size(value: Any) -> int | float:
    if isinstance(value, int) and value.bit_length() > DIGITS * 3.33:
        raise InvalidExpression(f"a number of over {DIGITS} digits")
    if not isinstance(value, int | float):
        raise InvalidExpression("not a number")
    return value
