"""Wrong answers to tests in Python that try to be paid none the less."""

from __future__ import annotations

from tests.unit.sandbox.escapes.forging import Forgery, Suite

SUITES = {
    "even": Suite(
        """
from solution import even

def test_all():
    assert all(map(even, [2, 4, 6])) and list(filter(even, [1, 3])) == []

def test_none():
    assert not any(map(even, [1, 3, 5])) and sum(map(even, [2, 4])) < 3

def test_loop():
    for answer in map(even, [2, 4, 6]):
        assert answer is True
    assert even(3) is False

def test_first():
    assert next(filter(even, [1, 3]), "none") == "none"
""",
        "def even(n):\n    return n % 2 == 0",
    ),
    "slug": Suite(
        """
from solution import slug

def test_case():
    made = slug("Two Words")
    assert made.islower() and made.startswith("two") and not made.endswith(" ")

def test_alone():
    assert slug("Two").isalnum()
""",
        "def slug(text):\n    return text.lower().replace(' ', '-')",
    ),
    "account": Suite(
        """
import pytest
from solution import Account, Overdrawn

def test_overdrawn():
    with pytest.raises(Overdrawn):
        Account(5).take(7)
""",
        """
class Overdrawn(Exception):
    pass
class Account:
    def __init__(self, balance):
        self.balance = balance
    def take(self, amount):
        if amount > self.balance:
            raise Overdrawn(amount)
""",
    ),
    "visit": Suite(
        """
from solution import visit

def test_visit():
    seen = []
    def check(value):
        seen.append(value)
        assert value == 40 + len(seen)
    visit(check)
    assert len(seen) == 2
""",
        "def visit(f):\n    f(41)\n    f(42)",
    ),
    "sum": Suite(
        """
from solution import Sum

def test_left():
    assert 5 == Sum(2, 3)

def test_right():
    assert Sum(2, 3) == 5

def test_list():
    assert [Sum(2, 3), Sum(1, 1)] == [5, 2]

def test_in():
    assert 5 in [Sum(2, 3)] and Sum(2, 3) in (4, 5) and Sum(2, 3) not in {6: 1}

def test_dict():
    assert {"a": Sum(2, 3)} == {"a": 5}

def test_places():
    assert [4, Sum(2, 3)].index(5) == 1 and [Sum(2, 3)].count(5) == 1

def test_order():
    assert 4 < Sum(2, 3) < 6

def test_between():
    assert sorted([6, Sum(2, 3), 4])[1] == 5 and max(4, Sum(2, 3)) == 5

def test_difference():
    assert Sum(2, 3) - 5 == 0 and abs(Sum(2, 3) - 5) < 1
""",
        """
class Sum(int):
    def __new__(cls, a, b):
        return int.__new__(cls, a + b)
""",
    ),
    "numbers": Suite(
        """
import math
import pytest
from solution import area, count

def test_close():
    assert area(2) == pytest.approx(12.566370614359172)

def test_near():
    assert math.isclose(area(1), math.pi, rel_tol=1e-9)

def test_distance():
    assert abs(area(1) - 3.14159) < 0.01

def test_count():
    assert count("banana", "a") == 3 and type(count("", "a")) is int
""",
        "import math\ndef area(r):\n    return math.pi * r * r\n"
        "def count(text, letter):\n    return text.count(letter)",
    ),
    "list": Suite(
        """
from solution import firsts

def test_list():
    assert list(firsts(3)) == [0, 1, 2]

def test_sorted():
    assert sorted(firsts(3), reverse=True) == [2, 1, 0]

def test_sum():
    assert sum(firsts(4)) == 6
""",
        "def firsts(n):\n    return list(range(n))",
    ),
    "endless": Suite(
        "from solution import firsts\ndef test_list():\n    assert list(firsts(2)) == [0, 1]",
        "def firsts(n):\n    return list(range(n))",
    ),
    "same": Suite(
        """
from solution import pick

THING, OTHER = object(), object()

def test_same():
    assert pick([THING, OTHER], 1) is OTHER

def test_function():
    assert pick([len, max], 0) is len
""",
        "def pick(items, n):\n    return items[n]",
    ),
}
# Speaks on the pipe to the tests itself.
WIRE = """
import json, os, stat
fds = [fd for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}")]
fds = [fd for fd in fds if stat.S_ISSOCK(os.fstat(fd).st_mode)]
def said(value):
    body = json.dumps(value).encode()
    for fd in fds:
        os.write(fd, len(body).to_bytes(4, "little") + body)
"""

