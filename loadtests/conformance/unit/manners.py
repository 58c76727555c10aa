"""Suites that compare kinds, texts, numbers and containers, each in its author's way."""

from __future__ import annotations

from loadtests.conformance.row import unit

ROWS = [
    unit(
        "string_builder",
        """
def table(rows, sep=" | "):
    rows = [[str(c) for c in row] for row in rows]
    if not rows:
        return ""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\\n".join(
        sep.join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows
    )
""",
        '''
from textwrap import dedent

from solution import table


def test_block():
    wanted = dedent("""\\
        a | bb
        ccc | d
    """)
    found = table([["a", "bb"], ["ccc", "d"]])
    assert found.splitlines() == ["a   | bb", "ccc | d"]
    assert len(found.splitlines()) == len(wanted.splitlines())


def test_kinds():
    assert table([[1, None]], sep=",") == "1,None"
    assert table([]) == ""
    assert table([["a", ""]]) == "a |"
''',
        (".rstrip() for row in rows", " for row in rows"),
        ('return ""', "return None"),
    ),
    unit(
        "exact_types",
        """
def coerce(text):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False, "null": None}.get(text.lower(), text)
""",
        """
import math

import pytest
from solution import coerce


@pytest.mark.parametrize(
    "text,wanted",
    [("1", 1), ("1.0", 1.0), ("-2e3", -2000.0), ("true", True), ("NULL", None), ("", "")],
)
def test_coerce(text, wanted):
    found = coerce(text)
    assert found == wanted
    assert type(found) is type(wanted)


def test_special():
    assert math.isinf(coerce("inf"))
    assert math.isnan(coerce("nan"))
    assert coerce("1_000") == 1000
""",
        ("(int, float)", "(float,)"),
        ("text.lower(), text)", "text, text)"),
    ),
    unit(
        "global_state",
        """
_next = 0
_free = []


def new_id():
    global _next
    if _free:
        return _free.pop()
    _next += 1
    return _next


def free_id(number):
    if number > _next or number in _free or number < 1:
        raise ValueError(number)
    _free.append(number)


def reset():
    global _next
    _next = 0
    _free.clear()
""",
        """
import pytest
import solution


def setup_function(function):
    solution.reset()


def test_counts():
    assert [solution.new_id() for _ in range(3)] == [1, 2, 3]


def test_reuses():
    solution.new_id(), solution.new_id()
    solution.free_id(1)
    assert solution.new_id() == 1
    assert solution.new_id() == 3
    solution.free_id(3)
    solution.reset()
    assert solution.new_id() == 1


def test_bad():
    solution.new_id()
    for bad in (0, 2):
        with pytest.raises(ValueError):
            solution.free_id(bad)
    solution.free_id(1)
    with pytest.raises(ValueError):
        solution.free_id(1)
""",
        (" or number in _free", ""),
        ("    _free.clear()\n", ""),
    ),
    unit(
        "setup_module_data",
        """
class Matcher:
    def __init__(self, rules):
        self.rules = list(rules)

    def match(self, path):
        parts = path.strip("/").split("/")
        for pattern, name in self.rules:
            wanted = pattern.strip("/").split("/")
            if len(wanted) != len(parts):
                continue
            found = {}
            for w, p in zip(wanted, parts):
                if w.startswith(":"):
                    found[w[1:]] = p
                elif w != p:
                    break
            else:
                return name, found
        return None
""",
        """
from solution import Matcher

matcher = None


def setup_module(module):
    global matcher
    users = [("/users", "list"), ("/users/me", "me"), ("/users/:id", "one")]
    matcher = Matcher([*users, ("/:a/:b/x", "two")])


def teardown_module():
    assert len(matcher.rules) == 4


def test_fixed():
    assert matcher.match("/users/") == ("list", {})
    assert matcher.match("users/me") == ("me", {})


def test_named():
    assert matcher.match("/users/7") == ("one", {"id": "7"})
    name, found = matcher.match("/p/q/x")
    assert name == "two" and found == {"a": "p", "b": "q"}


def test_none():
    assert matcher.match("/users/7/y") is None
    assert matcher.match("/nothing") is None
""",
        ("for pattern, name in self.rules", "for pattern, name in self.rules[::-1]"),
        ("            if len(wanted) != len(parts):\n                continue\n", ""),
    ),
    unit(
        "nan_and_infinity",
        """
import math


def safe_stats(values):
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return math.nan, math.nan
    return min(finite), max(finite)


def relative_error(found, wanted):
    if wanted == 0:
        return math.inf if found else 0.0
    return abs(found - wanted) / abs(wanted)
""",
        """
import math

import pytest
from solution import relative_error, safe_stats


def test_ignores_what_is_not_finite():
    assert safe_stats([1.5, math.nan, -math.inf, 3]) == (1.5, 3)


def test_nothing():
    low, high = safe_stats([math.nan])
    assert math.isnan(low) and math.isnan(high)
    assert safe_stats([]) == pytest.approx((math.nan, math.nan), nan_ok=True)


def test_error():
    assert relative_error(1.1, 1) == pytest.approx(0.1, rel=1e-9)
    assert relative_error(0, 0) == 0
    assert relative_error(1e-300, 0) == math.inf
    assert relative_error(-1, -2) == pytest.approx(0.5)
""",
        ("math.isfinite(v)", "not math.isnan(v)"),
        ("/ abs(wanted)", "/ wanted"),
    ),
    unit(
        "order_of_sets",
        """
def closure(edges):
    out = set(edges)
    while True:
        new = {(a, d) for a, b in out for c, d in out if b == c} - out
        if not new:
            return out
        out |= new


def roots(edges):
    return {a for a, _ in edges} - {b for _, b in edges}
""",
        """
from solution import closure, roots

EDGES = [("a", "b"), ("b", "c"), ("x", "c")]


def test_closure():
    found = closure(EDGES)
    assert found == {*EDGES, ("a", "c")}
    assert isinstance(found, set)
    assert ("c", "a") not in found
    assert closure([]) == set()
    assert len(closure([(1, 2), (2, 3), (3, 4), (4, 5)])) == 10


def test_argument_stays():
    edges = {(1, 2), (2, 3)}
    assert closure(edges) > edges
    assert len(edges) == 2


def test_roots():
    assert sorted(roots(EDGES)) == ["a", "x"]
    assert roots([(1, 1)]) == set()
    assert roots(EDGES) | {"z"} == {"a", "x", "z"}
""",
        ("out = set(edges)", "out = edges if isinstance(edges, set) else set(edges)"),
        (
            "        if not new:\n            return out\n        out |= new",
            "        return out | new",
        ),
    ),
    unit(
        "helper_assertions",
        '''
def allocate(total, weights):
    """Whole shares in proportion to the weights, which add up to the total."""
    if total < 0 or not weights or sum(weights) <= 0:
        raise ValueError("nothing to share")
    whole = sum(weights)
    shares = [total * w // whole for w in weights]
    rests = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for i in rests[: total - sum(shares)]:
        shares[i] += 1
    return shares
''',
        """
import pytest
from solution import allocate


def assert_fair(total, weights):
    shares = allocate(total, weights)
    assert sum(shares) == total, f"{shares} of {total}"
    for share, weight in zip(shares, weights):
        assert abs(share - total * weight / sum(weights)) < 1, (share, weight)
    return shares


def test_even():
    assert assert_fair(10, [1, 1]) == [5, 5]


def test_rest():
    assert assert_fair(10, [1, 1, 1]) == [4, 3, 3]
    assert assert_fair(7, [1, 2, 4]) == [1, 2, 4]
    assert assert_fair(5, [3, 1, 1, 1]) == [3, 1, 1, 0] or assert_fair(5, [3, 1, 1, 1])[0] == 2


def test_large():
    assert allocate(10**24 + 1, [1, 1]) == [5 * 10**23 + 1, 5 * 10**23]


@pytest.mark.parametrize("total,weights", [(-1, [1]), (1, []), (1, [0, 0])])
def test_bad(total, weights):
    with pytest.raises(ValueError, match="nothing"):
        allocate(total, weights)
""",
        ("total * w // whole for", "int(total * w / whole) for"),
        ("(-(total * weights[i] % whole), i)", "-i"),
    ),
]
