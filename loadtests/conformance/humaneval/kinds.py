"""Functions whose answers are tested by kind, by order or by what they leave alone."""

from __future__ import annotations

from loadtests.conformance.row import humaneval

ROWS = [
    humaneval(
        "dedupe",
        '''
def dedupe(items):
    """Each once, in the order of first sight; 1 and True are different."""
    seen, out = set(), []
    for item in items:
        key = (type(item), item)
        if key not in seen:
            seen.add(key)
            out.append(item)
    return out
''',
        """
assert candidate([3, 1, 3, 2]) == [3, 1, 2]
assert candidate([]) == []
found = candidate([1, True, 1.0])
assert [type(x) for x in found] == [int, bool, float]
""",
        ("key = (type(item), item)", "key = item"),
        ("return out", "return sorted(out)"),
    ),
    humaneval(
        "fair_count",
        '''
def fair_count(values, *, start=0):
    """(how many, their sum), as a tuple."""
    values = list(values)
    return len(values), sum(values, start)
''',
        """
assert candidate([1, 2]) == (2, 3)
assert candidate([], start=5) == (0, 5)
assert isinstance(candidate(()), tuple)
assert candidate(x for x in (1, 2, 3)) == (3, 6)
assert candidate([[1], [2]], start=[]) == (2, [1, 2])
""",
        ("return len(values), sum(values, start)", "return [len(values), sum(values, start)]"),
        ("sum(values, start)", "sum(values) + start"),
    ),
    humaneval(
        "parse_version",
        '''
def parse_version(text):
    """(1, 2, 3) of "v1.2.3"; parts that miss are 0."""
    parts = [int(part) for part in text.lstrip("v").split(".") if part]
    return tuple(parts + [0] * (3 - len(parts)))
''',
        """
assert candidate("v1.2.3") == (1, 2, 3)
assert candidate("2") == (2, 0, 0)
assert candidate("1.10.0") > candidate("1.9.9")
assert candidate("") == (0, 0, 0)
try:
    candidate("1.x")
except ValueError:
    pass
else:
    raise AssertionError
""",
        ("int(part) for", "part for"),
        ("3 - len(parts)", "2 - len(parts)"),
    ),
    humaneval(
        "append_history",
        '''
def append_history(entry, history=None):
    """A list that ends with the entry; a new one if none is given."""
    history = [] if history is None else history
    history.append(entry)
    return history
''',
        """
assert candidate(1) == [1]
assert candidate(2) == [2]
given = []
assert candidate(3, given) == [3]
assert given == [3]
""",
        ("history=None", "history=[]"),
        ("[] if history is None else history", "list(history or [])"),
    ),
    humaneval(
        "make_counter",
        '''
def make_counter(start=0, step=1):
    """A function that returns the next number at each call."""
    value = start - step

    def count():
        nonlocal value
        value += step
        return value

    return count
''',
        """
first, second = candidate(), candidate(10, 5)
assert [first(), first(), first()] == [0, 1, 2]
assert [second(), second()] == [10, 15]
assert callable(candidate())
""",
        ("value = start - step", "value = start"),
        (
            "def count():\n        nonlocal value\n",
            "def count():\n        value = start - step\n",
        ),
    ),
    humaneval(
        "compose",
        '''
def compose(*functions):
    """f(g(x)) for (f, g); what does nothing for none."""
    def run(x):
        for function in reversed(functions):
            x = function(x)
        return x
    return run
''',
        """
assert candidate(lambda x: x + 1, lambda x: x * 2)(5) == 11
assert candidate()(7) == 7
assert candidate(str, abs)(-3) == "3"
assert candidate(len)([1, 2]) == 2
""",
        ("reversed(functions)", "functions"),
        ("    return run\n", "    return run if functions else None\n"),
    ),
    humaneval(
        "retry",
        '''
def retry(action, times):
    """The first result of up to `times` tries; the last error if none succeeds."""
    for left in range(times - 1, -1, -1):
        try:
            return action()
        except Exception:
            if not left:
                raise
''',
        """
calls = []
def flaky():
    calls.append(1)
    if len(calls) < 3:
        raise ValueError("no")
    return "yes"
assert candidate(flaky, 3) == "yes"
assert len(calls) == 3
calls.clear()
try:
    candidate(flaky, 2)
except ValueError as error:
    assert str(error) == "no" and len(calls) == 2
else:
    assert False
""",
        ("range(times - 1, -1, -1)", "range(times, -1, -1)"),
        (
            "            if not left:\n                raise\n",
            "            if not left:\n                raise RuntimeError from None\n",
        ),
    ),
    humaneval(
        "sort_by_last",
        '''
def sort_by_last(rows):
    """A new list by the last field, ties as they stood."""
    return sorted(rows, key=lambda row: row[-1])
''',
        """
rows = [("b", 2), ("a", 2), ("c", 1)]
assert candidate(rows) == [("c", 1), ("b", 2), ("a", 2)]
assert rows[0] == ("b", 2)
assert candidate([]) == []
assert candidate([[3], [1]]) == [[1], [3]]
""",
        ("key=lambda row: row[-1]", "key=lambda row: row[::-1]"),
        (
            "return sorted(rows, key=lambda row: row[-1])",
            "rows.sort(key=lambda row: row[-1])\n    return rows",
        ),
    ),
    humaneval(
        "partition_point",
        '''
def partition_point(values, wanted):
    """The first place at which a sorted list holds `wanted` or more."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low
''',
        """
assert candidate([1, 3, 3, 5], 3) == 1
assert candidate([], 1) == 0
assert candidate([1, 2], 9) == 2
assert candidate([1, 3, 5], 4) == 2
assert candidate(list(range(1000)), 731) == 731
""",
        ("values[middle] < wanted", "values[middle] <= wanted"),
        ("0, len(values)", "0, len(values) - 1"),
    ),
    humaneval(
        "lazy_squares",
        '''
def lazy_squares(numbers):
    """Squares one by one, of as many numbers as are asked for."""
    for x in numbers:
        yield x * x
''',
        """
assert list(candidate([1, 2, -3])) == [1, 4, 9]
def endless():
    n = 0
    while True:
        n += 1
        if n > 50:
            raise RuntimeError("asked for too much")
        yield n
found = candidate(endless())
assert next(found) == 1
assert next(found) == 4
assert list(candidate([])) == []
""",
        ("for x in numbers:", "for x in list(numbers):"),
        ("yield x * x", "yield x * abs(x)"),
    ),
    humaneval(
        "bytes_checksum",
        '''
def bytes_checksum(data: bytes) -> bytes:
    """The data and one byte more, so that the sum is 0 modulo 256."""
    return data + bytes([-sum(data) % 256])
''',
        """
assert candidate(b"") == b"\\x00"
assert candidate(b"\\x01\\x02") == b"\\x01\\x02\\xfd"
assert sum(candidate(b"hello")) % 256 == 0
assert type(candidate(b"a")) is bytes
""",
        ("-sum(data) % 256", "255 - sum(data) % 256"),
        (
            "return data + bytes([-sum(data) % 256])",
            "return bytearray(data + bytes([-sum(data) % 256]))",
        ),
    ),
    humaneval(
        "complex_roots",
        '''
import cmath


def complex_roots(n):
    """The n-th roots of one, from the angle 0 on."""
    return [cmath.exp(2j * cmath.pi * k / n) for k in range(n)]
''',
        """
assert candidate(1) == [1]
assert all(abs(z**4 - 1) < 1e-9 for z in candidate(4))
assert abs(candidate(4)[1] - 1j) < 1e-9
assert len(candidate(5)) == 5
assert abs(sum(candidate(5))) < 1e-9
""",
        ("2j * cmath.pi", "1j * cmath.pi"),
        ("2j * cmath.pi * k / n", "-2j * cmath.pi * k / n"),
    ),
    humaneval(
        "any_order",
        '''
from itertools import combinations


def any_order(numbers, total):
    """All pairs of places whose numbers add up to `total`."""
    pairs = combinations(range(len(numbers)), 2)
    return [(i, j) for i, j in pairs if numbers[i] + numbers[j] == total]
''',
        """
assert sorted(candidate([1, 2, 3, 2], 4)) == [(0, 2), (1, 3)]
assert candidate([], 0) == []
assert set(candidate([0, 0, 0], 0)) == {(0, 1), (0, 2), (1, 2)}
assert candidate([5], 10) == []
""",
        (
            "combinations(range(len(numbers)), 2)",
            "[(i, j) for i in range(len(numbers)) for j in range(i, len(numbers))]",
        ),
        ("return [(i, j) for", "return [(numbers[i], numbers[j]) for"),
    ),
    humaneval(
        "shift_inplace",
        '''
def shift_inplace(values, by):
    """Adds to every number of the list itself; returns nothing."""
    for i in range(len(values)):
        values[i] += by
''',
        """
given = [1, 2, 3]
assert candidate(given, 2) is None
assert given == [3, 4, 5]
empty = []
candidate(empty, 1)
assert empty == []
nested = [[1], [2]]
candidate(nested, [0])
assert nested == [[1, 0], [2, 0]]
""",
        (
            "    for i in range(len(values)):\n        values[i] += by\n",
            "    values = [v + by for v in values]\n",
        ),
        ("        values[i] += by\n", "        values[i] += by\n    return values\n"),
    ),
]
