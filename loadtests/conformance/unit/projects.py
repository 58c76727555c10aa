"""Modules of small projects: a parser, a cache, a bucket, a trie."""

from __future__ import annotations

from loadtests.conformance.row import unit

ROWS = [
    unit(
        "expression_parser",
        """
import re

TOKEN = re.compile(r"\\s*(?:(\\d+\\.?\\d*)|(.))")


def evaluate(text):
    found = TOKEN.findall(text.rstrip())
    tokens = [(float(n) if "." in n else int(n)) if n else op for n, op in found]
    tokens.append(None)
    place = 0

    def take():
        nonlocal place
        place += 1
        return tokens[place - 1]

    def atom():
        token = take()
        if token == "(":
            value = total()
            if take() != ")":
                raise SyntaxError("missing )")
            return value
        if token == "-":
            return -atom()
        if not isinstance(token, (int, float)):
            raise SyntaxError(f"unexpected {token}")
        return token

    def product():
        value = atom()
        while tokens[place] in ("*", "/"):
            value = value * atom() if take() == "*" else value / atom()
        return value

    def total():
        value = product()
        while tokens[place] in ("+", "-"):
            value = value + product() if take() == "+" else value - product()
        return value

    value = total()
    if tokens[place] is not None:
        raise SyntaxError(f"unexpected {tokens[place]}")
    return value
""",
        """
import pytest
from solution import evaluate


@pytest.mark.parametrize(
    "text,value",
    [("1+2*3", 7), ("(1+2)*3", 9), ("8/4/2", 1.0), ("-2--3", 1), ("2.5*2", 5.0), ("7 - 2 - 1", 4)],
)
def test_values(text, value):
    assert evaluate(text) == value


def test_kinds():
    assert isinstance(evaluate("2+2"), int)
    assert isinstance(evaluate("4/2"), float)


@pytest.mark.parametrize("text", ["", "1+", "(1", "1)", "1 2", "a"])
def test_bad(text):
    with pytest.raises(SyntaxError):
        evaluate(text)


def test_division():
    with pytest.raises(ZeroDivisionError):
        evaluate("1/(2-2)")
""",
        ("value / atom()", "value // atom()"),
        (
            '            if take() != ")":\n                raise SyntaxError("missing )")\n',
            "            take()\n",
        ),
    ),
    unit(
        "lru_cache_class",
        """
from collections import OrderedDict


class LRU:
    def __init__(self, size, on_evict=None):
        self.size, self.on_evict = size, on_evict
        self._items = OrderedDict()

    def get(self, key, default=None):
        if key not in self._items:
            return default
        self._items.move_to_end(key)
        return self._items[key]

    def put(self, key, value):
        self._items[key] = value
        self._items.move_to_end(key)
        while len(self._items) > self.size:
            old = self._items.popitem(last=False)
            if self.on_evict:
                self.on_evict(*old)

    def __len__(self):
        return len(self._items)

    def __contains__(self, key):
        return key in self._items
""",
        """
import pytest
from solution import LRU


@pytest.fixture
def evicted():
    return []


@pytest.fixture
def cache(evicted):
    return LRU(2, on_evict=lambda k, v: evicted.append((k, v)))


def test_evicts_the_oldest(cache, evicted):
    cache.put("a", 1)
    cache.put("b", 2)
    cache.put("c", 3)
    assert evicted == [("a", 1)]
    assert "a" not in cache and len(cache) == 2


def test_get_refreshes(cache, evicted):
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert evicted == [("b", 2)]


def test_contains_does_not_refresh(cache, evicted):
    cache.put("a", None)
    cache.put("b", 2)
    assert "a" in cache
    cache.put("c", 3)
    assert evicted == [("a", None)]


def test_put_again(cache, evicted):
    cache.put("a", 1)
    cache.put("b", 2)
    cache.put("a", 9)
    cache.put("c", 3)
    assert evicted == [("b", 2)]
    assert cache.get("a") == 9
    assert cache.get("zz", 0) == 0
""",
        (
            "        self._items[key] = value\n        self._items.move_to_end(key)\n",
            "        self._items[key] = value\n",
        ),
        ("popitem(last=False)", "popitem()"),
    ),
    unit(
        "token_bucket",
        """
class Bucket:
    def __init__(self, rate, burst, clock):
        self.rate, self.burst, self._clock = rate, burst, clock
        self._tokens, self._at = burst, clock()

    def _fill(self):
        now = self._clock()
        self._tokens = min(self.burst, self._tokens + (now - self._at) * self.rate)
        self._at = now

    def take(self, n=1):
        self._fill()
        if n > self._tokens:
            return False
        self._tokens -= n
        return True

    def wait(self, n=1):
        if n > self.burst:
            raise ValueError("never")
        self._fill()
        return max(0, (n - self._tokens) / self.rate)
""",
        """
import pytest
from solution import Bucket


class FakeClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def bucket(clock):
    return Bucket(rate=2, burst=4, clock=clock)


def test_burst(bucket):
    assert [bucket.take() for _ in range(5)] == [True] * 4 + [False]


def test_fills(bucket, clock):
    bucket.take(4)
    clock.now += 1.5
    assert bucket.take(3)
    assert not bucket.take()


def test_never_more_than_the_burst(bucket, clock):
    clock.now += 1000
    assert not bucket.take(5)
    assert bucket.take(4)


def test_wait(bucket):
    assert bucket.wait() == 0
    bucket.take(4)
    assert bucket.wait(3) == pytest.approx(1.5)
    with pytest.raises(ValueError):
        bucket.wait(5)
""",
        (
            "min(self.burst, self._tokens + (now - self._at) * self.rate)",
            "self._tokens + (now - self._at) * self.rate",
        ),
        ("n > self._tokens", "n >= self._tokens"),
    ),
    unit(
        "trie_completion",
        """
class Trie:
    def __init__(self, words=()):
        self._root = {}
        for word in words:
            self.add(word)

    def add(self, word):
        node = self._root
        for c in word:
            node = node.setdefault(c, {})
        node[None] = True

    def __contains__(self, word):
        node = self._find(word)
        return node is not None and None in node

    def _find(self, prefix):
        node = self._root
        for c in prefix:
            node = node.get(c)
            if node is None:
                return None
        return node

    def complete(self, prefix):
        def walk(node, text):
            if None in node:
                yield text
            for c in sorted(c for c in node if c is not None):
                yield from walk(node[c], text + c)

        node = self._find(prefix)
        return [] if node is None else list(walk(node, prefix))
""",
        """
import pytest
from solution import Trie

WORDS = ["car", "cart", "cat", "dog", "日本"]


@pytest.fixture(scope="module")
def trie():
    return Trie(WORDS)


@pytest.mark.parametrize("word", WORDS)
def test_contains(trie, word):
    assert word in trie
    assert word[:-1] not in trie or word[:-1] in WORDS
    assert word + "x" not in trie


def test_complete(trie):
    assert trie.complete("ca") == ["car", "cart", "cat"]
    assert trie.complete("x") == []
    assert trie.complete("日") == ["日本"]
    assert trie.complete("") == sorted(WORDS)


def test_empty():
    assert "" not in Trie()
    assert "" in Trie([""])
    assert Trie().complete("") == []
""",
        ("return node is not None and None in node", "return node is not None"),
        (
            "for c in sorted(c for c in node if c is not None)",
            "for c in reversed([c for c in node if c is not None])",
        ),
    ),
]
