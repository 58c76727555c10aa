"""Functions of numbers."""

from __future__ import annotations

from loadtests.conformance.row import humaneval

ROWS = [
    humaneval(
        "prime_factors",
        '''
from typing import List


def prime_factors(n: int) -> List[int]:
    """Prime factors from the smallest on, each as often as it divides."""
    out, p = [], 2
    while p * p <= n:
        while n % p == 0:
            out.append(p)
            n //= p
        p += 1
    if n > 1:
        out.append(n)
    return out
''',
        """
assert candidate(2) == [2]
assert candidate(8) == [2, 2, 2]
assert candidate(3 * 19 * 3) == [3, 3, 19]
assert candidate(1) == []
assert candidate(49) == [7, 7]
""",
        ("p * p <= n", "p * p < n"),
        ("while n % p == 0", "if n % p == 0"),
    ),
    humaneval(
        "digits_reversed",
        '''
def digits_reversed(n):
    """The number with its digits in reverse, its sign kept."""
    sign = -1 if n < 0 else 1
    return sign * int(str(abs(n))[::-1])
''',
        """
assert candidate(123) == 321
assert candidate(-120) == -21
assert candidate(0) == 0
assert candidate(10**18 + 7) == 7000000000000000001
""",
        ("sign = -1 if n < 0 else 1", "sign = 1"),
        ("int(str(abs(n))[::-1])", "int(float(str(abs(n))[::-1]))"),
    ),
    humaneval(
        "tribonacci_like",
        '''
def tribonacci_like(n):
    """0, 0, 1, and then the sum of the last three."""
    a, b, c = 0, 0, 1
    for _ in range(n):
        a, b, c = b, c, a + b + c
    return a
''',
        """
assert candidate(0) == 0
assert candidate(2) == 1
assert candidate(10) == 81
assert candidate(100) == 53324762928098149064722658
""",
        ("a, b, c = 0, 0, 1", "a, b, c = 0, 1, 1"),
        ("return a", "return float(a)"),
    ),
    humaneval(
        "nearest_multiple",
        '''
def nearest_multiple(x, m):
    """The multiple of m nearest to x; the larger one if two are."""
    low = x // m * m
    return low if x - low < low + m - x else low + m
''',
        """
assert candidate(7, 5) == 5
assert candidate(8, 5) == 10
assert candidate(5, 2) == 6
assert candidate(-5, 2) == -4
assert candidate(-9, 5) == -10
assert candidate(0, 3) == 0
""",
        ("x - low < low + m - x", "x - low <= low + m - x"),
        ("x // m * m", "int(x / m) * m"),
    ),
    humaneval(
        "truncated_mean",
        '''
def truncated_mean(values, share=0.25):
    """The mean without the smallest and largest share; None of nothing."""
    cut = int(len(values) * share)
    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / len(kept) if kept else None
''',
        """
assert abs(candidate([1, 2, 3, 100]) - 2.5) < 1e-9
assert candidate([]) is None
assert candidate([4]) == 4.0
assert abs(candidate([5, 1, 9, 3, 7], share=0.2) - 5.0) < 1e-9
given = [3, 1, 2]
candidate(given)
assert given == [3, 1, 2]
""",
        ("kept = sorted(values)[", "values.sort()\n    kept = values["),
        ("else None", "else 0.0"),
    ),
    humaneval(
        "bits_set",
        '''
def bits_set(n):
    """How many ones the binary form of a whole number has, without its sign."""
    if not isinstance(n, int):
        raise TypeError("whole numbers only")
    return bin(n).count("1")
''',
        """
assert candidate(0) == 0
assert candidate(255) == 8
assert candidate(-7) == 3
assert candidate(2**200) == 1
try:
    candidate(1.0)
    assert False
except TypeError as error:
    assert "whole" in str(error)
""",
        ("bin(n)", "bin(n & (2**64 - 1))"),
        ("raise TypeError", "raise ValueError"),
    ),
    humaneval(
        "roman",
        '''
def roman(n):
    """A Roman numeral in small letters."""
    table = [(1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"),
             (50, "l"), (40, "xl"), (10, "x"), (9, "ix"), (5, "v"), (4, "iv"), (1, "i")]
    out = ""
    for value, letters in table:
        while n >= value:
            out, n = out + letters, n - value
    return out
''',
        """
assert candidate(19) == "xix"
assert candidate(152) == "clii"
assert candidate(426) == "cdxxvi"
assert candidate(1000) == "m"
assert candidate(94) == "xciv"
""",
        ('(90, "xc")', '(90, "lxxxx")'),
        ("n >= value", "n > value"),
    ),
    humaneval(
        "solve_quadratic",
        '''
import math


def solve_quadratic(a, b, c):
    """Real roots, the smaller first, each once."""
    d = b * b - 4 * a * c
    if d < 0:
        return ()
    r = math.sqrt(d)
    return tuple(sorted({(-b - r) / (2 * a), (-b + r) / (2 * a)}))
''',
        """
assert candidate(1, -3, 2) == (1.0, 2.0)
assert candidate(1, 2, 1) == (-1.0,)
assert candidate(1, 0, 1) == ()
assert candidate(-1, 0, 4) == (-2.0, 2.0)
""",
        (
            "tuple(sorted({(-b - r) / (2 * a), (-b + r) / (2 * a)}))",
            "((-b - r) / (2 * a), (-b + r) / (2 * a))",
        ),
        ("tuple(sorted({", "list(sorted({"),
    ),
    humaneval(
        "collatz_odds",
        '''
def collatz_odds(n):
    """Sorted odd numbers on the way from n to 1."""
    odds = {1}
    while n > 1:
        if n % 2:
            odds.add(n)
            n = 3 * n + 1
        else:
            n //= 2
    return sorted(odds)
''',
        """
assert candidate(14) == [1, 5, 7, 11, 13, 17]
assert candidate(5) == [1, 5]
assert candidate(1) == [1]
assert candidate(12) == [1, 3, 5]
""",
        ("return sorted(odds)", "return odds"),
        ("odds = {1}", "odds = set()"),
    ),
    humaneval(
        "change_base",
        '''
def change_base(x: int, base: int) -> str:
    """A text of digits in a base below 10."""
    if x == 0:
        return "0"
    out = ""
    while x:
        x, rest = divmod(x, base)
        out = str(rest) + out
    return out
''',
        """
assert candidate(8, 3) == "22"
assert candidate(0, 2) == "0"
assert candidate(234, 2) == "11101010"
assert candidate(7, 8) == "7"
""",
        ('    if x == 0:\n        return "0"\n', ""),
        ("str(rest) + out", "out + str(rest)"),
    ),
    humaneval(
        "gcd_many",
        '''
from functools import reduce
from math import gcd


def gcd_many(*numbers):
    """The greatest common divisor; 0 of none."""
    return reduce(gcd, numbers, 0)
''',
        """
assert candidate(12, 18, 30) == 6
assert candidate() == 0
assert candidate(7) == 7
assert candidate(-4, 6) == 2
assert candidate(10**30, 10**20) == 10**20
""",
        ("reduce(gcd, numbers, 0)", "reduce(gcd, numbers, 1)"),
        ("reduce(gcd, numbers, 0)", "min(abs(x) for x in numbers) if numbers else 0"),
    ),
    humaneval(
        "polynomial",
        '''
def polynomial(coefficients, x):
    """The value at x; the constant stands first."""
    value = 0
    for c in reversed(coefficients):
        value = value * x + c
    return value
''',
        """
import math
assert candidate([1, 2, 3], 2) == 17
assert candidate([], 9) == 0
assert math.isclose(candidate([0.5, -1.25], 0.1), 0.375)
assert candidate([0, 1], 10**25) == 10**25
""",
        ("reversed(coefficients)", "coefficients"),
        ("value = value * x + c", "value = value * float(x) + c"),
    ),
    humaneval(
        "safe_ratio",
        '''
def safe_ratio(a, b):
    """a / b; infinite with a's sign if b is 0, not a number if both are."""
    if b:
        return a / b
    return float("nan") if a == 0 else float("inf") if a > 0 else float("-inf")
''',
        """
import math
assert candidate(1, 2) == 0.5
assert candidate(1, 0) == math.inf
assert candidate(-1, 0) == -math.inf
assert math.isnan(candidate(0, 0))
assert candidate(0, 3) == 0
""",
        ('float("nan") if a == 0 else', ""),
        ('if a > 0 else float("-inf")', ""),
    ),
]
