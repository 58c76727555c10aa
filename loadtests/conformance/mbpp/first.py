"""Small tasks on numbers, texts and lists."""

from __future__ import annotations

from loadtests.conformance.row import mbpp

ROWS = [
    mbpp(
        "sum_of_odd_digits",
        """
def odd_digit_sum(n):
    return sum(int(d) for d in str(abs(n)) if int(d) % 2)
""",
        """
assert odd_digit_sum(12345) == 9
assert odd_digit_sum(-77) == 14
assert odd_digit_sum(0) == 0
""",
        ("abs(n)", "n"),
        ("if int(d) % 2)", "if int(d) % 2) or None"),
    ),
    mbpp(
        "triangle_kind",
        """
def triangle_kind(a, b, c):
    a, b, c = sorted((a, b, c))
    if a <= 0 or a + b <= c:
        return "none"
    return {1: "equilateral", 2: "isosceles", 3: "scalene"}[len({a, b, c})]
""",
        """
assert triangle_kind(3, 4, 5) == "scalene"
assert triangle_kind(2, 2, 4) == "none"
assert triangle_kind(2, 2, 2) == "equilateral"
""",
        ("a + b <= c", "a + b < c"),
        ('1: "equilateral"', '1: "equilateral "'),
    ),
    mbpp(
        "merge_counts",
        """
from collections import Counter


def merge_counts(*tables):
    total = Counter()
    for table in tables:
        total.update(table)
    return dict(total)
""",
        """
assert merge_counts({"a": 1}, {"a": 2, "b": 1}) == {"a": 3, "b": 1}
assert merge_counts() == {}
assert merge_counts({"a": 1}, {"a": -1}) == {"a": 0}
""",
        ("total.update(table)", "total += Counter(table)"),
        ("total.update(table)", "total |= Counter(table)"),
    ),
    mbpp(
        "cone_volume",
        """
import math


def cone_volume(radius, height):
    return math.pi * radius**2 * height / 3
""",
        """
import math
assert math.isclose(cone_volume(5, 12), 314.15926535897927, rel_tol=0.001)
assert math.isclose(cone_volume(10, 15), 1570.7963267948965, rel_tol=0.001)
assert math.isclose(cone_volume(1, 0), 0.0)
""",
        ("/ 3", "/ 2"),
        ("radius**2", "radius * 2"),
    ),
    mbpp(
        "pairs_to_dict",
        """
def pairs_to_dict(pairs):
    out = {}
    for key, value in pairs:
        out.setdefault(key, []).append(value)
    return out
""",
        """
assert pairs_to_dict([("a", 1), ("b", 2), ("a", 3)]) == {"a": [1, 3], "b": [2]}
assert pairs_to_dict([]) == {}
assert pairs_to_dict([((1, 2), None)]) == {(1, 2): [None]}
""",
        ("out.setdefault(key, []).append(value)", "out[key] = out.get(key, ()) + (value,)"),
        (".append(value)", ".insert(0, value)"),
    ),
]
