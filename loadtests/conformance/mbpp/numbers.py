"""Small tasks on numbers."""

from __future__ import annotations

from loadtests.conformance.row import mbpp

ROWS = [
    mbpp(
        "is_harshad",
        """
def is_harshad(n):
    return n > 0 and n % sum(map(int, str(n))) == 0
""",
        """
assert is_harshad(18) == True
assert is_harshad(19) == False
assert is_harshad(0) == False
""",
        ("n > 0 and ", "not n or "),
        ("== 0", "== 1"),
    ),
    mbpp(
        "nth_even_square",
        """
def nth_even_square(n):
    return (2 * n) ** 2
""",
        """
assert nth_even_square(1) == 4
assert nth_even_square(5) == 100
assert nth_even_square(10**9 + 7) == 4000000056000000196
""",
        ("(2 * n) ** 2", "2 * n**2"),
        ("(2 * n) ** 2", "int((2.0 * n) ** 2)"),
    ),
    mbpp(
        "catalan_number",
        """
from math import comb


def catalan_number(n):
    return comb(2 * n, n) // (n + 1)
""",
        """
assert catalan_number(10) == 16796
assert catalan_number(0) == 1
assert catalan_number(40) == 2622127042276492108820
""",
        ("// (n + 1)", "/ (n + 1)", "return comb", "return 1.0 * comb"),
        ("// (n + 1)", "// (n or 2)"),
    ),
    mbpp(
        "closest_to_zero",
        """
def closest_to_zero(values):
    return min(values, key=lambda v: (abs(v), -v))
""",
        """
assert closest_to_zero([3, -2, 2]) == 2
assert closest_to_zero([-1, 5]) == -1
assert closest_to_zero([0.5, -0.25]) == -0.25
""",
        ("(abs(v), -v)", "(abs(v), v)"),
        ("min(values, key=lambda v: (abs(v), -v))", "min(map(abs, values))"),
    ),
    mbpp(
        "lcm_list",
        """
from math import lcm


def lcm_list(values):
    return lcm(*values)
""",
        """
assert lcm_list([4, 6]) == 12
assert lcm_list([]) == 1
assert lcm_list([3, 0]) == 0
""",
        ("return lcm(*values)", "return lcm(*(v for v in values if v))"),
        ("return lcm(*values)", "return lcm(*values) if values else 0"),
    ),
    mbpp(
        "compound_interest",
        """
def compound_interest(amount, rate, years):
    return amount * (1 + rate / 100) ** years
""",
        """
import math
assert math.isclose(compound_interest(1000, 5, 2), 1102.5)
assert math.isclose(compound_interest(200, 0, 9), 200)
assert math.isclose(compound_interest(1, 100, 10), 1024, rel_tol=1e-9)
""",
        ("(1 + rate / 100) ** years", "(1 + rate / 100 * years)"),
        ("rate / 100", "rate // 100"),
    ),
    mbpp(
        "perfect_square",
        """
from math import isqrt


def perfect_square(n):
    return n >= 0 and isqrt(n) ** 2 == n
""",
        """
assert perfect_square((10**20 + 1) ** 2) is True
assert perfect_square(10**40 - 1) is False
assert perfect_square(0) is True
""",
        ("isqrt(n) ** 2 == n", "int(n**0.5) ** 2 == n"),
        ("n >= 0 and isqrt(n)", "n > 0 and isqrt(n)"),
    ),
    mbpp(
        "digit_root",
        """
def digit_root(n):
    while n > 9:
        n = sum(map(int, str(n)))
    return n
""",
        """
assert digit_root(9875) == 2
assert digit_root(10) == 1
assert digit_root(0) == 0
""",
        ("n > 9", "n > 10"),
        ("while n > 9", "if n > 9"),
    ),
    mbpp(
        "decimal_to_bits",
        """
def decimal_to_bits(n, width=8):
    if n >= 2**width:
        raise OverflowError(n)
    return format(n, f"0{width}b")
""",
        """
import pytest
assert decimal_to_bits(5) == "00000101"
assert decimal_to_bits(15, 4) == "1111"
assert pytest.raises(OverflowError, decimal_to_bits, 16, 4)
""",
        ("n >= 2**width", "n > 2**width"),
        ('return format(n, f"0{width}b")', 'return list(format(n, f"0{width}b"))'),
    ),
    mbpp(
        "sum_series",
        """
def sum_series(n):
    return sum(range(n, 0, -2))
""",
        """
assert sum_series(6) == 12
assert sum_series(9) == 25
assert sum_series(1) == 1
""",
        ("range(n, 0, -2)", "range(n, 1, -2)"),
        ("range(n, 0, -2)", "range(n, 0, -1)"),
    ),
    mbpp(
        "next_power_of_two",
        """
def next_power_of_two(n):
    return 1 if n < 1 else 1 << (n - 1).bit_length()
""",
        """
assert next_power_of_two(5) == 8
assert next_power_of_two(8) == 8
assert next_power_of_two(0) == 1
""",
        ("(n - 1).bit_length()", "n.bit_length()"),
        ("1 if n < 1 else ", "n if n < 1 else "),
    ),
    mbpp(
        "angle_between_hands",
        """
def angle_between_hands(hour, minute):
    diff = abs(30 * (hour % 12) - 5.5 * minute)
    return min(diff, 360 - diff)
""",
        """
assert angle_between_hands(3, 0) == 90
assert angle_between_hands(12, 30) == 165.0
assert angle_between_hands(9, 0) == 90
""",
        ("min(diff, 360 - diff)", "diff"),
        ("5.5 * minute", "6 * minute"),
    ),
    mbpp(
        "max_product_pair",
        """
def max_product_pair(values):
    ordered = sorted(values)
    pairs = [(ordered[0], ordered[1]), (ordered[-2], ordered[-1])]
    return max(pairs, key=lambda p: p[0] * p[1])
""",
        """
assert max_product_pair([1, 2, 3, 4]) == (3, 4)
assert max_product_pair([-10, -9, 1, 5]) == (-10, -9)
assert max_product_pair([0, -1]) == (-1, 0)
""",
        ("[(ordered[0], ordered[1]), (ordered[-2], ordered[-1])]", "[(ordered[-2], ordered[-1])]"),
        ("(ordered[0], ordered[1]), (", "(ordered[1], ordered[0]), ("),
    ),
    mbpp(
        "babylonian_sqrt",
        """
def babylonian_sqrt(x):
    if x < 0:
        raise ValueError("negative")
    guess = x or 0.0
    for _ in range(200):
        if not guess:
            break
        guess = (guess + x / guess) / 2
    return guess
""",
        """
import math
assert math.isclose(babylonian_sqrt(10), 3.162277660168379, rel_tol=0.001)
assert math.isclose(babylonian_sqrt(1e8), 1e4, rel_tol=0.001)
assert babylonian_sqrt(0) == 0
""",
        ("range(200)", "range(3)"),
        ("guess = x or 0.0", "guess = x or 1.0"),
    ),
]
