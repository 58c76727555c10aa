"""Iterators, generators and contexts."""

from __future__ import annotations

from loadtests.conformance.row import unit

ROWS = [
    unit(
        "peekable_iterator",
        """
class Peekable:
    _NONE = object()

    def __init__(self, items):
        self._items = iter(items)
        self._next = self._NONE

    def __iter__(self):
        return self

    def __next__(self):
        if self._next is not self._NONE:
            value, self._next = self._next, self._NONE
            return value
        return next(self._items)

    def peek(self, default=None):
        if self._next is self._NONE:
            self._next = next(self._items, self._NONE)
        return default if self._next is self._NONE else self._next
""",
        """
import pytest
from solution import Peekable


def test_peek():
    found = Peekable([1, 2])
    assert found.peek() == 1
    assert found.peek() == 1
    assert next(found) == 1
    assert list(found) == [2]


def test_none_is_a_value():
    found = Peekable([None, 3])
    assert found.peek("end") is None
    assert next(found) is None
    assert next(found) == 3


def test_end():
    found = Peekable("")
    assert found.peek("end") == "end"
    with pytest.raises(StopIteration):
        next(found)


def test_is_its_own_iterator():
    found = Peekable("ab")
    assert iter(found) is found
    assert "".join(found) == "ab"
""",
        ("_NONE = object()", "_NONE = None"),
        (
            "        return self\n\n    def __next__",
            "        return iter(list(self._items))\n\n    def __next__",
        ),
    ),
    unit(
        "generator_send",
        """
def average():
    total, count, mean = 0.0, 0, None
    while True:
        value = yield mean
        if value is None:
            continue
        total += value
        count += 1
        mean = total / count
""",
        """
import pytest
from solution import average


def test_send():
    found = average()
    assert next(found) is None
    assert found.send(10) == 10.0
    assert found.send(21) == 15.5


def test_next_changes_nothing():
    found = average()
    next(found)
    found.send(4)
    assert next(found) == 4.0
    assert found.send(0) == 2.0


def test_close():
    found = average()
    next(found)
    found.close()
    with pytest.raises(StopIteration):
        next(found)
""",
        ("if value is None", "if not value"),
        ("mean = total / count", "mean = total // count"),
    ),
    unit(
        "flatten_from",
        """
def flatten(items, depth=-1):
    for item in items:
        if depth and isinstance(item, (list, tuple)):
            yield from flatten(item, depth - 1)
        else:
            yield item
""",
        """
import types

from solution import flatten

NESTED = [1, [2, (3, [4])], "text"]


def test_all():
    assert list(flatten(NESTED)) == [1, 2, 3, 4, "text"]


def test_depth():
    assert list(flatten(NESTED, 1)) == [1, 2, (3, [4]), "text"]
    assert list(flatten(NESTED, 0)) == NESTED


def test_lazy():
    assert isinstance(flatten([]), types.GeneratorType)
    assert next(flatten(iter([[[7]]]))) == 7


def test_arguments_stay():
    items = [[1], [2]]
    assert sum(flatten(items)) == 3
    assert items == [[1], [2]]
""",
        ("depth - 1", "depth"),
        ("isinstance(item, (list, tuple))", "isinstance(item, list)"),
    ),
    unit(
        "managed_resource",
        """
from contextlib import contextmanager


@contextmanager
def transaction(store):
    before = dict(store)
    try:
        yield store
    except BaseException:
        store.clear()
        store.update(before)
        raise
""",
        """
import pytest
from solution import transaction


def test_commit():
    store = {"a": 1}
    with transaction(store) as inner:
        inner["b"] = 2
    assert store == {"a": 1, "b": 2}


def test_rollback():
    store = {"a": 1}
    with pytest.raises(KeyError):
        with transaction(store):
            store["b"] = 2
            del store["a"]
            store["missing"]
    assert store == {"a": 1}


def test_interrupt():
    store = {}
    with pytest.raises(KeyboardInterrupt), transaction(store):
        store["x"] = 1
        raise KeyboardInterrupt
    assert store == {}
""",
        ("except BaseException", "except Exception"),
        ("        store.clear()\n", ""),
    ),
    unit(
        "context_class",
        """
class Timer:
    def __init__(self, clock):
        self._clock = clock
        self.laps = []

    def __enter__(self):
        self._start = self._clock()
        return self

    def __exit__(self, kind, error, trace):
        self.laps.append(self._clock() - self._start)
        return kind is not None and issubclass(kind, TimeoutError)

    @property
    def total(self):
        return sum(self.laps)
""",
        """
import itertools

import pytest
from solution import Timer


@pytest.fixture
def timer():
    ticks = itertools.count(10, 5)
    return Timer(lambda: next(ticks))


def test_laps(timer):
    with timer as same:
        pass
    assert same is timer
    with timer:
        pass
    assert timer.laps == [5, 5]
    assert timer.total == 10


def test_timeouts_are_swallowed(timer):
    with timer:
        raise TimeoutError("late")
    assert timer.total == 5


def test_others_are_not(timer):
    with pytest.raises(ValueError):
        with timer:
            raise ValueError
    assert timer.laps == [5]
""",
        ("issubclass(kind, TimeoutError)", "issubclass(kind, Exception)"),
        ("        return self\n", "        return self.laps\n"),
    ),
    unit(
        "exit_stack",
        """
class Scope:
    def __init__(self):
        self._callbacks = []

    def defer(self, callback, *args):
        self._callbacks.append((callback, args))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        first = None
        while self._callbacks:
            callback, args = self._callbacks.pop()
            try:
                callback(*args)
            except Exception as failed:
                first = first or failed
        if first is not None and error[0] is None:
            raise first
        return False
""",
        """
import pytest
from solution import Scope


def test_in_reverse():
    done = []
    with Scope() as scope:
        scope.defer(done.append, "a")
        scope.defer(done.append, "b")
        assert done == []
    assert done == ["b", "a"]


def test_all_run():
    done = []
    with pytest.raises(ZeroDivisionError):
        with Scope() as scope:
            scope.defer(done.append, 1)
            scope.defer(lambda: 1 / 0)
            scope.defer(lambda: [][1])
            scope.defer(done.append, 2)
            scope._callbacks[1], scope._callbacks[2] = scope._callbacks[2], scope._callbacks[1]
    assert done == [2, 1]


def test_the_body_wins():
    with pytest.raises(KeyError):
        with Scope() as scope:
            scope.defer(lambda: 1 / 0)
            raise KeyError
""",
        ("self._callbacks.pop()", "self._callbacks.pop(0)"),
        (" and error[0] is None", ""),
    ),
]
