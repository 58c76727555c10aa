"""Modules with tests of fixtures, parameters, unittest, and what is printed."""

from __future__ import annotations

from loadtests.conformance.row import unit

ROWS = [
    unit(
        "bounded_stack",
        """
class StackFull(Exception):
    pass


class Stack:
    def __init__(self, limit):
        self.limit = limit
        self._items = []

    def push(self, item):
        if len(self._items) >= self.limit:
            raise StackFull(f"more than {self.limit}")
        self._items.append(item)

    def pop(self):
        if not self._items:
            raise IndexError("empty stack")
        return self._items.pop()

    def __len__(self):
        return len(self._items)
""",
        """
import pytest
from solution import Stack, StackFull


@pytest.fixture
def stack():
    return Stack(2)


def test_last_in_first_out(stack):
    stack.push("a")
    stack.push("b")
    assert stack.pop() == "b"
    assert stack.pop() == "a"
    assert len(stack) == 0


def test_full(stack):
    stack.push(1)
    stack.push(2)
    with pytest.raises(StackFull, match="more than 2"):
        stack.push(3)
    assert len(stack) == 2


def test_empty(stack):
    with pytest.raises(IndexError):
        stack.pop()
""",
        (">= self.limit", "> self.limit"),
        ('raise IndexError("empty stack")', "return None"),
    ),
    unit(
        "slug_ids",
        """
import re
import unicodedata


def slug(title, limit=20):
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    words = re.findall(r"[a-z0-9]+", plain.lower())
    out = ""
    for word in words:
        longer = f"{out}-{word}" if out else word
        if len(longer) > limit:
            break
        out = longer
    return out
""",
        """
import pytest

from solution import slug


@pytest.mark.parametrize(
    "title, expected",
    [
        pytest.param("Hello World", "hello-world", id="plain"),
        pytest.param("  Crème brûlée! ", "creme-brulee", id="accents"),
        pytest.param("", "", id="empty"),
        pytest.param("one two three four five", "one-two-three-four", id="cut"),
    ],
)
def test_slug(title, expected):
    assert slug(title) == expected


@pytest.mark.parametrize("limit", [1, 3, 7], ids=["one", "three", "seven"])
def test_limit(limit):
    assert len(slug("a bc def", limit=limit)) <= limit


def test_exactly_at_the_limit():
    assert slug("abc def", limit=7) == "abc-def"
""",
        ("len(longer) > limit", "len(longer) >= limit"),
        ('unicodedata.normalize("NFKD", title)', "title"),
    ),
    unit(
        "ledger_unittest",
        """
class InsufficientFunds(ValueError):
    def __init__(self, missing):
        super().__init__(f"missing {missing}")
        self.missing = missing


class Account:
    def __init__(self, balance=0, history=None):
        self.balance = balance
        self.history = list(history or [])

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount > self.balance:
            raise InsufficientFunds(amount - self.balance)
        self.balance -= amount
        self.history.append(("withdraw", amount))
""",
        """
import unittest

from solution import Account, InsufficientFunds


class TestAccount(unittest.TestCase):
    def setUp(self):
        self.account = Account(10)

    def test_deposit(self):
        self.account.deposit(5)
        self.assertEqual(self.account.balance, 15)
        self.assertEqual(self.account.history, [("deposit", 5)])

    def test_overdraft(self):
        with self.assertRaises(InsufficientFunds) as caught:
            self.account.withdraw(25)
        self.assertEqual(caught.exception.missing, 15)
        self.assertEqual(self.account.balance, 10)

    def test_all_can_be_taken(self):
        self.account.withdraw(10)
        self.assertEqual(self.account.balance, 0)

    def test_histories_are_apart(self):
        other = Account()
        self.account.deposit(1)
        self.assertEqual(other.history, [])
        self.assertRaises(ValueError, other.deposit, 0)


if __name__ == "__main__":
    unittest.main()
""",
        (
            "history=None",
            "history=[]",
            "list(history or [])",
            "history",
        ),
        ("InsufficientFunds(amount - self.balance)", "InsufficientFunds(amount)"),
    ),
    unit(
        "greeting_capsys",
        """
def greet(names, shout=False):
    for name in names:
        text = f"Hello, {name}!"
        print(text.upper() if shout else text)
    return len(names)
""",
        """
from solution import greet


def test_prints_a_line_each(capsys):
    assert greet(["Ada", "Bo"]) == 2
    assert capsys.readouterr().out == "Hello, Ada!\\nHello, Bo!\\n"


def test_shouts(capsys):
    greet(["Ada"], shout=True)
    captured = capsys.readouterr()
    assert captured.out == "HELLO, ADA!\\n"
    assert captured.err == ""


def test_nobody(capsys):
    assert greet([]) == 0
    assert capsys.readouterr().out == ""
""",
        ("text.upper() if shout else text", "text.title() if shout else text"),
        ("return len(names)", "return len(names) or None"),
    ),
    unit(
        "config_file",
        """
def load(path):
    out = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            line = line.split("#", 1)[0].strip()
            if line:
                key, sep, value = line.partition("=")
                if not sep:
                    raise ValueError(f"no value: {line}")
                out[key.strip()] = value.strip()
    return out
""",
        """
import pytest

from solution import load


def test_load(tmp_path):
    path = tmp_path / "app.conf"
    text = "# comment\\nname = caf\\u00e9\\n\\nport=80 # low\\nq = a=b\\n"
    path.write_text(text, encoding="utf-8")
    assert load(path) == {"name": "caf\\u00e9", "port": "80", "q": "a=b"}


def test_text_path(tmp_path):
    path = tmp_path / "empty.conf"
    path.write_text("")
    assert load(str(path)) == {}


def test_no_value(tmp_path):
    path = tmp_path / "bad.conf"
    path.write_text("alone\\n")
    with pytest.raises(ValueError) as info:
        load(path)
    assert str(info.value) == "no value: alone"


def test_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none")
""",
        ('line.partition("=")', 'line.rpartition("=")'),
        ('f"no value: {line}"', 'f"no value: {line!r}"'),
    ),
    unit(
        "settings_monkeypatch",
        """
import os


def timeout():
    raw = os.environ.get("APP_TIMEOUT", "")
    if not raw.strip():
        return 30.0
    value = float(raw)
    if value < 0:
        raise ValueError("APP_TIMEOUT is negative")
    return value
""",
        """
import pytest

from solution import timeout


def test_default(monkeypatch):
    monkeypatch.delenv("APP_TIMEOUT", raising=False)
    assert timeout() == 30.0


def test_set(monkeypatch):
    monkeypatch.setenv("APP_TIMEOUT", "2.5")
    assert timeout() == 2.5


def test_zero_is_a_value(monkeypatch):
    monkeypatch.setenv("APP_TIMEOUT", "0")
    assert timeout() == 0.0


def test_negative(monkeypatch):
    monkeypatch.setenv("APP_TIMEOUT", "-1")
    with pytest.raises(ValueError, match="negative"):
        timeout()
""",
        ("return value", "return value or 30.0"),
        ("if value < 0", "if value < -1"),
    ),
]
