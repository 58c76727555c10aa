"""Programs that count, sort and search."""

from __future__ import annotations

from loadtests.conformance.row import apps

ROWS = [
    apps(
        "queue_times",
        """
import sys


def main():
    data = sys.stdin.read().split()
    n, tills = int(data[0]), int(data[1])
    free = [0] * tills
    for t in map(int, data[2 : 2 + n]):
        i = free.index(min(free))
        free[i] += t
    print(max(free))


main()
""",
        [
            ("3 1\n5 3 4\n", "12\n"),
            ("4 2\n10 2 3 3\n", "10\n"),
            ("0 3\n\n", "0\n"),
            ("5 9\n1 2 3 4 5\n", "5\n"),
        ],
        ("data[2 : 2 + n]", "data[2 : 1 + n]"),
        ("free.index(min(free))", "free.index(max(free))"),
    ),
    apps(
        "average_mark",
        """
n = int(input())
marks = [int(input()) for _ in range(n)]
if not n:
    print("no marks")
    exit()
print(f"{sum(marks) / n:.6f}")
""",
        [("3\n1\n2\n4\n", "2.333333\n"), ("0\n", "no marks\n"), ("2\n-1\n1\n", "0.000000\n")],
        ("/ n", "// n"),
        ('    print("no marks")\n', ""),
    ),
    apps(
        "echo_until_end",
        """
lines = []
while True:
    try:
        line = input()
    except EOFError:
        break
    lines.append(line)
for line in reversed(lines):
    print(line[::-1])
""",
        [("ab c\nde\n", "ed\nc ba\n"), ("", ""), ("grün\n日本", "本日\nnürg\n")],
        ("reversed(lines)", "lines"),
        ("line[::-1]", 'line.encode("ascii", "ignore").decode()[::-1]'),
    ),
    apps(
        "big_power",
        """
a, b = map(int, input().split())
print(a**b)
""",
        [
            ("2 10\n", "1024\n"),
            ("7 30\n", "22539340290692258087863249\n"),
            ("0 0\n", "1\n"),
            ("-3 3\n", "-27\n"),
        ],
        ("print(a**b)", "print(int(float(a) ** b))"),
        ("print(a**b)", "print(a**b if a else 0)"),
    ),
]
