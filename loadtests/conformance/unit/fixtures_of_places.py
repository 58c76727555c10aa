"""Fixtures: of classes, of fixtures, finalizers, temporary paths."""

from __future__ import annotations

from loadtests.conformance.row import unit

ROWS = [
    unit(
        "class_fixture",
        """
class Thermostat:
    low, high = 5, 30

    def __init__(self, target=20):
        self.target = target

    @property
    def target(self):
        return self._target

    @target.setter
    def target(self, value):
        if not self.low <= value <= self.high:
            raise ValueError(f"{value} is not within {self.low} and {self.high}")
        self._target = value

    def step(self, current):
        if current < self.target - 0.5:
            return "heat"
        return "cool" if current > self.target + 0.5 else "hold"
""",
        """
import pytest
from solution import Thermostat


class TestThermostat:
    @pytest.fixture
    def device(self):
        return Thermostat(21)

    @pytest.mark.parametrize(
        ("current", "action"), [(20.4, "heat"), (20.5, "hold"), (21.5, "hold"), (21.6, "cool")]
    )
    def test_step(self, device, current, action):
        assert device.step(current) == action

    @pytest.mark.parametrize("value", [4, 31])
    def test_limits(self, device, value):
        with pytest.raises(ValueError, match=r"is not within 5 and 30"):
            device.target = value
        assert device.target == 21

    def test_bounds_are_allowed(self, device):
        device.target = 5
        device.target = 30
        assert device.target == 30
""",
        ("self.low <= value <= self.high", "self.low < value <= self.high"),
        ("current > self.target + 0.5", "current >= self.target + 0.5"),
    ),
    unit(
        "fixture_chain",
        """
class Cart:
    def __init__(self, prices):
        self.prices = prices
        self.lines = {}

    def put(self, item, n=1):
        if item not in self.prices:
            raise KeyError(item)
        self.lines[item] = self.lines.get(item, 0) + n
        return self

    def total(self, coupon=None):
        cents = sum(self.prices[item] * n for item, n in self.lines.items())
        if coupon:
            cents -= cents * coupon // 100
        return cents
""",
        """
import pytest
from solution import Cart


@pytest.fixture
def prices():
    return {"pen": 150, "ink": 999}


@pytest.fixture
def cart(prices):
    return Cart(prices)


@pytest.fixture
def full(cart):
    return cart.put("pen", 2).put("ink")


def test_total(full):
    assert full.total() == 1299


def test_coupon_rounds_in_favour_of_the_shop(full):
    assert full.total(coupon=10) == 1170


def test_empty(cart):
    assert cart.total() == 0
    assert isinstance(cart.total(coupon=50), int)


def test_more_of_one(cart):
    cart.put("pen").put("pen")
    assert cart.lines == {"pen": 2}


def test_unknown(cart, prices):
    assert "cup" not in prices
    with pytest.raises(KeyError):
        cart.put("cup")
""",
        ("cents -= cents * coupon // 100", "cents = cents * (100 - coupon) // 100"),
        ("        return self\n", ""),
    ),
    unit(
        "request_finalizer",
        """
class Pool:
    def __init__(self, size):
        self._free = list(range(size))
        self._used = set()

    def acquire(self):
        if not self._free:
            raise LookupError("none is free")
        n = min(self._free)
        self._free.remove(n)
        self._used.add(n)
        return n

    def release(self, n):
        if n not in self._used:
            raise ValueError(f"{n} is not in use")
        self._used.discard(n)
        self._free.append(n)

    @property
    def free(self):
        return len(self._free)
""",
        """
import pytest
from solution import Pool


@pytest.fixture
def pool(request):
    made = Pool(2)
    taken = []

    def give_back():
        for n in taken:
            made.release(n)
        assert made.free == 2

    request.addfinalizer(give_back)
    made_acquire = made.acquire

    def acquire():
        taken.append(made_acquire())
        return taken[-1]

    return made, acquire


def test_smallest_first(pool):
    made, acquire = pool
    assert [acquire(), acquire()] == [0, 1]
    with pytest.raises(LookupError):
        made.acquire()


def test_release_twice(pool):
    made, _ = pool
    n = made.acquire()
    made.release(n)
    with pytest.raises(ValueError, match="0 is not in use"):
        made.release(n)
    assert made.free == 2


def test_again():
    pool = Pool(3)
    pool.acquire(), pool.acquire()
    pool.release(0)
    assert pool.acquire() == 0
""",
        ("n = min(self._free)", "n = self._free[0]"),
        ("        self._used.discard(n)\n", ""),
    ),
    unit(
        "tmp_path_factory",
        '''
import json
import os


class Store:
    """Tables in files, written whole or not at all."""

    def __init__(self, directory):
        self.directory = os.fspath(directory)

    def _path(self, key):
        if not key or "/" in key or key.startswith("."):
            raise ValueError(f"bad key: {key!r}")
        return os.path.join(self.directory, key + ".json")

    def put(self, key, value):
        text = json.dumps(value, sort_keys=True)
        path = self._path(key)
        with open(path + ".new", "w") as file:
            file.write(text)
        os.replace(path + ".new", path)

    def get(self, key, default=None):
        try:
            with open(self._path(key)) as file:
                return json.load(file)
        except FileNotFoundError:
            return default

    def keys(self):
        return sorted(n[:-5] for n in os.listdir(self.directory) if n.endswith(".json"))
''',
        """
import json

import pytest
from solution import Store


@pytest.fixture
def store(tmp_path):
    (tmp_path / "notes.txt").write_text("not mine")
    return Store(tmp_path)


def test_round_trip(store, tmp_path):
    store.put("a", {"y": [1, None], "x": 2.5})
    assert store.get("a") == {"x": 2.5, "y": [1, None]}
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 2.5, "y": [1, None]}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "notes.txt"]


def test_missing(store):
    assert store.get("b") is None
    assert store.get("b", default=[]) == []


def test_keys(store):
    for key in "cab":
        store.put(key, key)
    assert store.keys() == ["a", "b", "c"]


@pytest.mark.parametrize("key", ["", "a/b", ".x"])
def test_bad(store, key):
    with pytest.raises(ValueError):
        store.put(key, 1)


def test_a_failure_keeps_what_was(store):
    store.put("k", 1)
    with pytest.raises(TypeError):
        store.put("k", object())
    assert store.get("k") == 1
""",
        ("if not key or ", "if "),
        (' if n.endswith(".json"))', ")"),
    ),
]
