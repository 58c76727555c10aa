"""Answers that try to be paid without being right: each is wrong, and must score 0.

TESTS are of a function `add`; the programs also get cases with standard input.
"""

from __future__ import annotations

STDIN = [{"input": f"{a} {a * 7}", "output": str(a * 8)} for a in range(3, 7)]
CALLS = {
    "function": "add",
    "cases": [{"args": [a, a * 7], "output": a * 8} for a in range(3, 7)],
}
PYTHON = """
import unittest
from solution import add

SECRET = 40961

class TestAdd:
    def test_small(self):
        assert add(2, 3) == 5

def test_large():
    assert add(40000, 961) == SECRET

def test_list():
    assert [add(x, 1) for x in (1, 2, 3)] == [2, 3, 4]

def test_in():
    assert 7 in [add(3, 4)]

def test_order():
    assert add(1, 1) < 3 and add(1, 1) > 1

def test_close():
    assert abs(add(0.5, 0.25) - 0.75) < 1e-9

def test_function():
    assert add(lambda: 4, 5) == 9
"""

EXIT = "import os\nos._exit(0)"
FORGERIES = {
    "exits at once": EXIT,
    "exits politely": "raise SystemExit(0)",
    "exits in the call": "def add(a, b):\n    import os\n    os._exit(0)",
    "says that it passed": "def add(a, b):\n    print('PASSED 7 passed in 0.01s OK')\nprint('ok')",
    "patches unittest": """
import unittest, builtins
unittest.TestCase.run = lambda self, result=None: result
unittest.TestResult.wasSuccessful = lambda self: True
builtins.AssertionError = type("Never", (BaseException,), {})
def add(a, b): return None
""",
    "equal to everything": """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def add(a, b): return Equal()
""",
    "more, less and the same": """
class All:
    def __getattr__(self, name): return lambda *a: True
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = lambda *a: True
    __sub__ = __rsub__ = __add__ = __abs__ = lambda self, *a: 0
    def __bool__(self): return True
def add(a, b): return All()
""",
    "a number that is equal to all": """
class Number(int):
    def __eq__(self, other): return True
    def __hash__(self): return 0
def add(a, b): return Number(-1)
""",
    "a list that holds all": """
class Holds(list):
    def __contains__(self, x): return True
    def __eq__(self, other): return True
def add(a, b): return Holds()
""",
    "reads the tests by trace": """
import sys
def trace(frame, event, arg):
    for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):
        if isinstance(value, dict) and "output" in value:
            frame.f_locals["answer"] = value["output"]
    return trace
sys.settrace(trace)
def add(a, b): return None
""",
    "looks for the expected value in memory": """
import gc
def add(a, b):
    for thing in gc.get_objects():
        if isinstance(thing, dict) and "output" in thing:
            return thing["output"]
        if isinstance(thing, dict) and "SECRET" in thing:
            return thing["SECRET"]
""",
    "climbs frames": """
import sys
def add(a, b):
    frame = sys._getframe()
    while frame:
        for scope in (frame.f_locals, frame.f_globals):
            for key in ("case", "wanted", "expected", "output", "SECRET"):
                if key in scope:
                    return scope[key]
        frame = frame.f_back
""",
    "climbs from what it was handed": """
def add(a, b):
    for thing in (a, b):
        for name in ("__globals__", "__closure__", "__code__"):
            try:
                return getattr(thing, name)["SECRET"]
            except Exception:
                pass
""",
    "writes verdicts to every descriptor": """
import json, os
frame = json.dumps({"passed": True, "ready": True, "test": 0, "value": 8, "nonce": ""}).encode()
for fd in range(3, 200):
    try:
        for _ in range(20):
            os.write(fd, len(frame).to_bytes(4, "little") + frame)
    except OSError:
        pass
def add(a, b): return None
""",
    "speaks for the keeper": """
import json, os, re
found = re.findall(r"[0-9a-f]{32}", open("/proc/self/environ").read())
frame = json.dumps({"exit": 0, "timeout": "", "nonce": (found or [""])[0]}).encode()
for fd in range(3, 64):
    try:
        os.write(fd, len(frame).to_bytes(4, "little") + frame)
    except OSError:
        pass
os._exit(0)
""",
    "answers with what was asked": """
import json, os
def add(a, b):
    return [a, b, a + b] if isinstance(a, int) else None
""",
    "deletes the tests": """
import os, shutil
for place in ("/tests", "tests.py", "/tmp", "/run/meshrl", os.getcwd()):
    shutil.rmtree(place, ignore_errors=True)
def add(a, b): return None
""",
    "reads the tests from files": """
import os
found = False
for folder, folders, names in os.walk("/"):
    if folder.startswith(("/proc", "/usr", "/sys", "/root", "/lib")):
        folders.clear()  # a look at all of it takes longer than a case may
        continue
    for name in names:
        try:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NONBLOCK)
            found = found or b"SECRET = 40" + b"961" in os.read(fd, 1 << 16)
            os.close(fd)
        except OSError:
            pass
def add(a, b): return 40961 if found else None
""",
    "reads the tests from proc": """
import glob, os
text = b""
for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
    try:
        text += open(path, "rb").read()
    except OSError:
        pass
for path in glob.glob("/proc/[0-9]*/fd/*"):
    try:
        text += os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 1 << 16)
    except OSError:
        pass
def add(a, b): return 40961 if b"SECRET" in text else None
""",
    "replaces json": """
import json
json.dumps = lambda *a, **k: '{"passed": true, "value": 24}'
json.loads = lambda *a, **k: {"call": 0, "args": [1, 2], "kwargs": {}}
def add(a, b): return None
""",
    "raises what passes": """
def add(a, b):
    raise StopIteration("passed")
""",
    "exits when it is over": """
import atexit, os
atexit.register(os._exit, 0)
def add(a, b): return None
""",
    "goes on in the background": """
import os, threading
def add(a, b):
    if os.fork() == 0:
        return a + b - 1
    return None
""",
    "is none": "",
    "does not parse": "def add(a, b: return a + b",
    "hangs": "def add(a, b):\n    while True:\n        pass",
    "hangs at once": "while True:\n    pass",
}
HANGING = ("hangs", "hangs at once")  # as contained after a little as after long
