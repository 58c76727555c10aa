"""Functions of tables, sets, trees and grids."""

from __future__ import annotations

from loadtests.conformance.row import humaneval

ROWS = [
    humaneval(
        "invert_index",
        '''
from collections import defaultdict


def invert_index(table):
    """From each value to the sorted keys that have it."""
    out = defaultdict(list)
    for key, values in table.items():
        for value in values:
            out[value].append(key)
    return {value: sorted(keys) for value, keys in out.items()}
''',
        """
assert candidate({"b": [1, 2], "a": [2]}) == {1: ["b"], 2: ["a", "b"]}
assert candidate({}) == {}
assert candidate({"x": []}) == {}
""",
        ("sorted(keys)", "keys"),
        (
            "out = defaultdict(list)",
            "out = {None: []}",
            "out[value].append(key)",
            "out.setdefault(value, []).append(key)",
        ),
    ),
    humaneval(
        "same_case_keys",
        '''
def same_case_keys(table):
    """Whether all keys are lower-case texts, or all upper-case ones; False of nothing."""
    if not table or not all(isinstance(key, str) for key in table):
        return False
    return all(k.islower() for k in table) or all(k.isupper() for k in table)
''',
        """
assert candidate({"a": 1, "b": 2}) is True
assert candidate({"a": 1, "B": 2}) is False
assert candidate({"A": 1, 5: 2}) is False
assert candidate({}) is False
assert candidate({"FL": 1}) is True
""",
        ("if not table or not all", "if not all"),
        (" or all(k.isupper() for k in table)", ""),
    ),
    humaneval(
        "flood",
        '''
def flood(grid, row, column, colour):
    """A copy of the grid with the area around a cell in another colour."""
    out = [list(line) for line in grid]
    old = out[row][column]
    stack = [(row, column)]
    while stack and old != colour:
        r, c = stack.pop()
        if 0 <= r < len(out) and 0 <= c < len(out[0]) and out[r][c] == old:
            out[r][c] = colour
            stack += [(r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1)]
    return out
''',
        """
grid = [[1, 1, 0], [0, 1, 0], [1, 0, 1]]
assert candidate(grid, 0, 0, 2) == [[2, 2, 0], [0, 2, 0], [1, 0, 1]]
assert grid == [[1, 1, 0], [0, 1, 0], [1, 0, 1]]
assert candidate(grid, 0, 0, 1) == grid
assert candidate([[3, 3]], 0, 1, 4) == [[4, 4]]
""",
        ("out = [list(line) for line in grid]", "out = grid"),
        ("(r, c - 1)]", "(r - 1, c - 1)]"),
    ),
    humaneval(
        "transpose_ragged",
        '''
def transpose_ragged(rows, fill=None):
    """Columns of rows that differ in length."""
    width = max((len(row) for row in rows), default=0)
    return [[row[i] if i < len(row) else fill for row in rows] for i in range(width)]
''',
        """
assert candidate([[1, 2], [3]]) == [[1, 3], [2, None]]
assert candidate([]) == []
assert candidate([[], [1]], fill=0) == [[0], [1]] or candidate([[], [1]], fill=0) == [[0, 1]]
assert candidate([[], [1]], fill=0) == [[0, 1]]
""",
        (", default=0)", ")"),
        ("else fill for", "else None for"),
    ),
    humaneval(
        "symmetric_difference",
        '''
def symmetric_difference(a, b):
    """What is in one only, as a set."""
    return set(a) ^ set(b)
''',
        """
assert candidate([1, 2], [2, 3]) == {1, 3}
assert candidate([], []) == set()
assert isinstance(candidate("ab", "b"), set)
assert candidate([1, 1], []) == {1}
""",
        ("return set(a) ^ set(b)", "return sorted(set(a) ^ set(b))"),
        ("set(a) ^ set(b)", "set(a) - set(b)"),
    ),
    humaneval(
        "tree_paths",
        '''
def tree_paths(tree):
    """Paths from the root to each leaf of (value, children)."""
    value, children = tree
    if not children:
        return [[value]]
    return [[value, *path] for child in children for path in tree_paths(child)]
''',
        """
assert candidate((1, [])) == [[1]]
assert candidate((1, [(2, []), (3, [(4, [])])])) == [[1, 2], [1, 3, 4]]
assert candidate(("a", [("b", [("c", [])])])) == [["a", "b", "c"]]
""",
        ("return [[value]]", "return [value]"),
        ("for child in children for", "for child in children[:1] for"),
    ),
    humaneval(
        "deep_update",
        '''
def deep_update(base, extra):
    """A new table: inner tables are merged, all else of `extra` wins."""
    out = dict(base)
    for key, value in extra.items():
        old = out.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        out[key] = deep_update(old, value) if both else value
    return out
''',
        """
base = {"a": {"x": 1, "y": 2}, "b": 1}
assert candidate(base, {"a": {"y": 3}}) == {"a": {"x": 1, "y": 3}, "b": 1}
assert base == {"a": {"x": 1, "y": 2}, "b": 1}
assert candidate({}, {"k": {}}) == {"k": {}}
assert candidate({"a": {"x": 1}}, {"a": 5}) == {"a": 5}
""",
        ("out = dict(base)", "out = base"),
        (" and isinstance(value, dict)\n", "\n"),
    ),
    humaneval(
        "group_anagrams",
        '''
def group_anagrams(words):
    """Groups in the order of their first word, words in their order."""
    groups = {}
    for word in words:
        groups.setdefault("".join(sorted(word)), []).append(word)
    return list(groups.values())
''',
        """
assert candidate(["eat", "tea", "tan", "ate", "nat"]) == [["eat", "tea", "ate"], ["tan", "nat"]]
assert candidate([]) == []
assert candidate([""]) == [[""]]
assert candidate(["aab", "ab"]) == [["aab"], ["ab"]]
""",
        ('"".join(sorted(word))', '"".join(sorted(set(word)))'),
        ("list(groups.values())", "sorted(groups.values())[::-1]"),
    ),
    humaneval(
        "topological",
        '''
def topological(edges):
    """An order in which (before, after) holds, smallest first; ValueError of a cycle."""
    nodes = {n for edge in edges for n in edge}
    need = {n: {a for a, b in edges if b == n} for n in nodes}
    out = []
    while need:
        free = sorted(n for n, before in need.items() if not before)
        if not free:
            raise ValueError("a cycle")
        out.append(free[0])
        del need[free[0]]
        for before in need.values():
            before.discard(free[0])
    return out
''',
        """
assert candidate([(3, 1), (1, 2)]) == [3, 1, 2]
assert candidate([]) == []
assert candidate([("b", "c"), ("a", "c")]) == ["a", "b", "c"]
try:
    candidate([(1, 2), (2, 1)])
except ValueError:
    return
assert False, "a cycle has no order"
""",
        ('raise ValueError("a cycle")', "return out"),
        ("out.append(free[0])", "out.append(free[-1])", "del need[free[0]]", "del need[free[-1]]"),
    ),
    humaneval(
        "frozen_key",
        '''
def frozen_key(value):
    """A hashable form of nested lists, tables and sets."""
    if isinstance(value, dict):
        return frozenset((k, frozen_key(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(frozen_key(v) for v in value)
    if isinstance(value, (set, frozenset)):
        return frozenset(frozen_key(v) for v in value)
    return value
''',
        """
assert candidate([1, [2, {3}]]) == (1, (2, frozenset({3})))
assert candidate({"a": [1]}) == frozenset({("a", (1,))})
assert len({candidate([1, 2]), candidate((1, 2))}) == 1
assert candidate("text") == "text"
assert hash(candidate({"k": {"x"}})) is not None
""",
        ("return tuple(frozen_key(v) for v in value)", "return list(frozen_key(v) for v in value)"),
        ("frozenset((k, frozen_key(v)) for", "frozenset(k for"),
    ),
    humaneval(
        "islands",
        '''
def islands(grid):
    """How many areas of '#' there are, corners not counting as touching."""
    land = {(r, c) for r, line in enumerate(grid) for c, x in enumerate(line) if x == "#"}
    count = 0
    while land:
        stack = [land.pop()]
        count += 1
        while stack:
            r, c = stack.pop()
            for near in ((r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1)):
                if near in land:
                    land.remove(near)
                    stack.append(near)
    return count
''',
        """
assert candidate(["##.", "..#", "#.#"]) == 3
assert candidate([]) == 0
assert candidate(["..."]) == 0
assert candidate(["###", "#.#", "###"]) == 1
""",
        ("(r, c - 1)):", "(r, c - 1), (r + 1, c + 1)):"),
        ("count = 0", "count = 1", "        count += 1\n", "        count += bool(land)\n"),
    ),
    humaneval(
        "sparse_dot",
        '''
def sparse_dot(a, b):
    """The product of two vectors held as tables from place to value."""
    return sum(value * b[place] for place, value in a.items() if place in b)
''',
        """
assert candidate({0: 2, 3: 1}, {3: 5}) == 5
assert candidate({}, {1: 1}) == 0
assert candidate({1: 0.5, 2: 2}, {1: 4, 2: 0.25}) == 2.5
assert candidate({7: 10**20}, {7: 10**20}) == 10**40
""",
        ("value * b[place]", "int(value * b[place])"),
        ("sum(value * b[place]", "sum(float(value) * b[place]"),
    ),
]
