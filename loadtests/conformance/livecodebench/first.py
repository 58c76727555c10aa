"""Methods of `Solution`, and programs."""

from __future__ import annotations

from loadtests.conformance.row import calls, stdin

ROWS = [
    calls(
        "Solution.longestBalanced",
        """
from typing import List


class Solution:
    def longestBalanced(self, signs: List[int]) -> int:
        first = {0: -1}
        total = best = 0
        for i, sign in enumerate(signs):
            total += 1 if sign else -1
            if total in first:
                best = max(best, i - first[total])
            else:
                first[total] = i
        return best
""",
        """
[[[[0, 1, 0, 1]], 4], [[[]], 0], [[[1, 1, 1]], 0], [[[1, 0, 0, 1, 1, 1]], 4]]
""",
        ("first = {0: -1}", "first = {0: 0}"),
        ("            else:\n                first[total] = i", "            first[total] = i"),
    ),
    calls(
        "Solution.splitEvenly",
        """
class Solution:
    def splitEvenly(self, amount: int, people: int):
        share, rest = divmod(amount, people)
        return [share + (i < rest) for i in range(people)]
""",
        """
[[[10, 3], [4, 3, 3]], [[0, 2], [0, 0]], [[2, 3], [1, 1, 0]],
 [[100000000000000000001, 2], [50000000000000000001, 50000000000000000000]]]
""",
        ("divmod(amount, people)", "(amount / people, 0)"),
        ("i < rest", "i <= rest"),
    ),
    calls(
        "harmonic",
        """
def harmonic(n):
    return sum(1 / k for k in range(1, n + 1)) if n else 0.0
""",
        "[[[1], 1.0], [[4], 2.083333333333333], [[0], 0.0]]",
        ("n + 1", "n"),
        ("1 / k", "1 // k"),
    ),
    stdin(
        "meeting_rooms",
        """
n = int(input())
edges = []
for _ in range(n):
    start, end = map(int, input().split())
    edges += [(start, 1), (end, -1)]
busy = most = 0
for _, change in sorted(edges):
    busy += change
    most = max(most, busy)
print(most)
""",
        r'[["2\n1 5\n5 6\n", "1\n"], ["3\n1 4\n2 5\n3 6\n", "3\n"], ["0\n", "0\n"]]',
        ("sorted(edges)", "sorted(edges, key=lambda e: (e[0], -e[1]))"),
        ("most = max(most, busy)", "most = busy or most"),
    ),
]
