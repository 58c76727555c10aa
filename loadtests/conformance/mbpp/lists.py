"""Small tasks on lists, tuples, tables and what they hold."""

from __future__ import annotations

from loadtests.conformance.row import mbpp

ROWS = [
    mbpp(
        "rotate_matrix",
        """
def rotate_matrix(m):
    return [list(row) for row in zip(*m[::-1])]
""",
        """
assert rotate_matrix([[1, 2], [3, 4]]) == [[3, 1], [4, 2]]
assert rotate_matrix([[1, 2, 3]]) == [[1], [2], [3]]
assert rotate_matrix([]) == []
""",
        ("[list(row) for row in zip(*m[::-1])]", "list(zip(*m[::-1]))"),
        ("m[::-1]", "m"),
    ),
    mbpp(
        "flatten_deep",
        """
def flatten_deep(items):
    out = []
    for item in items:
        out.extend(flatten_deep(item) if isinstance(item, list) else [item])
    return out
""",
        """
assert flatten_deep([1, [2, [3, []]], (4,)]) == [1, 2, 3, (4,)]
assert flatten_deep([]) == []
assert flatten_deep(["ab"]) == ["ab"]
""",
        ("isinstance(item, list)", "isinstance(item, (list, tuple))"),
        ("[item])", "item if isinstance(item, str) else [item])"),
    ),
    mbpp(
        "tuple_sort",
        """
def tuple_sort(rows):
    return sorted(rows, key=lambda r: (-r[1], r[0]))
""",
        """
assert tuple_sort([("a", 1), ("c", 2), ("b", 2)]) == [("b", 2), ("c", 2), ("a", 1)]
assert tuple_sort([]) == []
assert tuple_sort((("x", 0),)) == [("x", 0)]
""",
        ("(-r[1], r[0])", "-r[1]"),
        (
            "return sorted(rows, key=lambda r: (-r[1], r[0]))",
            "return type(rows)(sorted(rows, key=lambda r: (-r[1], r[0])))",
        ),
    ),
    mbpp(
        "max_difference",
        """
def max_difference(values):
    best, low = None, None
    for v in values:
        if low is not None and (best is None or v - low > best):
            best = v - low
        low = v if low is None else min(low, v)
    return best
""",
        """
assert max_difference([7, 1, 5, 3]) == 4
assert max_difference([5, 3, 2]) == -1
assert max_difference([1]) is None
""",
        ("best, low = None, None", "best, low = 0, None"),
        ("return best", "return max(values) - min(values) if best and best > 0 else best"),
    ),
    mbpp(
        "odd_occurrence",
        """
from functools import reduce
from operator import xor


def odd_occurrence(values):
    return reduce(xor, values, 0)
""",
        """
assert odd_occurrence([1, 2, 1]) == 2
assert odd_occurrence([5, 7, 2, 7, 5, 2, 5]) == 5
assert odd_occurrence([]) == 0
""",
        ("return reduce(xor, values, 0)", "return reduce(xor, values)"),
        (
            "return reduce(xor, values, 0)",
            "return next((v for v in values if values.count(v) == 1), 0)",
        ),
    ),
    mbpp(
        "dict_difference",
        """
def dict_difference(a, b):
    return {k: v for k, v in a.items() if k not in b or b[k] != v}
""",
        """
assert dict_difference({"a": 1, "b": 2}, {"a": 1}) == {"b": 2}
assert dict_difference({"a": 1}, {"a": 2}) == {"a": 1}
assert dict_difference({"n": None}, {}) == {"n": None}
""",
        ("k not in b or b[k] != v", "b.get(k) != v"),
        (" or b[k] != v", ""),
    ),
    mbpp(
        "sublists",
        """
def sublists(items):
    return [items[i:j] for i in range(len(items)) for j in range(i + 1, len(items) + 1)]
""",
        """
assert sublists([1, 2]) == [[1], [1, 2], [2]]
assert sublists([]) == []
assert len(sublists(list("abcd"))) == 10
""",
        ("len(items) + 1)]", "len(items))]"),
        ("range(i + 1,", "range(i,"),
    ),
    mbpp(
        "heap_largest",
        """
import heapq


def heap_largest(values, n):
    return heapq.nlargest(n, values)
""",
        """
assert heap_largest([5, 1, 9, 3], 2) == [9, 5]
assert heap_largest([1], 3) == [1]
assert heap_largest([2, 2, 1], 2) == [2, 2]
""",
        ("heapq.nlargest(n, values)", "sorted(values)[-n:]"),
        ("heapq.nlargest(n, values)", "heapq.nlargest(n, set(values))"),
    ),
    mbpp(
        "replace_blank",
        """
def replace_blank(rows, value=0):
    return [[value if cell is None else cell for cell in row] for row in rows]
""",
        """
assert replace_blank([[1, None], [0, ""]]) == [[1, 0], [0, ""]]
assert replace_blank([], 1) == []
assert replace_blank([[None, False]], "x") == [["x", False]]
""",
        ("value if cell is None else cell", "cell or value"),
        ("value=0", "value=1"),
    ),
    mbpp(
        "set_bits_pairs",
        """
def set_bits_pairs(a, b):
    return frozenset((x, y) for x in a for y in b if x & y)
""",
        """
assert set_bits_pairs({1, 2}, {3}) == {(1, 3), (2, 3)}
assert set_bits_pairs({4}, {3}) == frozenset()
assert isinstance(set_bits_pairs([1], [1]), frozenset)
""",
        ("frozenset((x, y)", "set((x, y)"),
        ("if x & y)", "if x and y)"),
    ),
    mbpp(
        "zip_longest_sum",
        """
from itertools import zip_longest


def zip_longest_sum(*rows):
    return tuple(map(sum, zip_longest(*rows, fillvalue=0)))
""",
        """
assert zip_longest_sum([1, 2], [3]) == (4, 2)
assert zip_longest_sum() == ()
assert zip_longest_sum((0.5,), (1,), (2,)) == (3.5,)
""",
        ("zip_longest(*rows, fillvalue=0)", "zip(*rows)"),
        ("tuple(map(sum", "list(map(sum"),
    ),
    mbpp(
        "unique_counts",
        """
from collections import Counter


def unique_counts(values):
    counts = Counter(values).values()
    return len(counts) == len(set(counts))
""",
        """
assert unique_counts([1, 2, 2]) is True
assert unique_counts([1, 2]) is False
assert unique_counts([]) is True
""",
        ("return len(counts)", "return bool(values) and len(counts)"),
        ("Counter(values).values()", "Counter(values).keys()"),
    ),
    mbpp(
        "circular_next",
        """
def circular_next(items, current):
    i = items.index(current)
    return items[(i + 1) % len(items)]
""",
        """
assert circular_next(["a", "b"], "b") == "a"
assert circular_next([1], 1) == 1
assert circular_next((1, 2, 1, 3), 1) == 2
""",
        ("(i + 1) % len(items)", "i + 1 if i + 1 < len(items) else -1"),
        ("items.index(current)", "len(items) - 1 - items[::-1].index(current)"),
    ),
    mbpp(
        "window_max",
        """
from collections import deque


def window_max(values, k):
    out, held = [], deque()
    for i, v in enumerate(values):
        while held and values[held[-1]] <= v:
            held.pop()
        held.append(i)
        if held[0] <= i - k:
            held.popleft()
        if i >= k - 1:
            out.append(values[held[0]])
    return out
""",
        """
assert window_max([1, 3, -1, -3, 5, 3, 6, 7], 3) == [3, 3, 5, 5, 6, 7]
assert window_max([4, 3, 2, 1], 2) == [4, 3, 2]
assert window_max([], 1) == []
""",
        ("held[0] <= i - k", "held[0] < i - k"),
        ("i >= k - 1", "i >= k"),
    ),
    mbpp(
        "merge_intervals",
        """
def merge_intervals(intervals):
    out = []
    for low, high in sorted(intervals):
        if out and low <= out[-1][1]:
            out[-1] = (out[-1][0], max(high, out[-1][1]))
        else:
            out.append((low, high))
    return out
""",
        """
assert merge_intervals([(1, 3), (2, 6), (8, 9)]) == [(1, 6), (8, 9)]
assert merge_intervals([(1, 4), (4, 5)]) == [(1, 5)]
assert merge_intervals([(1, 9), (2, 3)]) == [(1, 9)]
""",
        ("low <= out", "low < out"),
        ("max(high, out[-1][1])", "high"),
    ),
    mbpp(
        "compact_none",
        """
def compact_none(values):
    kept = [v for v in values if v is not None]
    return type(values)(kept)
""",
        """
assert compact_none([0, None, ""]) == [0, ""]
assert compact_none((None, 1)) == (1,)
assert compact_none({None, 2}) == {2}
""",
        ("if v is not None", "if v"),
        ("return type(values)(kept)", "return kept"),
    ),
    mbpp(
        "dict_to_query",
        """
from urllib.parse import quote


def dict_to_query(table):
    return "&".join(f"{quote(str(k))}={quote(str(v))}" for k, v in sorted(table.items()))
""",
        """
assert dict_to_query({"b": 1, "a": "x y"}) == "a=x%20y&b=1"
assert dict_to_query({}) == ""
assert dict_to_query({"k": "é&"}) == "k=%C3%A9%26"
""",
        ("from urllib.parse import quote", "from urllib.parse import quote_plus as quote"),
        ("sorted(table.items())", "table.items()"),
    ),
]
