"""Exceptions: hierarchies, values, causes, groups of kinds, what is cleaned up on the way."""

from __future__ import annotations

from loadtests.conformance.row import unit

ROWS = [
    unit(
        "error_hierarchy",
        """
class AppError(Exception):
    code = 500

    def __init__(self, message, **details):
        super().__init__(message)
        self.details = details


class NotFound(AppError):
    code = 404


class Forbidden(AppError):
    code = 403


def fetch(table, key, user=None):
    if key not in table:
        raise NotFound(f"no {key}", key=key)
    owner, value = table[key]
    if owner not in (None, user):
        raise Forbidden("not yours", owner=owner, user=user)
    return value
""",
        """
import pytest
from solution import AppError, Forbidden, NotFound, fetch

TABLE = {"a": (None, 1), "b": ("ann", 2)}


def test_found():
    assert fetch(TABLE, "a") == 1
    assert fetch(TABLE, "b", user="ann") == 2


def test_not_found():
    with pytest.raises(NotFound) as info:
        fetch(TABLE, "z")
    assert info.value.code == 404
    assert info.value.details == {"key": "z"}
    assert isinstance(info.value, AppError)
    assert info.type is NotFound


def test_forbidden():
    with pytest.raises(AppError, match="not yours") as info:
        fetch(TABLE, "b", "bo")
    assert info.value.code == 403
    assert info.value.details["owner"] == "ann"


def test_kinds():
    assert issubclass(Forbidden, AppError)
    assert not issubclass(Forbidden, NotFound)
""",
        ("class Forbidden(AppError)", "class Forbidden(NotFound)"),
        ("key=key)", "name=key)"),
    ),
    unit(
        "chained_causes",
        """
class ConfigError(Exception):
    pass


def parse(text):
    out = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            key, value = line.split(":")
            out[key.strip()] = int(value)
        except ValueError as error:
            raise ConfigError(f"line {number}") from error
    return out
""",
        """
import pytest
from solution import ConfigError, parse


def test_good():
    assert parse("a: 1\\n\\nb:2") == {"a": 1, "b": 2}
    assert parse("") == {}


@pytest.mark.parametrize("text,line", [("a", 1), ("a:1\\nb:x", 2), ("\\n\\na:1:2", 3)])
def test_bad(text, line):
    with pytest.raises(ConfigError, match=f"line {line}$") as info:
        parse(text)
    assert isinstance(info.value.__cause__, ValueError)
""",
        ("from error", "from None"),
        ("enumerate(text.splitlines(), 1)", "enumerate(text.split(), 1)"),
    ),
    unit(
        "either_of_kinds",
        """
def lookup(data, path):
    for part in path.split("."):
        if isinstance(data, list):
            data = data[int(part)]
        elif isinstance(data, dict):
            data = data[part]
        else:
            raise TypeError(f"{part}: nothing inside")
    return data
""",
        """
import pytest
from solution import lookup

DATA = {"a": [{"b": 1}, 2], "": 0}


def test_found():
    assert lookup(DATA, "a.0.b") == 1
    assert lookup(DATA, "a.-1") == 2
    assert lookup(DATA, "") == 0


@pytest.mark.parametrize(
    "path,kind", [("x", KeyError), ("a.5", IndexError), ("a.b", ValueError), ("a.1.c", TypeError)]
)
def test_kinds(path, kind):
    with pytest.raises(kind):
        lookup(DATA, path)


def test_lookup_errors():
    for path in ("x", "a.5"):
        with pytest.raises(LookupError):
            lookup(DATA, path)
    with pytest.raises((ValueError, TypeError)):
        lookup(DATA, "a.b")
""",
        ("data = data[part]", "data = data.get(part)"),
        ("raise TypeError(", "raise KeyError("),
    ),
    unit(
        "attributes_of_errors",
        """
class ValidationError(ValueError):
    def __init__(self, errors):
        self.errors = list(errors)
        super().__init__("; ".join(f"{field}: {why}" for field, why in self.errors))

    def __len__(self):
        return len(self.errors)


def validate(form):
    errors = []
    if not form.get("name", "").strip():
        errors.append(("name", "is empty"))
    age = form.get("age")
    if not isinstance(age, int) or isinstance(age, bool):
        errors.append(("age", "is no whole number"))
    elif age < 0:
        errors.append(("age", "is negative"))
    if errors:
        raise ValidationError(errors)
    return {"name": form["name"].strip(), "age": age}
""",
        """
import pytest
from solution import ValidationError, validate


def test_good():
    assert validate({"name": " Al ", "age": 0}) == {"name": "Al", "age": 0}


def test_all_errors_at_once():
    with pytest.raises(ValidationError) as info:
        validate({})
    assert info.value.errors == [("name", "is empty"), ("age", "is no whole number")]
    assert str(info.value) == "name: is empty; age: is no whole number"
    assert len(info.value) == 2


@pytest.mark.parametrize("age", ["3", 2.0, None, True])
def test_age(age):
    with pytest.raises(ValueError, match="whole"):
        validate({"name": "x", "age": age})


def test_negative():
    with pytest.raises(ValidationError, match=r"^age: is negative$"):
        validate({"name": "x", "age": -1})
""",
        (" or isinstance(age, bool)", ""),
        ('"; ".join', '", ".join'),
    ),
    unit(
        "raises_callable_form",
        """
def divide_all(values, by):
    if by == 0:
        raise ZeroDivisionError("by is 0")
    return [v / by if v % by else v // by for v in values]
""",
        """
import pytest
from solution import divide_all


def test_error():
    info = pytest.raises(ZeroDivisionError, divide_all, [1], 0)
    assert "by is 0" in str(info.value)
    pytest.raises(ArithmeticError, divide_all, [], by=0)


def test_kinds():
    found = divide_all([4, 3], 2)
    assert found == [2, 1.5]
    assert [type(v) for v in found] == [int, float]


def test_negative():
    assert divide_all([-4, 5], -2) == [2, -2.5]
    assert divide_all((), 3) == []
""",
        ("    if by == 0:\n", "    if by == 0 and values:\n"),
        ("v / by if v % by else v // by for", "v / by for"),
    ),
    unit(
        "nothing_is_raised",
        """
class Lock:
    def __init__(self):
        self.owner = None
        self.depth = 0

    def acquire(self, who):
        if self.owner not in (None, who):
            raise RuntimeError(f"held by {self.owner}")
        self.owner = who
        self.depth += 1

    def release(self, who):
        if self.owner != who or not self.depth:
            raise RuntimeError(f"not held by {who}")
        self.depth -= 1
        if not self.depth:
            self.owner = None
""",
        """
import pytest
from solution import Lock


def test_reentrant():
    lock = Lock()
    lock.acquire("a")
    lock.acquire("a")
    lock.release("a")
    assert lock.owner == "a"
    lock.release("a")
    assert lock.owner is None


def test_other():
    lock = Lock()
    lock.acquire("a")
    try:
        lock.acquire("b")
    except RuntimeError as error:
        assert str(error) == "held by a"
    else:
        pytest.fail("b got it too")


def test_too_often():
    lock = Lock()
    with pytest.raises(RuntimeError, match="not held by None"):
        lock.release(None)
    lock.acquire("x")
    lock.release("x")
    with pytest.raises(RuntimeError):
        lock.release("x")
""",
        (" or not self.depth", ""),
        ("        if not self.depth:\n            self.owner = None", "        self.owner = None"),
    ),
    unit(
        "error_in_the_middle",
        """
def transfer(accounts, source, target, amount):
    if amount <= 0:
        raise ValueError("amount")
    if target not in accounts:
        raise KeyError(target)
    if accounts[source] < amount:
        raise ValueError("funds")
    accounts[source] -= amount
    accounts[target] += amount
    return accounts
""",
        """
import pytest
from solution import transfer


@pytest.fixture
def accounts():
    return {"a": 10, "b": 0}


def test_moves(accounts):
    transfer(accounts, "a", "b", 10)
    assert accounts == {"a": 0, "b": 10}


@pytest.mark.parametrize("args", [("a", "c", 1), ("c", "a", 1)])
def test_unknown(accounts, args):
    with pytest.raises(KeyError) as info:
        transfer(accounts, *args)
    assert info.value.args == ("c",)
    assert accounts == {"a": 10, "b": 0}


def test_funds(accounts):
    with pytest.raises(ValueError, match="funds"):
        transfer(accounts, "a", "b", 11)
    assert accounts == {"a": 10, "b": 0}


def test_to_itself(accounts):
    transfer(accounts, "a", "a", 5)
    assert accounts["a"] == 10
""",
        ("    if target not in accounts:\n        raise KeyError(target)\n", ""),
        ("< amount:", "<= amount:"),
    ),
    unit(
        "stop_iteration_leak",
        """
def first_match(items, predicate):
    for item in items:
        if predicate(item):
            return item
    raise LookupError("no match")


def heads(groups):
    return [first_match(group, lambda item: True) for group in groups]
""",
        """
import pytest
from solution import first_match, heads


def test_heads():
    assert heads(["ab", "c"]) == ["a", "c"]
    assert heads([]) == []


def test_all_of_them_are_long():
    assert all(map(lambda g: first_match(g, str.isalpha) != "1", ["1a", "b"]))


def test_none():
    with pytest.raises(LookupError):
        first_match([], bool)
    with pytest.raises(LookupError):
        heads(["a", ""])


def test_errors_of_the_predicate():
    with pytest.raises(ZeroDivisionError):
        first_match([0], lambda x: 1 / x)
""",
        ('raise LookupError("no match")', "raise StopIteration"),
        (
            "        if predicate(item):\n            return item\n",
            "        if item and predicate(item):\n            return item\n",
        ),
    ),
]
