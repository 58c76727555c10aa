"""Methods of `Solution`."""

from __future__ import annotations

from loadtests.conformance.row import calls

ROWS = [
    calls(
        "Solution.pairWithSum",
        """
class Solution:
    def pairWithSum(self, nums: list[int], target: int) -> list[int]:
        seen = {}
        for i, n in enumerate(nums):
            if target - n in seen:
                return [seen[target - n], i]
            seen.setdefault(n, i)
        return []
""",
        """
[
[[[2, 7, 11], 9], [0, 1]],
[[[3, 3], 6], [0, 1]],
[[[1, 2], 9], []],
[[[5, 1, 5], 10], [0, 2]]
]
""",
        ("[seen[target - n], i]", "[i, seen[target - n]]"),
        (
            "            seen.setdefault(n, i)\n",
            "",
            "            if target - n in seen",
            "            seen[n] = i\n            if target - n in seen",
        ),
    ),
    calls(
        "Solution.decodeRuns",
        """
class Solution:
    def decodeRuns(self, s: str) -> str:
        stack, text, number = [], "", 0
        for c in s:
            if c.isdigit():
                number = 10 * number + int(c)
            elif c == "[":
                stack.append((text, number))
                text, number = "", 0
            elif c == "]":
                before, times = stack.pop()
                text = before + text * times
            else:
                text += c
        return text
""",
        """
[
[["3[a]2[bc]"], "aaabcbc"],
[["2[a2[b]]"], "abbabb"],
[["12[x]"], "xxxxxxxxxxxx"],
[[""], ""],
[["0[a]é"], "é"]
]
""",
        ("10 * number + int(c)", "int(c)"),
        ("before + text * times", "before + text * (times or 1)"),
    ),
    calls(
        "Solution.rotateGrid",
        """
class Solution:
    def rotateGrid(self, grid):
        return list(zip(*grid[::-1]))
""",
        "[[[[[1, 2], [3, 4]]], [[3, 1], [4, 2]]], [[[[1, 2, 3]]], [[1], [2], [3]]], [[[]], []]]",
        ("grid[::-1]", "grid"),
        ("list(zip(*grid[::-1]))", "[list(row)[::-1] for row in zip(*grid[::-1])]"),
    ),
    calls(
        "Solution.medianOfTwo",
        """
class Solution:
    def medianOfTwo(self, a: list[int], b: list[int]) -> float:
        both = sorted(a + b)
        n = len(both)
        return (both[(n - 1) // 2] + both[n // 2]) / 2
""",
        """
[
[[[1, 3], [2]], 2.0],
[[[1, 2], [3, 4]], 2.5],
[[[], [1]], 1.0],
[[[0, 0], [0, 1]], 0.0]
]
""",
        ("/ 2\n", "// 2\n"),
        ("both[(n - 1) // 2]", "both[n // 2 - 1]"),
    ),
    calls(
        "Solution.countIslands",
        """
class Solution:
    def countIslands(self, grid: list[list[str]]) -> int:
        def sink(r, c):
            if 0 <= r < len(grid) and 0 <= c < len(grid[0]) and grid[r][c] == "1":
                grid[r][c] = "0"
                for y, x in ((r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1)):
                    sink(y, x)

        count = 0
        for r in range(len(grid)):
            for c in range(len(grid[0])):
                count += grid[r][c] == "1"
                sink(r, c)
        return count
""",
        """
[
[[[["1", "0"], ["0", "1"]]], 2],
[[[]], 0],
[[[["1", "1"], ["1", "1"]]], 1],
[[[["1", "0", "1"]]], 2],
[[[["1", "0", "1"], ["1", "1", "1"]]], 1]
]
""",
        (
            "(r - 1, c), (r, c + 1)",
            "(r - 1, c - 1), (r, c + 1)",
        ),
        (
            'grid[r][c] == "1"\n                sink',
            'grid[r][c] == "1" and c < len(grid)\n                sink',
        ),
    ),
    calls(
        "Solution.topFrequent",
        """
from collections import Counter


class Solution:
    def topFrequent(self, words: list[str], k: int) -> list[str]:
        counts = Counter(words)
        return sorted(counts, key=lambda w: (-counts[w], w))[:k]
""",
        """
[
[[["i", "love", "code", "i", "love"], 2], ["i", "love"]],
[[["b", "a"], 1], ["a"]],
[[["x"], 3], ["x"]],
[[[], 1], []]
]
""",
        ("(-counts[w], w)", "-counts[w]"),
        ("[:k]", "[: k + 1]"),
    ),
    calls(
        "Solution.multiplyTexts",
        """
class Solution:
    def multiplyTexts(self, a: str, b: str) -> str:
        return str(int(a) * int(b))
""",
        """
[
[["123456789012345678901234567890", "2"], "246913578024691357802469135780"],
[["0", "52"], "0"],
[["12", "12"], "144"]
]
""",
        ("str(int(a) * int(b))", "int(a) * int(b)"),
        ("str(int(a) * int(b))", "str(int(float(a) * float(b)))"),
    ),
    calls(
        "Solution.pascalRow",
        """
from math import comb


class Solution:
    def pascalRow(self, n: int):
        return [comb(n, k) for k in range(n + 1)]
""",
        "[[[0], [1]], [[4], [1, 4, 6, 4, 1]], [[1], [1, 1]], [[5], [1, 5, 10, 10, 5, 1]]]",
        ("range(n + 1)]", "range(n + 1) if k or n]"),
        ("comb(n, k) for", "comb(n, min(k, 3)) for"),
    ),
    calls(
        "Solution.isHappy",
        """
class Solution:
    def isHappy(self, n: int) -> bool:
        seen = set()
        while n != 1 and n not in seen:
            seen.add(n)
            n = sum(int(d) ** 2 for d in str(n))
        return n == 1
""",
        "[[[19], true], [[2], false], [[1], true], [[7], true]]",
        ("return n == 1", "return int(n == 1)"),
        ("n != 1 and n not in seen", "n > 9"),
    ),
    calls(
        "Solution.wordBreaks",
        """
from functools import cache


class Solution:
    def wordBreaks(self, s: str, words: list[str]) -> list[str]:
        @cache
        def ways(i):
            if i == len(s):
                return [[]]
            return [[w, *rest] for w in words if s.startswith(w, i) for rest in ways(i + len(w))]

        return sorted(" ".join(way) for way in ways(0))
""",
        """
[
[["catsand", ["cat", "cats", "and", "sand"]], ["cat sand", "cats and"]],
[["a", []], []],
[["", ["a"]], [""]],
[["aaa", ["a", "aa"]], ["a a a", "a aa", "aa a"]]
]
""",
        ("return [[]]", "return [[]] if s else []"),
        (
            "return sorted(",
            "return sorted(",
            "[[w, *rest] for w in words if",
            "[[w, *rest] for w in words[:1] + words[2:] if",
        ),
    ),
]