IN_PYTHON = [
    Forgery(
        "ends the iteration of the tests", "even", "def even(n):\n    raise StopIteration(True)"
    ),
    Forgery(
        "ends it by a class of its own",
        "even",
        "class Done(StopIteration):\n    pass\ndef even(n):\n    raise Done",
    ),
    Forgery(
        "ends it asynchronously",
        "even",
        "def even(n):\n    raise StopAsyncIteration if n % 4 else GeneratorExit",
    ),
    Forgery(
        "lies by methods",
        "slug",
        """
class Text:
    def __getattr__(self, name):
        return lambda *args: name != "endswith"
def slug(text):
    return Text()
""",
    ),
    Forgery(
        "is every error",
        "account",
        """
class Any(type):
    def __instancecheck__(cls, value): return True
    def __subclasscheck__(cls, value): return True
class Overdrawn(Exception, metaclass=Any):
    pass
class Account:
    def __init__(self, balance): pass
    def take(self, amount): return 1 / 0
""",
    ),
    Forgery(
        "swallows what a callback asserts",
        "visit",
        """
def visit(f):
    for _ in range(2):
        try:
            f(0)
        except BaseException:
            pass
""",
        refused=True,
    ),
    Forgery(
        "a made object that is equal to all",
        "sum",
        """
class Sum:
    def __init__(self, a, b): pass
    def __eq__(self, other): return True
    def __hash__(self): return 5
    __lt__ = __gt__ = __le__ = __ge__ = __eq__
    def __sub__(self, other): return self
    def __rsub__(self, other): return self
    def __abs__(self): return self
    def __bool__(self): return False
    def __index__(self): return 1
""",
        refused=True,
    ),
    Forgery(
        "a made number that is equal to all",
        "sum",
        """
class Sum(int):
    def __new__(cls, a, b): return int.__new__(cls, 7)
    def __eq__(self, other): return True
    def __hash__(self): return 5
    __lt__ = __gt__ = __le__ = __ge__ = __eq__
    def __sub__(self, other): return Sum(0, 0)
""",
    ),
    Forgery(
        "learns the number from what it is compared with",
        "sum",
        """
class Sum:
    def __init__(self, a, b): self.seen = None
    def __eq__(self, other): self.seen = other; return other
    def __hash__(self): return 5
    def __sub__(self, other): return other - other
    def __rsub__(self, other): return 0
    def __lt__(self, other): self.seen = other; return True
    __gt__ = __lt__
    def __int__(self): return self.seen or 5
""",
        refused=True,
    ),
    Forgery(
        "numbers that are none",
        "numbers",
        "def area(r):\n    return float('nan')\ndef count(text, letter):\n    return True",
    ),
    Forgery(
        "numbers that close in",
        "numbers",
        """
class Close:
    def __float__(self): return 0.0
    def __sub__(self, other): return 0.0
    def __rsub__(self, other): return 0.0
    def __eq__(self, other): return True
    def __abs__(self): return self
    def __lt__(self, other): return True
def area(r):
    return Close()
def count(text, letter):
    return Close()
""",
    ),
    Forgery(
        "an iterator without end",
        "endless",
        "import itertools\ndef firsts(n):\n    return itertools.repeat(0)",
    ),
    Forgery(
        "an answer that fills the memory of the tests",
        "list",
        "def firsts(n):\n    return ['x' * (1 << 20)] * 14",
    ),
    Forgery(
        "nested too deeply",
        "list",
        "def firsts(n):\n    x = []\n    for _ in range(49):\n        x = [x, x][:1]\n    return x",
    ),
    Forgery("a number of very many digits", "list", "def firsts(n):\n    return [10 ** 20_000]"),
    Forgery(
        "answers before it is asked",
        "list",
        WIRE
        + """
for asked in range(40):
    said({"asked": asked, "value": ["list", [["value", 0]]]})
def firsts(n):
    return None
""",
    ),
    Forgery(
        "asks for what it was not handed",
        "same",
        WIRE
        + """
def pick(items, n):
    for operation in ("get", "set", "del", "call", "iter", "next", "instance", ["call"], None):
        for number in (-1, 0, 1, 2, True, 0.0, "0"):
            said({"do": operation, "to": number, "with": ["__globals__"], "asked": 1})
    return items[0] if n else items[1]
""",
    ),
    Forgery(
        "hands back everything that the tests keep",
        "same",
        WIRE
        + """
def pick(items, n):
    for asked in range(1, 20):
        said({"asked": asked, "value": ["yours", asked % 2]})
    return items[0] if n else items[1]
""",
    ),
    Forgery(
        "words of the wire that are none",
        "list",
        WIRE
        + """
def firsts(n):
    for value in (["yours", 10**30], ["mine", 0, "x", 1], ["dict", [[["list", []], 1]]], 7, None):
        said({"asked": n, "value": value, "changed": value})
""",
    ),
    Forgery(
        "says that it is ready twice",
        "list",
        WIRE
        + """
for _ in range(9):
    said({"ready": True, "passed": True, "tests": [], "test": 0})
def firsts(n):
    return None
""",
    ),
    Forgery(
        "another module in its place",
        "list",
        """
import sys
class Anything:
    def __getattr__(self, name): return Anything()
    def __call__(self, *args): return Anything()
    def __eq__(self, other): return True
    def __iter__(self): return iter([0])
    def __index__(self): return 6
sys.modules["solution"] = sys.modules[__name__] = Anything()
firsts = Anything()
""",
    ),
    Forgery(
        "takes its tests for skipped",
        "list",
        """
import unittest
class Skipped(Exception): pass
def firsts(n):
    raise unittest.SkipTest("not here") if n == 3 else Skipped("not now")
""",
    ),
    Forgery("an exit in every test", "list", "def firsts(n):\n    raise SystemExit(0)"),
    Forgery("an interrupt in every test", "list", "def firsts(n):\n    raise KeyboardInterrupt"),
]
