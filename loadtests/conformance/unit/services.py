"""Modules of small projects: a scheduler, tables, files, pages."""

from __future__ import annotations

from loadtests.conformance.row import unit

ROWS = [
    unit(
        "event_scheduler",
        """
import heapq
import itertools


class Scheduler:
    def __init__(self):
        self.now = 0
        self._queue, self._order, self._dead = [], itertools.count(), set()

    def at(self, time, action):
        if time < self.now:
            raise ValueError("in the past")
        number = next(self._order)
        heapq.heappush(self._queue, (time, number, action))
        return number

    def after(self, delay, action):
        return self.at(self.now + delay, action)

    def cancel(self, number):
        self._dead.add(number)

    def run(self, until=float("inf")):
        count = 0
        while self._queue and self._queue[0][0] <= until:
            time, number, action = heapq.heappop(self._queue)
            if number in self._dead:
                continue
            self.now = time
            action()
            count += 1
        return count
""",
        """
import pytest
from solution import Scheduler


@pytest.fixture
def log():
    return []


def test_in_time_order(log):
    s = Scheduler()
    s.at(5, lambda: log.append("late"))
    s.at(1, lambda: log.append("early"))
    s.at(1, lambda: log.append("second"))
    assert s.run() == 3
    assert log == ["early", "second", "late"]
    assert s.now == 5


def test_actions_may_schedule(log):
    s = Scheduler()

    def tick():
        log.append(s.now)
        if s.now < 6:
            s.after(2, tick)

    s.after(2, tick)
    s.run()
    assert log == [2, 4, 6]


def test_until(log):
    s = Scheduler()
    for t in (1, 2, 3):
        s.at(t, lambda t=t: log.append(t))
    assert s.run(until=2) == 2
    assert s.run() == 1
    with pytest.raises(ValueError, match="past"):
        s.at(1, print)


def test_cancel(log):
    s = Scheduler()
    number = s.at(1, lambda: log.append("x"))
    s.cancel(number)
    assert s.run() == 0
    assert log == []
""",
        ("self._queue[0][0] <= until", "self._queue[0][0] < until"),
        ("return self.at(self.now + delay, action)", "return self.at(delay, action)"),
    ),
    unit(
        "diff_tables",
        '''
def diff(old, new):
    """{"added": ..., "removed": ..., "changed": {key: (old, new)}}, without empty parts."""
    parts = {
        "added": {k: new[k] for k in new.keys() - old.keys()},
        "removed": {k: old[k] for k in old.keys() - new.keys()},
        "changed": {k: (old[k], new[k]) for k in old.keys() & new.keys() if old[k] != new[k]},
    }
    return {name: part for name, part in parts.items() if part}
''',
        """
from solution import diff


class TestDiff:
    old = {"a": 1, "b": None, "c": [1]}

    def test_same(self):
        assert diff(self.old, dict(self.old)) == {}

    def test_added(self):
        assert diff({}, {"x": None}) == {"added": {"x": None}}

    def test_all(self):
        found = diff(self.old, {"a": 2, "c": [1], "d": 0})
        assert found == {"added": {"d": 0}, "removed": {"b": None}, "changed": {"a": (1, 2)}}
        assert isinstance(found["changed"]["a"], tuple)

    def test_none_is_a_value(self):
        assert diff({"k": None}, {"k": 0}) == {"changed": {"k": (None, 0)}}
""",
        ("(old[k], new[k]) for", "[old[k], new[k]] for"),
        ("if old[k] != new[k]}", "if (old[k] or 0) != (new[k] or 0)}"),
    ),
    unit(
        "ini_writer",
        '''
import io


def write(sections, stream):
    """Sections with their options; returns the number of lines."""
    lines = []
    for name, options in sections.items():
        if lines:
            lines.append("")
        lines.append(f"[{name}]")
        for key, value in options.items():
            if isinstance(value, bool):
                value = "yes" if value else "no"
            elif isinstance(value, (list, tuple)):
                value = ", ".join(map(str, value))
            lines.append(f"{key} = {value}")
    stream.write("\\n".join(lines) + ("\\n" if lines else ""))
    return len(lines)


def dumps(sections):
    out = io.StringIO()
    write(sections, out)
    return out.getvalue()
''',
        """
import io

from solution import dumps, write


def test_text():
    text = dumps({"a": {"on": True, "n": 1}, "b": {"items": ["x", 2], "none": None}})
    assert text == "[a]\\non = yes\\nn = 1\\n\\n[b]\\nitems = x, 2\\nnone = None\\n"


def test_stream(tmp_path):
    path = tmp_path / "out.ini"
    with path.open("w") as file:
        assert write({"s": {"k": False}}, file) == 2
    assert path.read_text() == "[s]\\nk = no\\n"


def test_empty():
    out = io.StringIO()
    assert write({}, out) == 0
    assert out.getvalue() == ""
    assert dumps({"only": {}}) == "[only]\\n"
""",
        ("        if lines:\n", "        if len(lines) > 3:\n"),
        ("if isinstance(value, bool):", "if value is True:"),
    ),
    unit(
        "paginate_items",
        """
class Page(list):
    def __init__(self, items, number, pages):
        super().__init__(items)
        self.number, self.pages = number, pages

    @property
    def has_next(self):
        return self.number < self.pages


def paginate(items, number, size=10):
    if size < 1:
        raise ValueError("size")
    pages = max(1, -(-len(items) // size))
    if not 1 <= number <= pages:
        raise IndexError(f"page {number} of {pages}")
    return Page(items[(number - 1) * size : number * size], number, pages)
""",
        """
import pytest
from solution import Page, paginate


@pytest.mark.parametrize("count,pages", [(0, 1), (1, 1), (10, 1), (11, 2)])
def test_pages(count, pages):
    assert paginate(list(range(count)), 1).pages == pages


def test_last():
    page = paginate(list("abcde"), 3, size=2)
    assert page == ["e"]
    assert not page.has_next
    assert isinstance(page, list) and isinstance(page, Page)


def test_has_next():
    assert paginate([1, 2, 3], 1, 2).has_next
    assert len(paginate([1, 2, 3], 1, 2)) == 2


def test_beyond():
    with pytest.raises(IndexError, match="page 2 of 1"):
        paginate([], 2)
    with pytest.raises(ValueError):
        paginate([1], 1, 0)
""",
        ("self.number < self.pages", "self.number <= self.pages"),
        ("max(1, -(-len(items) // size))", "max(1, len(items) // size + 1)"),
    ),
]
