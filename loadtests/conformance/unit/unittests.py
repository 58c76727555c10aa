"""Classes of unittest: setUp, tearDown, subTest, its assertions, class-wide setup."""

from __future__ import annotations

from loadtests.conformance.row import unit

ROWS = [
    unit(
        "unittest_queue",
        """
import heapq
import itertools


class PriorityQueue:
    def __init__(self):
        self._heap, self._count = [], itertools.count()

    def push(self, item, priority=0):
        heapq.heappush(self._heap, (-priority, next(self._count), item))

    def pop(self):
        if not self._heap:
            raise IndexError("pop from an empty queue")
        return heapq.heappop(self._heap)[2]

    def __len__(self):
        return len(self._heap)

    def __bool__(self):
        return bool(self._heap)
""",
        """
import unittest

from solution import PriorityQueue


class PriorityQueueTest(unittest.TestCase):
    def setUp(self):
        self.queue = PriorityQueue()
        self.queue.push("low", 1)
        self.queue.push("high", 9)

    def tearDown(self):
        self.queue = None

    def test_highest_first(self):
        self.assertEqual(self.queue.pop(), "high")
        self.assertEqual(len(self.queue), 1)

    def test_ties_in_order(self):
        self.queue.push({"b": 1}, 9)
        self.queue.push({"a": 1}, 9)
        found = [self.queue.pop() for _ in range(3)]
        self.assertListEqual(found, ["high", {"b": 1}, {"a": 1}])

    def test_empty(self):
        self.queue.pop()
        self.queue.pop()
        self.assertFalse(self.queue)
        with self.assertRaisesRegex(IndexError, "empty"):
            self.queue.pop()
""",
        ("(-priority, next(self._count), item)", "(-priority, -next(self._count), item)"),
        ('raise IndexError("pop from an empty queue")', 'raise IndexError("nothing left")'),
    ),
    unit(
        "unittest_subtests",
        """
def ordinal(n):
    if n % 100 in (11, 12, 13):
        return f"{n}th"
    return f"{n}" + {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
""",
        """
import unittest

from solution import ordinal


class TestOrdinal(unittest.TestCase):
    def test_small(self):
        for n, text in [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (10, "10th")]:
            with self.subTest(n=n):
                self.assertEqual(ordinal(n), text)

    def test_teens(self):
        for n in (11, 12, 13, 111, 212):
            with self.subTest(n=n):
                self.assertTrue(ordinal(n).endswith("th"))

    def test_twenties(self):
        self.assertEqual(ordinal(21), "21st")
        self.assertEqual(ordinal(0), "0th")
""",
        ("n % 100 in", "n in"),
        ("(11, 12, 13)", "(11, 12)"),
    ),
    unit(
        "unittest_assertions",
        """
def summary(values):
    values = list(values)
    if not values:
        return None
    return {
        "min": min(values),
        "max": max(values),
        "mean": sum(values) / len(values),
        "sorted": tuple(sorted(values)),
        "unique": set(values),
    }
""",
        """
import unittest

from solution import summary


class TestSummary(unittest.TestCase):
    maxDiff = None

    def test_all(self):
        found = summary([3, 1, 2, 2])
        self.assertDictEqual(
            found, {"min": 1, "max": 3, "mean": 2.0, "sorted": (1, 2, 2, 3), "unique": {1, 2, 3}}
        )
        self.assertAlmostEqual(found["mean"], 2.0, places=7)
        self.assertIsInstance(found["sorted"], tuple)
        self.assertSetEqual(found["unique"], {1, 2, 3})
        self.assertIn("min", found)

    def test_empty(self):
        self.assertIsNone(summary([]))

    def test_iterator(self):
        self.assertEqual(summary(iter([5]))["max"], 5)
        self.assertGreater(summary(range(3))["max"], 1)
        self.assertCountEqual(summary("ba")["sorted"] if False else ["a", "b"], ["b", "a"])

    def test_floats(self):
        self.assertAlmostEqual(summary([0.1, 0.2])["mean"], 0.15)
        self.assertNotEqual(summary([1])["mean"], 2)
""",
        ("    values = list(values)\n", ""),
        ("sum(values) / len(values)", "sum(values) // len(values)"),
    ),
    unit(
        "unittest_class_setup",
        """
class Vocabulary:
    def __init__(self, words, unknown="?"):
        self._unknown = unknown
        self._ids = {unknown: 0}
        for word in words:
            self._ids.setdefault(word, len(self._ids))
        self._words = list(self._ids)

    def encode(self, text):
        return [self._ids.get(word, 0) for word in text.split()]

    def decode(self, ids):
        return " ".join(self._words[i] for i in ids)

    def __len__(self):
        return len(self._words)

    def __contains__(self, word):
        return word in self._ids
""",
        """
import unittest

from solution import Vocabulary


class TestVocabulary(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.vocabulary = Vocabulary(["a", "b", "a", "c"])

    def test_size(self):
        self.assertEqual(len(self.vocabulary), 4)

    def test_encode(self):
        self.assertEqual(self.vocabulary.encode("c a zzz"), [3, 1, 0])
        self.assertEqual(self.vocabulary.encode(""), [])

    def test_round_trip(self):
        self.assertEqual(self.vocabulary.decode(self.vocabulary.encode("a x b")), "a ? b")

    def test_contains(self):
        self.assertIn("b", self.vocabulary)
        self.assertNotIn("z", self.vocabulary)

    def test_bad_id(self):
        with self.assertRaises(IndexError):
            self.vocabulary.decode([4])
""",
        ("self._ids.setdefault(word, len(self._ids))", "self._ids[word] = len(self._ids)"),
        (".get(word, 0)", ".get(word, -1)"),
    ),
    unit(
        "unittest_mixin",
        """
class Celsius:
    def __init__(self, degrees):
        if degrees < -273.15:
            raise ValueError("below absolute zero")
        self.degrees = degrees

    @classmethod
    def from_fahrenheit(cls, f):
        return cls((f - 32) * 5 / 9)

    @property
    def fahrenheit(self):
        return self.degrees * 9 / 5 + 32

    def __eq__(self, other):
        if not isinstance(other, Celsius):
            return NotImplemented
        return abs(self.degrees - other.degrees) < 1e-9

    def __repr__(self):
        return f"Celsius({self.degrees!r})"
""",
        """
import unittest

from solution import Celsius


class Checks:
    def check(self, c, f):
        self.assertAlmostEqual(Celsius(c).fahrenheit, f, places=6)
        self.assertEqual(Celsius.from_fahrenheit(f), Celsius(c))


class TestCelsius(Checks, unittest.TestCase):
    def test_points(self):
        self.check(0, 32)
        self.check(100, 212)
        self.check(-40, -40)

    def test_zero(self):
        self.assertRaises(ValueError, Celsius, -273.16)
        self.assertEqual(Celsius(-273.15).degrees, -273.15)

    def test_repr(self):
        self.assertEqual(repr(Celsius(1.5)), "Celsius(1.5)")

    def test_other_kinds(self):
        self.assertNotEqual(Celsius(1), 1)
        self.assertFalse(Celsius(1) == "1")
""",
        ("degrees < -273.15", "degrees <= -273.15"),
        ("{self.degrees!r}", "{self.degrees:.0f}"),
    ),
    unit(
        "unittest_pattern",
        """
import re

PATTERN = re.compile(r"^(?P<user>[^@\\s]+)@(?P<host>[a-z0-9-]+(\\.[a-z0-9-]+)+)$", re.IGNORECASE)


def parse_address(text):
    match = PATTERN.match(text.strip())
    if match is None:
        raise ValueError(f"not an address: {text}")
    return match["user"], match["host"].lower()
""",
        """
from unittest import TestCase

from solution import parse_address


class AddressTests(TestCase):
    def test_parts(self):
        self.assertEqual(parse_address("Ann.B@Example.ORG"), ("Ann.B", "example.org"))
        self.assertTupleEqual(parse_address(" x@a.b.c "), ("x", "a.b.c"))

    def test_bad(self):
        for text in ("", "a", "a@b", "@b.c", "a@b.", "a b@c.d", "a@b@c.d"):
            with self.subTest(text), self.assertRaises(ValueError):
                parse_address(text)

    def test_message(self):
        with self.assertRaises(ValueError) as caught:
            parse_address("nope")
        self.assertEqual(str(caught.exception), "not an address: nope")
""",
        ("[^@", "["),
        ('match["host"].lower()', 'match["host"]'),
    ),
]
