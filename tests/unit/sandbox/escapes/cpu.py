"""Time without end."""

from __future__ import annotations

from tests.unit.sandbox.escapes.program import Escape, Left

TIME = [
    Escape("sleep", "import time\ntime.sleep(1e6)", ("timeout",)),
    Escape("spin", "while True:\n    pass", ("timeout",)),
    Escape("spin in C", "import re\nre.match('(a+)+$', 'a' * 60 + 'b')", ("timeout",)),
    Escape("wait for input", "import os\nos.read(os.pipe()[0], 1)", ("timeout",)),
    Escape(
        "threads after the end",
        """
import threading, time
threading.Thread(target=time.sleep, args=(1e6,)).start()
""",
        ("timeout",),
    ),
    Escape(
        "exit handler",
        "import atexit, time\natexit.register(time.sleep, 1e6)",
        ("timeout",),
    ),
    Escape(
        "spin in many processes",
        "import os\nfor _ in range(3):\n    os.fork()\nwhile True:\n    pass",
        ("timeout",),
    ),
    Escape(
        "catch the end of CPU time",
        """
import signal
signal.signal(signal.SIGXCPU, lambda *_: print("on"))
while True:
    pass
""",
        ("timeout",),
    ),
    Escape(
        "set the clock",
        """
import time
try:
    time.clock_settime(time.CLOCK_REALTIME, 0)
    print("ESCAPED")
except OSError as error:
    print("kept in", error)
""",
    ),
]

SPIN = "while True:\n    pass\n"
EARLY = """
import json, os
def early(*numbers):
    for number in numbers:
        frame = json.dumps({"cell": number, "exit": 0}).encode()
        for fd in range(3, 64):
            try:
                os.write(fd, len(frame).to_bytes(4, "little") + frame)
            except OSError:
                pass
"""
CHILDREN = """
import os
for _ in range(4):
    if os.fork() == 0:
        while True: pass
x = 8
"""
DAEMONS = """
import os, signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
for _ in range(3):
    if os.fork() == 0:
        try:
            os.setsid()
        except OSError:
            pass
        if os.fork() == 0:
            while True: pass
        os._exit(0)
x = 9
"""
RELAY = """
import os
if os.fork() == 0:
    while True:
        for _ in range(10_000): pass
        try:
            if os.fork():
                os._exit(0)
        except BlockingIOError:  # its forebears still count among the user's processes
            pass
x = 1
"""
TIMER = """
import signal
def spin(*_):
    for _ in range(10**6): pass
signal.signal(signal.SIGALRM, spin)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
"""
THREAD = """
import threading
def spin():
    while True: pass
threading.Thread(target=spin, daemon=True).start()
"""
COMMAND = "import subprocess\np = subprocess.Popen(['sh', '-c', 'while :; do :; done'])\nx = 3"
LEFT = [
    Left("a thread", ("x = 7" + THREAD, "x"), "7\n"),
    Left("children", (CHILDREN, "x"), "8\n"),
    Left("daemons", (DAEMONS, "x"), "9\n"),
    Left("a relay", (RELAY, "x"), "1\n"),
    Left("a timer", (TIMER, "x")),
    Left("a command", (COMMAND, "x"), "3\n"),
    Left("the next frame early", (EARLY + "early(1)\n" + SPIN,)),
    Left("all next frames early", (EARLY + "early(1, 2, 3, 4)\n" + SPIN, "5", "6")),
    Left(
        "frames early by a child",
        (EARLY + "if os.fork() == 0:\n    early(2)\n    while True: pass\n", "1 + 1"),
    ),
    Left(
        "a child that answers for its parent",
        (EARLY + "if os.fork() == 0:\n    early(1)\nwhile True: pass",),
    ),
]
