"""Values that are made of others: enums, dataclasses, counters, paths, bytes."""

from __future__ import annotations

from loadtests.conformance.row import unit

ROWS = [
    unit(
        "enum_states",
        """
from enum import Enum, IntEnum


class State(Enum):
    NEW = "new"
    PAID = "paid"
    SENT = "sent"
    DONE = "done"

    def next(self):
        order = list(State)
        place = order.index(self)
        if place + 1 == len(order):
            raise ValueError("already done")
        return order[place + 1]


class Level(IntEnum):
    LOW = 1
    HIGH = 5


def at_least(levels, least):
    return [level for level in levels if level >= least]
""",
        """
import pytest
from solution import Level, State, at_least


def test_next():
    assert State.NEW.next() is State.PAID
    assert State.SENT.next() == State.DONE


def test_last():
    with pytest.raises(ValueError, match="already"):
        State.DONE.next()


def test_by_value():
    assert State("sent") is State.SENT
    assert State["NEW"].value == "new"
    assert [s.name for s in State] == ["NEW", "PAID", "SENT", "DONE"]
    with pytest.raises(ValueError):
        State("lost")


def test_levels():
    assert Level.HIGH > Level.LOW
    assert at_least([Level.LOW, Level.HIGH], Level.HIGH) == [Level.HIGH]
    assert at_least([1, 5, 3], Level.LOW) == [1, 5, 3]
    assert Level.HIGH == 5
""",
        ("place + 1 == len(order)", "place == len(order)"),
        ("level >= least", "level > least"),
    ),
    unit(
        "dataclass_defaults",
        """
from dataclasses import asdict, dataclass, field


@dataclass
class Task:
    title: str
    tags: list = field(default_factory=list)
    done: bool = False
    priority: int = 3

    def __post_init__(self):
        if not 1 <= self.priority <= 5:
            raise ValueError(f"priority {self.priority}")
        self.title = self.title.strip()


def dump(tasks):
    return [asdict(task) for task in sorted(tasks, key=lambda t: t.priority)]
""",
        """
import pytest
from solution import Task, dump


def test_defaults_are_apart():
    a, b = Task("a"), Task("b")
    a.tags.append("x")
    assert b.tags == []
    assert a == Task(" a ", ["x"])


def test_priority():
    for bad in (0, 6):
        with pytest.raises(ValueError, match=f"priority {bad}"):
            Task("x", priority=bad)
    assert Task("x", priority=5).priority == 5


def test_dump():
    tasks = [Task("a"), Task("b", priority=1), Task("c", done=True)]
    assert dump(tasks)[0] == {"title": "b", "tags": [], "done": False, "priority": 1}
    assert [t["title"] for t in dump(tasks)] == ["b", "a", "c"]
    assert tasks[0].title == "a"


def test_repr():
    assert repr(Task("t")) == "Task(title='t', tags=[], done=False, priority=3)"
""",
        ("sorted(tasks, key=lambda t: t.priority)", "sorted(tasks, key=lambda t: -t.priority)"),
        ("list = field(default_factory=list)", "list = ()"),
    ),
    unit(
        "ordered_and_counted",
        """
from collections import ChainMap, Counter, OrderedDict, defaultdict


def word_table(text):
    return Counter(text.lower().split())


def by_length(words):
    out = defaultdict(list)
    for word in words:
        out[len(word)].append(word)
    return OrderedDict(sorted(out.items()))


def layered(*tables):
    return ChainMap(*tables)
""",
        """
from collections import Counter, OrderedDict

from solution import by_length, layered, word_table


def test_counter():
    found = word_table("a b A")
    assert found == Counter({"a": 2, "b": 1})
    assert found["missing"] == 0
    assert found.most_common(1) == [("a", 2)]


def test_order():
    found = by_length(["ccc", "a", "bb", "dd"])
    assert list(found) == [1, 2, 3]
    assert found == OrderedDict([(1, ["a"]), (2, ["bb", "dd"]), (3, ["ccc"])])
    assert list(found.items())[-1] == (3, ["ccc"])


def test_layers():
    found = layered({"a": 1}, {"a": 2, "b": 3})
    assert found["a"] == 1
    assert found["b"] == 3
    assert len(found) == 2
    assert dict(found) == {"a": 1, "b": 3}
""",
        ("Counter(text.lower().split())", "dict(Counter(text.lower().split()))"),
        ("ChainMap(*tables)", "ChainMap(*tables[::-1])"),
    ),
    unit(
        "paths_and_ids",
        """
import hashlib
import uuid
from pathlib import PurePosixPath


def shard(name, levels=2):
    digest = hashlib.sha256(name.encode()).hexdigest()
    parts = [digest[2 * i : 2 * i + 2] for i in range(levels)]
    return PurePosixPath(*parts, digest)


def stable_id(*parts):
    return uuid.uuid5(uuid.NAMESPACE_URL, "/".join(map(str, parts)))
""",
        """
import hashlib
from pathlib import PurePosixPath
from uuid import NAMESPACE_URL, UUID, uuid5

from solution import shard, stable_id

DIGEST = hashlib.sha256(b"x").hexdigest()


def test_shard():
    assert shard("x") == PurePosixPath(DIGEST[:2], DIGEST[2:4], DIGEST)
    assert shard("x", levels=0) == PurePosixPath(DIGEST)
    assert shard("x").name == DIGEST
    assert str(shard("x", 1)) == f"{DIGEST[:2]}/{DIGEST}"


def test_ids():
    assert stable_id("a", 1) == uuid5(NAMESPACE_URL, "a/1")
    assert isinstance(stable_id(), UUID)
    assert stable_id("a") != stable_id("b")
""",
        ("digest[2 * i : 2 * i + 2]", "digest[i : i + 2]"),
        (
            "uuid.uuid5(uuid",
            "uuid.uuid3(uuid",
        ),
    ),
    unit(
        "bytes_and_views",
        """
import struct


def pack(records):
    out = bytearray()
    for kind, payload in records:
        out += struct.pack(">BH", kind, len(payload)) + payload
    return bytes(out)


def unpack(data):
    out, place = [], 0
    while place < len(data):
        kind, size = struct.unpack_from(">BH", data, place)
        place += 3
        payload = bytes(data[place : place + size])
        if len(payload) != size:
            raise EOFError(f"{size - len(payload)} bytes are missing")
        out.append((kind, payload))
        place += size
    return out
""",
        """
import pytest
from solution import pack, unpack

RECORDS = [(1, b"ab"), (255, b""), (0, bytes(300))]


def test_layout():
    assert pack(RECORDS[:2]) == b"\\x01\\x00\\x02ab\\xff\\x00\\x00"
    assert type(pack([])) is bytes


def test_round_trip():
    assert unpack(pack(RECORDS)) == RECORDS
    assert unpack(memoryview(pack(RECORDS))) == RECORDS
    assert unpack(b"") == []


def test_short():
    with pytest.raises(EOFError, match="2 bytes"):
        unpack(b"\\x01\\x00\\x05abc")
""",
        ("return bytes(out)", "return out"),
        ("        if len(payload) != size:\n", "        if len(payload) > size:\n"),
    ),
]
