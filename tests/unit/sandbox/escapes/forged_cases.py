"""Wrong answers to cases with standard input and to calls that try to be paid none the less."""

from __future__ import annotations

from tests.unit.sandbox.escapes.forging import Forgery, Suite

STDIN = {
    "sums": Suite(
        [{"input": f"{a} {a * 7}", "output": str(a * 8)} for a in (3, 4)],
        "a, b = map(int, input().split())\nprint(a + b)",
    ),
    "halves": Suite(
        [{"input": str(a), "output": str(a / 2)} for a in (3, 1001)],
        "print(int(input()) / 2)",
    ),
    "large sums": Suite(
        [{"input": f"{a} 1", "output": str(a + 1)} for a in (16_777_216, 10**15)],
        "a, b = map(int, input().split())\nprint(a + b)",
    ),
    "words": Suite([{"input": "yes", "output": "YES"}], "print(input().upper())"),
}
CALLS = {
    "large sums": Suite(
        {
            "function": "add",
            "cases": [{"args": [a, 1], "output": a + 1} for a in (5_000_000, 2**60)],
        },
        "def add(a, b):\n    return a + b",
    ),
    "sums": Suite(
        {"function": "add", "cases": [{"args": [a, a + 3], "output": a * 2 + 3} for a in (2, 7)]},
        "def add(a, b):\n    return a + b",
    ),
    "halves": Suite(
        {"function": "half", "cases": [{"args": [a], "output": a / 2} for a in (3, 1001)]},
        "def half(a):\n    return a / 2",
    ),
    "ones": Suite(
        {"function": "one", "cases": [{"args": [[]], "output": 1}, {"args": [[1]], "output": 0}]},
        "def one(x):\n    return 0 if x else 1",
    ),
    "lists": Suite(
        {"function": "firsts", "cases": [{"args": [n], "output": list(range(n))} for n in (2, 3)]},
        "def firsts(n):\n    return list(range(n))",
    ),
    "tables": Suite(
        {"function": "table", "cases": [{"args": [n], "output": {str(n): "a"}} for n in (2, 3)]},
        "def table(n):\n    return {str(n): 'a'}",
    ),
}
# Writes what stands in `frame` wherever it goes, as the channel for calls has no fixed number.
FRAMES = """
import json, os
def out(record):
    for fd in range(3, 64):
        try:
            os.write(fd, record)
        except OSError:
            pass
def frame(value):
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return len(body).to_bytes(4, "little") + body
"""
CHANNEL = """
import stat
fds = [fd for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}")]
fds = [fd for fd in fds if stat.S_ISSOCK(os.fstat(fd).st_mode)]
"""

