"""Functions of lists."""

from __future__ import annotations

from loadtests.conformance.row import humaneval

ROWS = [
    humaneval(
        "longest_plateau",
        '''
from typing import List


def longest_plateau(values: List[int]) -> int:
    """Length of the longest run of equal neighbours.
    >>> longest_plateau([4, 4, 1])
    2
    """
    best = run = 0
    for i, value in enumerate(values):
        run = run + 1 if i and values[i - 1] == value else 1
        best = max(best, run)
    return best
''',
        """
assert candidate([4, 4, 1]) == 2
assert candidate([]) == 0
assert candidate([7]) == 1
assert candidate([1, 2, 2, 2]) == 3
assert candidate([1, 1, 2, 1, 1, 1]) == 3
""",
        ("best = run = 0", "best = run = 1"),
        ("        best = max(best, run)\n    return best", "    return max(best, run)"),
    ),
    humaneval(
        "rotate_right",
        '''
def rotate_right(items, k):
    """A new list, turned to the right k times; the argument stays as it is."""
    if not items:
        return []
    k %= len(items)
    return items[-k:] + items[:-k] if k else items[:]
''',
        """
assert candidate([1, 2, 3, 4], 1) == [4, 1, 2, 3]
assert candidate([1, 2, 3], 0) == [1, 2, 3]
assert candidate([], 5) == []
assert candidate([1, 2, 3], 7) == [3, 1, 2]
given = [1, 2]
assert candidate(given, 2) == [1, 2]
assert candidate(given, 0) is not given
""",
        ("k %= len(items)", "k = min(k, len(items))"),
        ("if k else items[:]", "if k else items"),
    ),
    humaneval(
        "second_smallest",
        '''
def second_smallest(numbers):
    """The second smallest of the distinct numbers, None if there is none."""
    distinct = sorted(set(numbers))
    return distinct[1] if len(distinct) > 1 else None
''',
        """
assert candidate([3, 1, 2]) == 2
assert candidate([1, 1, 2]) == 2
assert candidate([5, 5]) is None
assert candidate([]) is None
assert candidate([-1, -2, 0]) == -1
""",
        ("sorted(set(numbers))", "sorted(numbers)"),
        ("else None", "else False"),
    ),
    humaneval(
        "interleave_all",
        '''
from itertools import zip_longest


def interleave_all(*lists):
    """Takes one of each in turn until all are used up."""
    gap = object()
    return [x for group in zip_longest(*lists, fillvalue=gap) for x in group if x is not gap]
''',
        """
assert candidate([1, 2], ["a", "b"]) == [1, "a", 2, "b"]
assert candidate([1, 2, 3], [None]) == [1, None, 2, 3]
assert candidate() == []
assert candidate([], [0, 0]) == [0, 0]
""",
        ("gap = object()", "gap = None"),
        ("zip_longest(*lists, fillvalue=gap)", "zip(*lists)"),
    ),
    humaneval(
        "running_median",
        '''
import bisect


def running_median(stream):
    """The median after each number, as a float."""
    seen, out = [], []
    for x in stream:
        bisect.insort(seen, x)
        half = len(seen) // 2
        out.append(float(seen[half]) if len(seen) % 2 else (seen[half - 1] + seen[half]) / 2)
    return out
''',
        """
assert candidate([1, 2, 3]) == [1.0, 1.5, 2.0]
assert candidate([]) == []
assert candidate([5]) == [5.0] and isinstance(candidate([5])[0], float)
assert candidate([2, -2, 4, 4]) == [2.0, 0.0, 2.0, 3.0]
""",
        ("float(seen[half])", "seen[half]"),
        ("/ 2)", "// 2)"),
    ),
    humaneval(
        "chunked_sums",
        '''
def chunked_sums(values, size):
    """The sums of parts of `size` values each, the last perhaps shorter."""
    if size <= 0:
        raise ValueError("size must be positive")
    return [sum(values[i : i + size]) for i in range(0, len(values), size)]
''',
        """
assert candidate([1, 2, 3, 4, 5], 2) == [3, 7, 5]
assert candidate([], 3) == []
assert candidate([10**20, 1], 2) == [100000000000000000001]
try:
    candidate([1], 0)
except ValueError:
    pass
else:
    assert False, "no error"
""",
        ("range(0, len(values), size)", "range(0, len(values) - size + 1, size)"),
        ("sum(values[i", "sum(float(x) for x in values[i"),
    ),
    humaneval(
        "stable_partition",
        '''
def stable_partition(items, predicate):
    """Those that the predicate holds for, then the others, both in their order."""
    yes = [item for item in items if predicate(item)]
    no = [item for item in items if not predicate(item)]
    return yes + no
''',
        """
assert candidate([1, 2, 3, 4], lambda x: x % 2 == 0) == [2, 4, 1, 3]
assert candidate([], bool) == []
assert candidate(["b", "", "a"], bool) == ["b", "a", ""]
given = [3, 1, 2]
candidate(given, lambda x: x > 1)
assert given == [3, 1, 2]
""",
        ("return yes + no", "return sorted(yes) + no"),
        ("return yes + no", "items[:] = yes + no\n    return items"),
    ),
]
