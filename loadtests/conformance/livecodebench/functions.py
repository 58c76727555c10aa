"""Functions that are called: nested values, tables, texts of digits."""

from __future__ import annotations

from loadtests.conformance.row import calls

ROWS = [
    calls(
        "Solution.accountTable",
        """
class Solution:
    def accountTable(self, moves: list[list]) -> dict:
        out = {}
        for name, amount in moves:
            out[name] = round(out.get(name, 0) + amount, 2)
        return {name: total for name, total in out.items() if total}
""",
        """
[
[[[["a", 1.1], ["a", 2.2]]], {"a": 3.3}],
[[[["b", 1], ["b", -1]]], {}],
[[[]], {}],
[[[["x", 2], ["y", 0.5]]], {"x": 2, "y": 0.5}]
]
""",
        (" if total}", "}"),
        ("amount, 2)", "amount)"),
    ),
    calls(
        "Solution.nearestPoints",
        """
class Solution:
    def nearestPoints(self, points, k):
        return sorted(points, key=lambda p: (p[0] ** 2 + p[1] ** 2, p))[:k]
""",
        """
[
[[[[1, 3], [-2, 2]], 1], [[-2, 2]]],
[[[[1, 0], [0, 1]], 2], [[0, 1], [1, 0]]],
[[[], 1], []],
[[[[-5, 0], [1, 1]], 1], [[1, 1]]]
]
""",
        ("p[0] ** 2 + p[1] ** 2, p)", "p[0] + p[1], p)"),
        ("p[1] ** 2, p)", "p[1] ** 2)"),
    ),
    calls(
        "collect_sets",
        """
def collect_sets(a, b):
    return {"both": set(a) & set(b), "only": (sorted(set(a) - set(b)), sorted(set(b) - set(a)))}
""",
        """
[
[[[3, 1, 2], [2, 3, 4]], {"both": [2, 3], "only": [[1], [4]]}],
[[[], []], {"both": [], "only": [[], []]}],
[[[1, 1], [1]], {"both": [1], "only": [[], []]}]
]
""",
        ("set(a) & set(b)", "[x for x in a if x in b]"),
        ("sorted(set(b) - set(a))", "sorted(set(b) ^ set(a))"),
    ),
    calls(
        "precise_sqrt",
        """
from decimal import Decimal, getcontext


def precise_sqrt(n, digits):
    if n < 0:
        return None
    getcontext().prec = digits + 20
    root = Decimal(n).sqrt()
    return str(root.quantize(Decimal(1).scaleb(-digits), rounding="ROUND_DOWN"))
""",
        """
[
[[2, 10], "1.4142135623"],
[[4, 2], "2.00"],
[[-1, 3], null],
[[0, 1], "0.0"],
[[2, 30], "1.414213562373095048801688724209"]
]
""",
        ('rounding="ROUND_DOWN"', 'rounding="ROUND_HALF_UP"'),
        ("return None", 'return "nan"'),
    ),
    calls(
        "nested_total",
        """
def nested_total(value):
    if isinstance(value, bool) or value is None:
        return 0
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, str):
        return len(value)
    parts = value.values() if isinstance(value, dict) else value
    return sum(nested_total(part) for part in parts)
""",
        """
[
[[[1, [2.5, "abc"], {"k": [true, null]}]], 6.5],
[[[]], 0],
[[{"a": {"b": 9007199254740993}}], 9007199254740993],
[["é"], 1]
]
""",
        ("isinstance(value, bool) or value is None", "value is None"),
        (
            "return sum(nested_total(part) for part in parts)",
            "return float(sum(nested_total(part) for part in parts))",
        ),
    ),
    calls(
        "bit_strings",
        """
from itertools import product


def bit_strings(n, ones):
    return ["".join(bits) for bits in product("01", repeat=n) if bits.count("1") == ones]
""",
        '[[[3, 2], ["011", "101", "110"]], [[0, 0], [""]], [[1, 2], []], [[2, 0], ["00"]]]',
        ('product("01", repeat=n)', 'product("10", repeat=n)'),
        ("== ones]", ">= ones]"),
    ),
    calls(
        "next_permutation",
        """
def next_permutation(items):
    items = list(items)
    i = len(items) - 2
    while i >= 0 and items[i] >= items[i + 1]:
        i -= 1
    if i < 0:
        return items[::-1]
    j = max(k for k in range(i + 1, len(items)) if items[k] > items[i])
    items[i], items[j] = items[j], items[i]
    return items[: i + 1] + items[: i : -1]
""",
        """
[
[[[1, 2, 3]], [1, 3, 2]],
[[[3, 2, 1]], [1, 2, 3]],
[[[1, 1, 5]], [1, 5, 1]],
[[[]], []],
[[[1, 3, 3, 2]], [2, 1, 3, 3]]
]
""",
        ("items[i] >= items[i + 1]", "items[i] > items[i + 1]"),
        ("return items[::-1]", "return []"),
    ),
    calls(
        "evaluate_rpn",
        """
def evaluate_rpn(tokens):
    stack = []
    for token in tokens:
        if token in ("+", "-", "*", "/"):
            b, a = stack.pop(), stack.pop()
            if token == "/":
                stack.append(abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1))
            else:
                stack.append({"+": a + b, "-": a - b, "*": a * b}[token])
        else:
            stack.append(int(token))
    return stack[-1]
""",
        """
[
[[["2", "1", "+", "3", "*"]], 9],
[[["-7", "2", "/"]], -3],
[[["5", "3", "-"]], 2],
[[["99999999999999999999", "3", "/"]], 33333333333333333333]
]
""",
        ("b, a = stack.pop(), stack.pop()", "a, b = stack.pop(), stack.pop()"),
        ("abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)", "int(a / b)"),
    ),
    calls(
        "keyword_defaults",
        """
def keyword_defaults(text, width=5, fill=" "):
    gap = width - len(text)
    if gap <= 0:
        return text
    return fill * (gap // 2) + text + fill * (gap - gap // 2)
""",
        """
[
[["ab"], " ab  "],
[["abc", 3], "abc"],
[["a", 4, "-"], "-a--"],
[["", 2, "é"], "éé"]
]
""",
        ("fill * (gap - gap // 2)", "fill * (gap // 2)"),
        ("if gap <= 0:\n        return text", "if gap <= 0:\n        return text[: width - 1]"),
    ),
]