PRINTED = [
    Forgery("all outputs at once", "sums", "print('24 32')"),
    Forgery("all outputs on lines", "sums", "print('24\\n32\\n24')"),
    Forgery("nothing that is a number", "halves", "print('nan')"),
    Forgery("more than all numbers", "halves", "print('1e999')\n"),
    Forgery("less than all numbers", "halves", "print('-inf')"),
    Forgery("a number nearby", "large sums", "a, b = map(int, input().split())\nprint(a + 0.3)"),
    Forgery("off by one in many digits", "large sums", "print(int(input().split()[0]) + 2)"),
    Forgery("without its exponent", "large sums", "print('%g' % (int(input().split()[0]) + 1))"),
    Forgery("another case", "words", "print(input())"),
    Forgery("letters over letters", "words", "print('NO\\b\\bYES\\r')"),
    Forgery("digits of other scripts", "sums", "print('\\uff12\\uff14')"),
    Forgery("said twice by two processes", "sums", "import os\nos.fork()\nprint(1)"),
    Forgery(
        "what earlier cases left",
        "sums",
        """
import os
kept = "/tmp/kept"
seen = open(kept).read() if os.path.exists(kept) else "23"
open(kept, "w").write(str(int(seen) + 8))
print(seen)
""",
    ),
    Forgery(
        "what lies behind the input",
        "sums",
        """
import os
text = b""
for offset in (0, 64, 4096, 1 << 20):
    text += os.pread(0, 4096, offset)
for fd in range(3, 64):
    try:
        text += os.pread(fd, 4096, 0)
    except OSError:
        pass
print(text.decode(errors="replace").split()[2] if len(text.split()) > 2 else "none")
""",
    ),
    Forgery(
        "an input of its own",
        "sums",
        """
import os
fd = os.open("/proc/self/fd/0", os.O_RDWR)
os.ftruncate(fd, 0)
os.pwrite(fd, b"12 12", 0)
a, b = map(int, open("/proc/self/fd/0").read().split())
print(a, b)
""",
    ),
    Forgery("an exit that says it is well", "sums", "import os\nos.write(1, b'OK')\nos._exit(0)"),
]
CALLED = [
    Forgery("a number nearby", "large sums", "def add(a, b):\n    return a + b + 0.3"),
    Forgery(
        "golden ratio",
        "large sums",
        "def add(a, b):\n    return float(a) * (1 + 1e-9) + b",
    ),
    Forgery("truth for one", "ones", "def one(x):\n    return not x"),
    Forgery("text of the number", "ones", "def one(x):\n    return '0' if x else '1'"),
    Forgery("bytes", "ones", "def one(x):\n    return b'0' if x else b'1'"),
    Forgery("no number", "halves", "def half(a):\n    return float('nan')"),
    Forgery("more than all numbers", "halves", "def half(a):\n    return 1e308 * 10"),
    Forgery("a whole number beyond floats", "halves", "def half(a):\n    return 10 ** 400"),
    Forgery("a complex number", "halves", "def half(a):\n    return complex(a / 2, 1e-30)"),
    Forgery(
        "a list that is never over",
        "lists",
        """
class Endless(list):
    def __iter__(self):
        while True:
            yield 0
def firsts(n):
    return Endless()
""",
    ),
    Forgery(
        "a list that lies about its length",
        "lists",
        """
class Long(list):
    def __len__(self): return 2
    def __eq__(self, other): return True
    def __iter__(self): return iter([])
def firsts(n):
    return Long([9])
""",
    ),
    Forgery("a generator", "lists", "def firsts(n):\n    while True:\n        yield n"),
    Forgery(
        "nested for ever",
        "lists",
        "def firsts(n):\n    x = []\n    x.append(x)\n    return x",
    ),
    Forgery(
        "two keys of one text",
        "tables",
        "def table(n):\n    return {n: 'b', str(n): 'a'}",
    ),
    Forgery(
        "a dictionary that shows another",
        "tables",
        """
class Shown(dict):
    def items(self):
        n = 0
        while True:
            yield str(n), "a"
            n += 1
def table(n):
    return Shown(x=1)
""",
    ),
    Forgery(
        "a class that says it is another",
        "sums",
        """
class Liar:
    __class__ = int
    def __int__(self): return 7
    def __eq__(self, other): return True
    def __index__(self): return 7
def add(a, b):
    return Liar()
""",
    ),
    Forgery(
        "answers that come early",
        "sums",
        FRAMES
        + """
out(b"".join(frame({"call": token, "value": 7}) for token in ("", "0", 0, None) for _ in range(9)))
def add(a, b):
    return None
""",
    ),
    Forgery(
        "answers by another reader",
        "sums",
        FRAMES
        + CHANNEL
        + """
def add(a, b):
    while True:
        for fd in fds:
            length = int.from_bytes(os.read(fd, 4), "little")
            asked = json.loads(os.read(fd, length))
            out(frame(b'{"call": "%s", "value": 7, "value": [7, 17]}' % asked["call"].encode()))
""",
    ),
    Forgery(
        "a frame that is garbage",
        "sums",
        FRAMES
        + """
def add(a, b):
    out(frame(b"[" * 100_000))
    out((1 << 31).to_bytes(4, "little"))
""",
    ),
    Forgery(
        "a frame without end",
        "sums",
        FRAMES
        + """
def add(a, b):
    out((1 << 19).to_bytes(4, "little") + b"x")
    os._exit(0)
""",
    ),
    Forgery(
        "numbers in the wire's own words",
        "sums",
        "def add(a, b):\n    return {'\\0int': '7', '': 7, '\\0': '0x7'}",
    ),
    Forgery(
        "words that no text has",
        "sums",
        "def add(a, b):\n    return '\\ud800' * 1000",
    ),
    Forgery(
        "an error whose text hangs",
        "ones",
        """
class Slow(Exception):
    def __str__(self):
        while True:
            pass
def one(x):
    raise Slow
""",
    ),
    Forgery(
        "what it was asked before",
        "sums",
        """
seen = []
def add(a, b):
    seen.append(a + b)
    return seen[-2] if len(seen) > 1 else 0
""",
    ),
    Forgery(
        "two that answer",
        "sums",
        """
import os
calls = 0
def add(a, b):
    global calls
    calls += 1
    if calls > 1:
        return None
    return 5 if os.fork() == 0 else 17
""",
    ),
    Forgery(
        "a thread that answers later",
        "ones",
        FRAMES
        + """
import threading
def one(x):
    threading.Thread(target=lambda: [out(frame({"call": "", "value": n % 2})) for n in range(50)]).start()
    return 2
""",  # noqa: E501
    ),
]
