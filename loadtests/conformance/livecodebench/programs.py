"""Programs, their cases in JSON."""

from __future__ import annotations

from loadtests.conformance.row import stdin

ROWS = [
    stdin(
        "divisible_pairs",
        """
from collections import Counter

t = int(input())
for _ in range(t):
    n, k = map(int, input().split())
    rests = Counter(int(x) % k for x in input().split())
    total = sum(c * (c - 1) // 2 for r, c in rests.items() if 2 * r % k == 0)
    total += sum(rests[r] * rests[k - r] for r in range(1, (k + 1) // 2))
    print(total)
""",
        r"""
[
["2\n3 3\n1 2 3\n4 2\n2 4 6 8\n", "1\n6\n"],
["1\n3 1\n5 6 7\n", "3\n"],
["0\n", ""],
["1\n4 4\n2 2 1 3\n", "2\n"]
]
""",
        ("(k + 1) // 2)", "k // 2 + 1)"),
        ("2 * r % k == 0", "r == 0"),
    ),
    stdin(
        "minimum_moves",
        """
for _ in range(int(input())):
    n = int(input())
    a = sorted(map(int, input().split()))
    print(sum(abs(x - a[n // 2]) for x in a))
""",
        r"""
[
["2\n3\n1 2 3\n1\n9\n", "2\n0\n"],
["1\n3\n9 1 2\n", "8\n"],
["1\n2\n-1000000000000 1000000000000\n", "2000000000000\n"]
]
""",
        ("a[n // 2]", "sum(a) // n"),
        ("sorted(map(int, input().split()))", "list(map(int, input().split()))"),
    ),
    stdin(
        "yes_no_cases",
        """
for case in range(1, int(input()) + 1):
    s = input().strip()
    half = len(s) // 2
    good = len(s) % 2 == 0 and sorted(s[:half]) == sorted(s[half:])
    print(f"Case #{case}: {'YES' if good else 'NO'}")
""",
        r"""
[
["2\nabba\nabc\n", "Case #1: YES\nCase #2: NO\n"],
["1\nabac\n", "Case #1: NO\n"],
["1\naabbab\n", "Case #1: NO\n"],
["1\nababa\n", "Case #1: NO\n"],
["1\nabxba\n", "Case #1: NO\n"]
]
""",
        ("sorted(s[:half]) == sorted(s[half:])", "s[:half] == s[half:]"),
        ("sorted(s[:half]) == sorted(s[half:])", "set(s[:half]) == set(s)"),
    ),
    stdin(
        "probability_sum",
        """
n = int(input())
alive = 1.0
for p in map(float, input().split()):
    alive *= 1 - p
print(1 - alive)
""",
        r"""
[
["2\n0.5 0.5\n", "0.75\n"],
["1\n0\n", "0.0\n"],
["3\n0.1 0.2 0.3\n", "0.496\n"],
["1\n1\n", "1.0\n"]
]
""",
        ("print(1 - alive)", "print(alive)"),
        ("alive *= 1 - p", "alive -= p"),
    ),
    stdin(
        "count_inversions",
        """
import sys


def sort(a):
    if len(a) < 2:
        return a, 0
    (left, x), (right, y) = sort(a[: len(a) // 2]), sort(a[len(a) // 2 :])
    out, i, count = [], 0, x + y
    for value in right:
        while i < len(left) and left[i] <= value:
            out.append(left[i])
            i += 1
        count += len(left) - i
        out.append(value)
    return out + left[i:], count


data = list(map(int, sys.stdin.read().split()))
print(sort(data[1:])[1])
""",
        r"""
[
["5\n2 4 1 3 5\n", "3\n"],
["1\n1\n", "0\n"],
["3\n2 2 1\n", "2\n"],
["0\n", "0\n"],
["4\n4 3 2 1\n", "6\n"]
]
""",
        ("left[i] <= value", "left[i] < value"),
        ("sort(data[1:])", "sort(data)"),
    ),
    stdin(
        "string_queries",
        """
import sys

read = sys.stdin.readline
text = list(read().strip())
for _ in range(int(read())):
    kind, *rest = read().split()
    if kind == "set":
        text[int(rest[0]) - 1] = rest[1]
    elif kind == "flip":
        text.reverse()
    else:
        a, b = map(int, rest)
        print("".join(text[a - 1 : b]))
""",
        r"""
[
["abdc\n3\nget 2 3\nflip\nget 1 2\n", "bd\ncd\n"],
["xyz\n2\nset 3 q\nget 1 3\n", "xyq\n"],
["a\n0\n", ""]
]
""",
        ("a - 1 : b]", "a - 1 : b - 1]"),
        ("text.reverse()", "text.sort(reverse=True)"),
    ),
    stdin(
        "tree_diameter",
        """
from collections import deque

n = int(input())
near = [[] for _ in range(n + 1)]
for _ in range(n - 1):
    a, b = map(int, input().split())
    near[a].append(b)
    near[b].append(a)


def farthest(start):
    seen, queue = {start: 0}, deque([start])
    while queue:
        node = queue.popleft()
        for other in near[node]:
            if other not in seen:
                seen[other] = seen[node] + 1
                queue.append(other)
    return max(seen.items(), key=lambda item: item[1])


print(farthest(farthest(1)[0])[1])
""",
        r"""
[
["3\n1 2\n1 3\n", "2\n"],
["1\n", "0\n"],
["5\n1 2\n2 3\n3 4\n3 5\n", "3\n"],
["6\n1 2\n2 3\n2 4\n4 5\n3 6\n", "4\n"]
]
""",
        ("farthest(farthest(1)[0])", "farthest(1)"),
        ("    near[b].append(a)\n", ""),
    ),
    stdin(
        "scheduled_tasks",
        """
import heapq

n = int(input())
jobs = sorted((tuple(map(int, input().split())) for _ in range(n)), key=lambda job: job[1])
taken, total = [], 0
for length, deadline in jobs:
    heapq.heappush(taken, -length)
    total += length
    if total > deadline:
        total += heapq.heappop(taken)
print(len(taken))
""",
        r"""
[
["3\n2 2\n1 3\n4 5\n", "2\n"],
["0\n", "0\n"],
["1\n5 4\n", "0\n"],
["4\n5 5\n2 6\n2 7\n3 8\n", "3\n"],
["2\n1 9\n2 2\n", "2\n"]
]
""",
        ("total > deadline", "total >= deadline"),
        (
            "total += heapq.heappop(taken)",
            "total -= length\n        taken.remove(-length)",
        ),
    ),
    stdin(
        "grid_sums",
        """
h, w = map(int, input().split())
sums = [[0] * (w + 1)]
for _ in range(h):
    row, left = [0], 0
    for above, x in zip(sums[-1][1:], map(int, input().split())):
        left += x
        row.append(above + left)
    sums.append(row)
for _ in range(int(input())):
    a, b, c, d = map(int, input().split())
    print(sums[c][d] - sums[a - 1][d] - sums[c][b - 1] + sums[a - 1][b - 1])
""",
        r"""
[
["2 2\n1 2\n3 4\n3\n1 1 2 2\n2 2 2 2\n1 2 2 2\n", "10\n4\n6\n"],
["1 1\n-7\n1\n1 1 1 1\n", "-7\n"],
["3 3\n1 1 1\n1 1 1\n1 1 1\n1\n2 2 3 3\n", "4\n"]
]
""",
        (" + sums[a - 1][b - 1]", ""),
        ("sums[c][b - 1]", "sums[c][b]"),
    ),
    stdin(
        "subset_sums",
        """
n, target = map(int, input().split())
values = list(map(int, input().split()))
reached = {0: 1}
for v in values:
    new = dict(reached)
    for s, ways in reached.items():
        new[s + v] = new.get(s + v, 0) + ways
    reached = new
print(reached.get(target, 0))
""",
        r"""
[
["3 3\n1 2 3\n", "2\n"],
["2 0\n0 0\n", "4\n"],
["1 5\n4\n", "0\n"],
["4 0\n1 -1 2 -2\n", "4\n"]
]
""",
        (
            "new = dict(reached)",
            "new = reached",
            "in reached.items()",
            "in list(reached.items())[:2]",
        ),
        ("new.get(s + v, 0) + ways", "new.get(s + v, 0) + 1"),
    ),
    stdin(
        "formatted_table",
        """
import sys

rows = [line.split(",") for line in sys.stdin.read().splitlines() if line]
for name, *marks in rows:
    marks = [int(m) for m in marks if m]
    mean = sum(marks) / len(marks) if marks else float("nan")
    print(f"{name:<8}{mean:>8.3f}")
""",
        r"""
[
["ann,1,2\nbo,3\n", "ann 1.500\nbo 3.000\n"],
["x,\n", "x nan\n"],
["", ""],
["y,1,1,2\n", "y 1.333\n"]
]
""",
        ("if m]", "if m and int(m) > 1]"),
        (":>8.3f", ":>8.2f"),
    ),
    stdin(
        "json_report",
        """
import json
import sys

found = json.load(sys.stdin)
out = {key: sorted(values) for key, values in found.items() if values}
print(json.dumps(out, sort_keys=True, ensure_ascii=False))
""",
        r"""
[
["{\"b\": [2, 1], \"a\": []}\n", "{\"b\": [1, 2]}\n"],
["{}", "{}\n"],
["{\"z\": [1], \"é\": [0], \"a\": [3]}", "{\"a\": [3], \"z\": [1], \"é\": [0]}\n"]
]
""",
        (" if values}", "}"),
        (", ensure_ascii=False", ""),
    ),
    stdin(
        "counting_stars",
        """
n = int(input())
for i in range(1, n + 1):
    print(" " * (n - i) + "*" * (2 * i - 1))
print(n * n)
""",
        r"""
[
["2\n", " *\n***\n4\n"],
["1\n", "*\n1\n"],
["0\n", "0\n"],
["4\n", "*\n***\n*****\n*******\n16\n"]
]
""",
        ("2 * i - 1", "2 * i"),
        ("print(n * n)", "print(n * (n + 1) // 2)"),
    ),
    stdin(
        "leap_years",
        """
import sys

for year in map(int, sys.stdin.read().split()):
    print(year, "leap" if year % 4 == 0 and (year % 100 or year % 400 == 0) else "common")
""",
        r"""
[
["2000 1900\n2024\n", "2000 leap\n1900 common\n2024 leap\n"],
["2023\n", "2023 common\n"],
["", ""]
]
""",
        ("or year % 400 == 0", "or year % 1000 == 0 and year % 400"),
        ("year % 4 == 0 and (year % 100 or year % 400 == 0)", "year % 4 == 0"),
    ),
    stdin(
        "polygon_area",
        """
n = int(input())
points = [tuple(map(int, input().split())) for _ in range(n)]
twice = sum(a * d - b * c for (a, b), (c, d) in zip(points, points[1:] + points[:1]))
print(abs(twice) // 2 if twice % 2 == 0 else f"{abs(twice) // 2}.5")
""",
        r"""
[
["3\n0 0\n4 0\n0 3\n", "6\n"],
["3\n1 1\n2 1\n1 2\n", "0.5\n"],
["4\n0 0\n0 2000000001\n2000000001 2000000001\n2000000001 0\n", "4000000004000000001\n"]
]
""",
        ("points[1:] + points[:1]", "points[1:]"),
        ("print(abs(twice) // 2 if", "print(int(abs(twice) / 2) if"),
    ),
]
