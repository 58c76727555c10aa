"""Fixtures: teardown, factories, parameters, autouse, scopes."""

from __future__ import annotations

from loadtests.conformance.row import unit

ROWS = [
    unit(
        "inventory_yield_fixture",
        """
class Inventory:
    def __init__(self):
        self.stock = {}
        self.closed = False

    def add(self, sku, count=1):
        if self.closed:
            raise RuntimeError("closed")
        if count < 1:
            raise ValueError("count")
        self.stock[sku] = self.stock.get(sku, 0) + count

    def take(self, sku, count=1):
        have = self.stock.get(sku, 0)
        if count > have:
            raise KeyError(sku)
        if count == have:
            del self.stock[sku]
        else:
            self.stock[sku] = have - count

    def close(self):
        self.closed = True
""",
        """
import pytest
from solution import Inventory


@pytest.fixture
def inventory():
    made = Inventory()
    made.add("nut", 3)
    yield made
    made.close()
    assert made.closed


def test_add(inventory):
    inventory.add("nut")
    assert inventory.stock == {"nut": 4}


def test_take_all(inventory):
    inventory.take("nut", 3)
    assert "nut" not in inventory.stock


def test_take_some(inventory):
    inventory.take("nut")
    assert inventory.stock["nut"] == 2


def test_too_many(inventory):
    with pytest.raises(KeyError):
        inventory.take("nut", 4)
    assert inventory.stock == {"nut": 3}


def test_closed(inventory):
    inventory.close()
    with pytest.raises(RuntimeError, match="^closed$"):
        inventory.add("bolt")
""",
        ("            del self.stock[sku]\n", "            self.stock[sku] = 0\n"),
        ("self.closed = True", "self.closed = not self.closed"),
    ),
    unit(
        "factory_fixture",
        """
class User:
    def __init__(self, name, roles=()):
        self.name = name
        self.roles = frozenset(roles)

    def can(self, role):
        return role in self.roles or "admin" in self.roles

    def __eq__(self, other):
        return isinstance(other, User) and (self.name, self.roles) == (other.name, other.roles)

    def __hash__(self):
        return hash((self.name, self.roles))
""",
        """
import pytest
from solution import User


@pytest.fixture
def make_user():
    def make(name="ann", *roles):
        return User(name, roles)

    return make


@pytest.fixture
def admin(make_user):
    return make_user("root", "admin")


def test_admin_can_all(admin):
    assert admin.can("anything")


def test_plain(make_user):
    user = make_user("bo", "read")
    assert user.can("read")
    assert not user.can("write")


def test_equal(make_user):
    assert make_user("a", "x", "y") == make_user("a", "y", "x")
    assert make_user("a") != make_user("b")
    assert make_user("a") != "a"


def test_hash(make_user):
    assert len({make_user("a"), make_user("a"), make_user("b")}) == 2
""",
        ("self.roles = frozenset(roles)", "self.roles = tuple(roles)"),
        ('or "admin" in self.roles', 'or self.name == "admin"'),
    ),
    unit(
        "fixture_params",
        """
def normalise(path):
    parts = []
    for part in path.replace("\\\\", "/").split("/"):
        if part in ("", "."):
            continue
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        elif part == ".." and path.startswith("/"):
            continue
        else:
            parts.append(part)
    return ("/" if path.startswith("/") else "") + "/".join(parts) or "."
""",
        """
import pytest
from solution import normalise


@pytest.fixture(params=["a/b", "a//b", "./a/b/", "a/c/../b", "a\\\\b"])
def spelling(request):
    return request.param


def test_same(spelling):
    assert normalise(spelling) == "a/b"


EDGES = [("/..", "/"), ("", "."), ("../x", "../x"), ("../..", "../..")]


@pytest.fixture(params=EDGES, ids=lambda p: p[0] or "empty")
def pair(request):
    return request.param


def test_edges(pair):
    given, wanted = pair
    assert normalise(given) == wanted
""",
        (' and parts and parts[-1] != ".."', " and parts"),
        (' or "."', ""),
    ),
    unit(
        "autouse_registry",
        """
_plugins = {}


def register(name):
    def wrap(function):
        if name in _plugins:
            raise KeyError(f"{name} is taken")
        _plugins[name] = function
        return function

    return wrap


def run(name, *args, **kwargs):
    try:
        plugin = _plugins[name]
    except KeyError:
        raise LookupError(f"no plugin {name}") from None
    return plugin(*args, **kwargs)


def clear():
    _plugins.clear()
""",
        """
import pytest
from solution import clear, register, run


@pytest.fixture(autouse=True)
def fresh():
    clear()
    yield
    clear()


def test_runs():
    @register("double")
    def double(x):
        return 2 * x

    assert run("double", 4) == 8
    assert double(1) == 2


def test_keywords():
    register("join")(lambda *a, sep="-": sep.join(a))
    assert run("join", "a", "b", sep="+") == "a+b"


def test_taken():
    register("x")(len)
    with pytest.raises(KeyError) as caught:
        register("x")(len)
    assert "taken" in str(caught.value)


def test_none():
    with pytest.raises(LookupError, match="no plugin y"):
        run("y")
""",
        ("        return function\n\n    return wrap", "\n    return wrap"),
        ("raise LookupError(f", "raise NameError(f"),
    ),
    unit(
        "module_fixture",
        """
class Graph:
    def __init__(self, edges):
        self.near = {}
        for a, b in edges:
            self.near.setdefault(a, set()).add(b)
            self.near.setdefault(b, set()).add(a)

    def path(self, start, goal):
        seen, queue = {start}, [[start]]
        while queue:
            path = queue.pop(0)
            if path[-1] == goal:
                return path
            for node in sorted(self.near.get(path[-1], ())):
                if node not in seen:
                    seen.add(node)
                    queue.append([*path, node])
        return None
""",
        """
import pytest
from solution import Graph


@pytest.fixture(scope="module")
def graph():
    return Graph([(1, 2), (2, 3), (3, 4), (1, 5), (5, 4)])


def test_shortest(graph):
    assert graph.path(1, 4) == [1, 5, 4]


def test_to_itself(graph):
    assert graph.path(2, 2) == [2]


def test_both_ways(graph):
    assert graph.path(4, 2) == [4, 3, 2]


def test_unknown(graph):
    assert graph.path(1, 9) is None
    assert graph.path(9, 9) == [9]
""",
        ("queue.pop(0)", "queue.pop()"),
        ("            self.near.setdefault(b, set()).add(a)\n", ""),
    ),
]
