"""Programs of numbers: exact and rounded, large and negative, none at all."""

from __future__ import annotations

from loadtests.conformance.row import apps

ROWS = [
    apps(
        "sum_of_all",
        """
import sys

print(sum(map(int, sys.stdin.read().split())))
""",
        [
            ("1 2 3\n4\n", "10\n"),
            ("", "0\n"),
            ("-5\n5 99999999999999999999\n", "99999999999999999999\n"),
        ],
        ("map(int, ", "map(int, (x for x in ", ".split()", ".split() if x.isdigit())"),
        (
            "import sys\n\nprint(sum(map(int, sys.stdin.read().split())))",
            "print(sum(map(int, input().split())))",
        ),
    ),
    apps(
        "circle_area",
        """
import math

r = float(input())
print(f"{math.pi * r * r:.10f}")
""",
        [
            ("1\n", "3.1415926536\n"),
            ("0\n", "0.0000000000\n"),
            ("2.5\n", "19.6349540849\n"),
            ("100000\n", "31415926535.8979323846\n"),
        ],
        ("math.pi", "3.1416"),
        ("* r * r", "* r * 2"),
    ),
    apps(
        "unrounded_mean",
        """
n = int(input())
values = list(map(float, input().split()))
print(sum(values) / n)
""",
        [
            ("3\n0.1 0.2 0.3\n", "0.2\n"),
            ("1\n1e-3\n", "0.001\n"),
            ("2\n1 2\n", "1.5\n"),
            ("3\n1 1 2\n", "1.333333333\n"),
        ],
        ("/ n", "/ (n - 1 or 1)"),
        ("print(sum(values) / n)", "print(round(sum(values) / n, 2))"),
    ),
    apps(
        "fibonacci_index",
        """
n = int(input())
a, b = 0, 1
for _ in range(n):
    a, b = b, a + b
print(a)
""",
        [
            ("0\n", "0\n"),
            ("10\n", "55\n"),
            ("90\n", "2880067194370816120\n"),
            ("300\n", "222232244629420445529739893461909967206666939096499764990979600\n"),
        ],
        ("print(a)", "print(round(((1 + 5**0.5) / 2) ** n / 5**0.5))"),
        ("a, b = 0, 1", "a, b = 1, 1"),
    ),
    apps(
        "floor_division",
        """
import sys

for line in sys.stdin:
    if line.strip():
        a, b = map(int, line.split())
        print(a // b if b else "undefined")
""",
        [
            ("7 2\n-7 2\n7 -2\n", "3\n-4\n-4\n"),
            ("1 0\n", "undefined\n"),
            ("\n\n", ""),
            ("5000001 1\n", "5000001\n"),
        ],
        ("a // b", "int(a / b)"),
        ("a // b if", "a / b if"),
    ),
    apps(
        "base_converter",
        """
number, base = input().split()
base = int(base)
n = int(number)
digits = "0123456789abcdefghijklmnopqrstuvwxyz"
out, left = "", abs(n)
while left:
    out = digits[left % base] + out
    left //= base
print(("-" if n < 0 else "") + (out or "0"))
""",
        [("255 16\n", "ff\n"), ("0 2\n", "0\n"), ("-10 3\n", "-101\n"), ("35 36\n", "z\n")],
        ('(out or "0")', "out"),
        ("abs(n)", "n if n > 0 else -n + 1"),
    ),
    apps(
        "perfect_numbers",
        """
low, high = map(int, input().split())
found = [n for n in range(max(low, 2), high + 1) if sum(d for d in range(1, n) if n % d == 0) == n]
print(*found) if found else print("none")
""",
        [("1 30\n", "6 28\n"), ("7 27\n", "none\n"), ("6 6\n", "6\n"), ("-5 1\n", "none\n")],
        ("high + 1", "high"),
        ("range(1, n) if", "range(1, n + 1) if"),
    ),
    apps(
        "digits_of_factorial",
        """
import math

n = int(input())
text = str(math.factorial(n))
print(len(text), text[-1] if n < 5 else len(text) - len(text.rstrip("0")))
""",
        [
            ("0\n", "1 1\n"),
            ("4\n", "2 4\n"),
            ("5\n", "3 1\n"),
            ("25\n", "26 6\n"),
            ("100\n", "158 24\n"),
        ],
        ("n < 5", "n <= 5"),
        ("len(text) - len", "n // 5 + 0 * len"),
    ),
    apps(
        "gauss_elimination",
        """
from fractions import Fraction

n = int(input())
rows = [list(map(Fraction, input().split())) for _ in range(n)]
for i in range(n):
    pivot = next((r for r in range(i, n) if rows[r][i]), None)
    if pivot is None:
        print("singular")
        break
    rows[i], rows[pivot] = rows[pivot], rows[i]
    rows[i] = [x / rows[i][i] for x in rows[i]]
    for r in range(n):
        if r != i:
            rows[r] = [x - rows[r][i] * y for x, y in zip(rows[r], rows[i])]
else:
    for row in rows:
        print(float(row[-1]))
""",
        [
            ("2\n1 1 3\n1 -1 1\n", "2.0\n1.0\n"),
            ("2\n1 1 1\n2 2 2\n", "singular\n"),
            ("1\n3 1\n", "0.3333333333333333\n"),
            ("2\n0 1 5\n1 0 4\n", "4.000000\n5.000000\n"),
        ],
        ("rows[i], rows[pivot] = rows[pivot], rows[i]", "pass"),
        ("range(i, n) if", "range(n) if"),
    ),
    apps(
        "time_sum",
        """
total = 0
n = int(input())
for _ in range(n):
    h, m, s = map(int, input().split(":"))
    total += 3600 * h + 60 * m + s
print(f"{total // 3600:02}:{total // 60 % 60:02}:{total % 60:02}")
""",
        [
            ("2\n00:59:30\n00:00:45\n", "01:00:15\n"),
            ("0\n", "00:00:00\n"),
            ("3\n40:00:00\n40:00:00\n40:00:01\n", "120:00:01\n"),
        ],
        ("total // 3600:02", "total // 3600 % 24:02"),
        ("total // 60 % 60:02", "total // 60 % 60"),
    ),
    apps(
        "currency_change",
        """
amount, *coins = map(int, input().split())
best = [0] + [None] * amount
for value in range(1, amount + 1):
    found = [best[value - c] for c in coins if c <= value and best[value - c] is not None]
    best[value] = min(found) + 1 if found else None
print(-1 if best[amount] is None else best[amount])
""",
        [("6 1 3 4\n", "2\n"), ("0 5\n", "0\n"), ("3 2\n", "-1\n"), ("27 5 10 20 1\n", "4\n")],
        ("c <= value", "c < value"),
        ("print(-1 if best[amount] is None else best[amount])", "print(best[amount] or -1)"),
    ),
    apps(
        "modular_power",
        """
import sys

for line in sys.stdin.read().splitlines():
    a, e, m = map(int, line.split())
    print(pow(a, e, m))
""",
        [
            ("2 10 1000\n", "24\n"),
            ("3 0 1\n", "0\n"),
            ("-2 3 5\n", "2\n"),
            (
                "123456789 987654321987654321 1000000007\n",
                "689051811\n",
            ),
        ],
        ("pow(a, e, m)", "pow(a, e, m) if e else 1"),
        ("pow(a, e, m)", "pow(abs(a), e, m)"),
    ),
]
