"""Code of the user's that leaves processes behind, prints without end, or cannot be graded."""

from __future__ import annotations

import json

from loadtests.mistakes.job import CODE
from loadtests.mistakes.mistake import Mistake

# A child in a session of its own, with the descriptors of its parent, that never ends.
_STAYS = """
import os, time

def stay():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True:
                time.sleep(1000)
        os._exit(0)
"""
_PRINTS = "\nprint(*['many words' * 20] * 50_000, sep='\\n')\n"
_ENVIRONMENT = """
class Environment:
    def open(self, row):
        {opens}

    def step(self, text):
        return {{"done": True}}


def environment():
    return Environment()
"""
_TESTS = {"reward.use": "code_tests", "rollout.stop": None}


def _rows(**tests: object) -> dict[str, str]:
    rows = [{"prompt": f"{number}+1=", "tests": json.dumps(tests)} for number in range(1, 9)]
    lines = [json.dumps(row) + "\n" for row in rows]
    return {"train.jsonl": "".join(lines[:6]), "held_out.jsonl": "".join(lines[6:])}


MISTAKES = (
    Mistake(
        "containment: a daemon started at import, then an error",
        (r"mine\.py", "no licence"),
        files={"mine.py": CODE + _STAYS + "\nstay()\nraise RuntimeError('no licence')\n"},
    ),
    Mistake(
        "containment: a daemon started at import by a process that ends",
        ("mine", "ended the process", "status 3"),
        files={"mine.py": CODE + _STAYS + "\nstay()\nos._exit(3)\n"},
    ),
    Mistake(
        "containment: a module that prints megabytes and ends",
        ("mine", "ended the process", "status 4", "last words"),
        files={
            "mine.py": CODE
            + _PRINTS
            + "import os, sys\nsys.stdout.flush()\nos.write(2, b'last words\\n')\nos._exit(4)\n"
        },
    ),
    Mistake(
        "containment: an environment that prints megabytes and opens with nothing",
        ("open", "None|text"),
        set={"environment.use": "mine:environment"},
        files={"mine.py": CODE + _ENVIRONMENT.format(opens=_PRINTS.strip())},
    ),
    Mistake(
        "containment: an error of a million characters",
        (r"mine\.py", "aaaa"),
        files={"mine.py": CODE + "\nraise RuntimeError('a' * 1_000_000)\n"},
    ),
    Mistake(
        "containment: a reward that ends its process at each call",
        ("reward", r"failed its process|exit status 7"),
        running=True,
        files={"mine.py": _STAYS + "\ndef reward(row, turns):\n    stay()\n    os._exit(7)\n"},
    ),
    Mistake(
        "containment: a reward that prints for ever",
        ("reward", r"took more than 1 s|too long|deadline"),
        running=True,
        set={"reward.deadline_s": 1.0},
        own_s=6.0,
        files={"mine.py": "def reward(row, turns):\n    while True:\n        print('more')\n"},
    ),
    Mistake(
        "grading: a case's time as a text",
        (r"case_s", "number"),
        set={**_TESTS, "reward.options": {"case_s": "2 s"}},
        files=_rows(function="f", cases=[{"args": [1], "output": 2}]),
    ),
    Mistake(
        "grading: no time for a case",
        (r"case_s", "above 0"),
        set={**_TESTS, "reward.options": {"case_s": 0}},
        files=_rows(function="f", cases=[{"args": [1], "output": 2}]),
    ),
    Mistake(
        "grading: a prefix in lines",
        (r"prefix", "a text"),
        set={**_TESTS, "reward.options": {"prefix": ["import math", "import re"]}},
        files=_rows(function="f", cases=[{"args": [1], "output": 2}]),
    ),
    Mistake(
        "grading: a negative tolerance",
        (r"abs_tol", "from 0 on"),
        set={**_TESTS, "reward.options": {"abs_tol": -1}},
        files=_rows(function="f", cases=[{"args": [1], "output": 2}]),
    ),
    Mistake(
        "grading: all or nothing as a text",
        (r"partial", "true or false"),
        set={**_TESTS, "reward.options": {"partial": "no"}},
        files=_rows(function="f", cases=[{"args": [1], "output": 2}]),
    ),
    Mistake(
        "grading: no memory for a program",
        (r"memory_mb", "above 0"),
        set={**_TESTS, "reward.options": {"memory_mb": 0}},
        files=_rows(function="f", cases=[{"args": [1], "output": 2}]),
    ),
    Mistake(
        "grading: a class named where a method is called",
        (r"Solution", "class|method|function"),
        set=_TESTS,
        files=_rows(function="Solution", cases=[{"args": [1], "output": 2}]),
    ),
)
