"""Decorators, callbacks, and what a call does to its arguments."""

from __future__ import annotations

from loadtests.conformance.row import unit

ROWS = [
    unit(
        "memo_decorator",
        """
import functools


def memo(function):
    known = {}

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        key = args, tuple(sorted(kwargs.items()))
        if key not in known:
            known[key] = function(*args, **kwargs)
        return known[key]

    wrapper.forget = known.clear
    return wrapper
""",
        '''
import pytest
from solution import memo


@pytest.fixture
def counted():
    calls = []

    @memo
    def power(base, exponent=2):
        """Raises."""
        calls.append((base, exponent))
        return base**exponent

    return power, calls


def test_once(counted):
    power, calls = counted
    assert power(3) == power(3) == 9
    assert calls == [(3, 2)]


def test_keywords(counted):
    power, calls = counted
    assert power(2, exponent=3) == 8
    assert power(2, exponent=4) == 16
    assert len(calls) == 2


def test_forget(counted):
    power, calls = counted
    power(1)
    power.forget()
    power(1)
    assert len(calls) == 2


def test_name(counted):
    power, _ = counted
    assert power.__name__ == "power"
    assert power.__doc__ == "Raises."


def test_errors_are_not_kept():
    answers = [ZeroDivisionError, None]

    @memo
    def flaky():
        answer = answers.pop(0)
        if answer:
            raise answer
        return "fine"

    with pytest.raises(ZeroDivisionError):
        flaky()
    assert flaky() == "fine"
''',
        ("key = args, tuple(sorted(kwargs.items()))", "key = args"),
        ("    @functools.wraps(function)\n", ""),
    ),
    unit(
        "retry_decorator",
        """
import functools


def retry(times, on=Exception, wait=lambda attempt: None):
    def decorate(function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            for attempt in range(1, times + 1):
                try:
                    return function(*args, **kwargs)
                except on:
                    if attempt == times:
                        raise
                    wait(attempt)

        return run

    return decorate
""",
        """
import pytest
from solution import retry


def failing(times, error=OSError):
    left = [times]

    def action(value):
        if left[0]:
            left[0] -= 1
            raise error(f"{left[0]} left")
        return value

    return action


def test_succeeds_at_last():
    waits = []
    assert retry(3, wait=waits.append)(failing(2))("x") == "x"
    assert waits == [1, 2]


def test_gives_up():
    waits = []
    with pytest.raises(OSError, match="1 left"):
        retry(2, wait=waits.append)(failing(3))("x")
    assert waits == [1]


def test_only_named_kinds():
    with pytest.raises(KeyError):
        retry(5, on=(OSError, ValueError))(failing(1, KeyError))(1)
""",
        ("                    wait(attempt)", "                    wait(times - attempt)"),
        ("except on:", "except Exception:"),
    ),
    unit(
        "observer_callbacks",
        """
class Cell:
    def __init__(self, value=None):
        self._value = value
        self._watchers = []

    @property
    def value(self):
        return self._value

    @value.setter
    def value(self, new):
        old, self._value = self._value, new
        if old != new:
            for watcher in self._watchers:
                watcher(old, new)

    def watch(self, watcher):
        self._watchers.append(watcher)
        return watcher


def linked(source, function):
    out = Cell(function(source.value))
    source.watch(lambda old, new: setattr(out, "value", function(new)))
    return out
""",
        """
from solution import Cell, linked


def test_watch():
    seen = []
    cell = Cell(1)
    cell.watch(lambda old, new: seen.append((old, new)))
    cell.value = 2
    cell.value = 2
    cell.value = None
    assert seen == [(1, 2), (2, None)]


def test_linked():
    a = Cell(3)
    b = linked(a, lambda v: v * 10)
    c = linked(b, str)
    assert (b.value, c.value) == (30, "30")
    a.value = 5
    assert (b.value, c.value) == (50, "50")


def test_decorator():
    cell, calls = Cell(), []

    @cell.watch
    def changed(old, new):
        calls.append(new)

    cell.value = 0
    assert calls == [0]
    changed(None, 9)
    assert calls == [0, 9]
""",
        ("        if old != new:\n", "        if True:\n"),
        ("        return watcher\n", ""),
    ),
    unit(
        "sort_in_place",
        """
def insertion_sort(items, key=None, reverse=False):
    key = key or (lambda item: item)
    for i in range(1, len(items)):
        item, j = items[i], i
        while j and (
            key(items[j - 1]) < key(item) if reverse else key(item) < key(items[j - 1])
        ):
            items[j] = items[j - 1]
            j -= 1
        items[j] = item
""",
        """
import pytest
from solution import insertion_sort


@pytest.mark.parametrize("items", [[], [1], [3, 1, 2], [2, 2, 1], ["b", "a"], [0.5, -1, 3]])
def test_sorts(items):
    wanted = sorted(items)
    assert insertion_sort(items) is None
    assert items == wanted


def test_key_is_stable():
    words = ["bb", "aa", "c", "dd"]
    insertion_sort(words, key=len)
    assert words == ["c", "bb", "aa", "dd"]


def test_reverse():
    pairs = [(1, "a"), (2, "b"), (1, "c")]
    insertion_sort(pairs, key=lambda p: p[0], reverse=True)
    assert pairs == [(2, "b"), (1, "a"), (1, "c")]


def test_uncomparable():
    with pytest.raises(TypeError):
        insertion_sort([1, "a"])
""",
        ("key(item) < key(items[j - 1])", "key(item) <= key(items[j - 1])"),
        ("        items[j] = item\n", "        items[j] = item\n    return items\n"),
    ),
    unit(
        "nested_mutation",
        '''
def apply_patch(document, changes):
    """Sets values at paths, in place; None removes."""
    for path, value in changes.items():
        *parents, last = path.split("/")
        place = document
        for part in parents:
            place = place.setdefault(part, {})
        if value is None:
            place.pop(last, None)
        else:
            place[last] = value
    return document
''',
        """
from solution import apply_patch


def test_in_place():
    document = {"a": {"b": 1}}
    inner = document["a"]
    apply_patch(document, {"a/b": 2, "a/c": 3})
    assert document == {"a": {"b": 2, "c": 3}}
    assert inner == {"b": 2, "c": 3}


def test_makes_parents():
    assert apply_patch({}, {"x/y/z": 0}) == {"x": {"y": {"z": 0}}}


def test_removes():
    document = {"a": 1, "b": 2}
    apply_patch(document, {"a": None, "zz": None})
    assert document == {"b": 2}


def test_changes_stay():
    changes = {"a": {"n": 1}}
    apply_patch({}, changes)
    assert changes == {"a": {"n": 1}}
""",
        ("        place = document\n", "        place = document = dict(document)\n"),
        ("if value is None", "if not value"),
    ),
]
