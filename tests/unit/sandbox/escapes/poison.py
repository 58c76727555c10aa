"""Cells of sessions that try to reach other sessions, or what a later cell is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Said = list[tuple[str, str]]  # (status, output) of each cell


@dataclass(frozen=True)
class Poison:
    name: str
    cells: tuple[tuple[str, str], ...]  # (session, source)
    holds: Callable[[Said], bool]


CASES = [
    Poison(
        "variables of another",
        (("a", "secret = 17"), ("b", "'secret' in globals()")),
        lambda said: said[1] == ("ok", "False\n"),
    ),
    Poison(
        "files of another",
        (
            ("a", "open('note', 'w').write('secret')"),
            ("b", "import os; os.path.exists('note')"),
            ("a", "open('note').read()"),
        ),
        lambda said: said[1] == ("ok", "False\n") and said[2] == ("ok", "'secret'\n"),
    ),
    Poison(
        "processes of another",
        (
            (
                "a",
                "import subprocess; p = subprocess.Popen(['sleep', '100']); p.poll() is None",
            ),
            ("b", "import os, signal\ntry:\n    os.kill(-1, 9)\nexcept OSError:\n    pass"),
            ("a", "p.poll() is None"),
        ),
        lambda said: said[0][1] == said[2][1] == "True\n",
    ),
    Poison(
        "built-ins of another",
        (
            ("a", "import builtins; builtins.print = lambda *a: None; builtins.sum = max"),
            ("b", "print(sum([1, 2]))"),
        ),
        lambda said: said[1] == ("ok", "3\n"),
    ),
    Poison(
        "modules of another",
        (
            ("a", "import math; math.sqrt = lambda x: -1"),
            ("b", "import math; math.sqrt(9)"),
        ),
        lambda said: said[1] == ("ok", "3.0\n"),
    ),
    Poison(
        "ends of cells that have not ended",
        (
            (
                "a",
                "import os, json\n"
                "frame = json.dumps({'cell': 1, 'failed': False, 'exit': 0}).encode()\n"
                "for fd in range(3, 60):\n"
                "    try:\n"
                "        os.write(fd, len(frame).to_bytes(4, 'little') + frame)\n"
                "    except OSError:\n"
                "        pass\n",
            ),
            ("b", "1 + 1"),
            ("c", "2 + 2"),
        ),
        lambda said: said[1] == ("ok", "2\n") and said[2] == ("ok", "4\n"),
    ),
    Poison(
        "what a thread prints later",
        (
            (
                "a",
                "import threading, time\n"
                "threading.Thread(target=lambda: (time.sleep(0.2), print('late')), daemon=True)"
                ".start()",
            ),
            ("b", "import time; time.sleep(0.4); 'mine'"),
        ),
        lambda said: said[1] == ("ok", "'mine'\n"),
    ),
    Poison(
        "a child that serves the session on",
        (
            ("a", "import os\npid = os.fork()\nos._exit(0) if pid else None"),
            ("b", "5 * 5"),
            ("a", "6 * 6"),
        ),
        lambda said: said[1] == ("ok", "25\n"),
    ),
    Poison(
        "an end that is none",
        (("a", "x = 3\nraise SystemExit(0)"), ("a", "x")),
        lambda said: said[1] == ("ok", "3\n"),
    ),
    Poison(
        "a session that dies takes no other along",
        (
            ("a", "y = 1"),
            ("b", "import os; os._exit(3)"),
            ("a", "y"),
            ("b", "'y' in globals()"),
        ),
        lambda said: (
            said[1][0] == "crashed" and said[2] == ("ok", "1\n") and said[3] == ("ok", "False\n")
        ),
    ),
]
