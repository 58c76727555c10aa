"""Modules and functions of the user's that cannot be used."""

from __future__ import annotations

from loadtests.mistakes.job import CODE
from loadtests.mistakes.mistake import Mistake

_ENVIRONMENT = """

class Environment:
    def open(self, row):
        return row["prompt"]

    def step(self, text):
        return {"done": True}


def environment():
    return Environment()
"""
_USE = {"environment.use": "mine:environment"}


def _environment(old: str, new: str) -> dict[str, str]:
    assert old in _ENVIRONMENT
    return {"mine.py": CODE + _ENVIRONMENT.replace(old, new)}


MISTAKES = (
    Mistake("code: no such module", ("mien", "reward"), set={"reward.use": "mien:reward"}),
    Mistake(
        "code: no such function", ("rewrad", r"mine|reward\.use"), set={"reward.use": "mine:rewrad"}
    ),
    Mistake(
        "code: neither a function nor one that comes along",
        ("exakt", "exact"),
        set={"reward.use": "exakt"},
    ),
    Mistake(
        "code: a syntax error",
        (r"mine\.py", "line 3|:3", "syntax|never closed"),
        files={"mine.py": "import math\n\ndef reward(row, turns:\n    return 1.0\n"},
    ),
    Mistake(
        "code: a module that is not installed",
        ("nosuchpackage", r"mine\.py"),
        files={"mine.py": "import nosuchpackage\n\n" + CODE},
    ),
    Mistake(
        "code: raises when imported",
        (r"mine\.py", "no licence"),
        files={"mine.py": CODE + "\nraise RuntimeError('no licence')\n"},
    ),
    Mistake(
        "code: never done with its import",
        (r"mine\.py|mine", "import"),
        files={"mine.py": CODE + "\nwhile True:\n    pass\n"},
        own_s=60.0,
    ),
    Mistake(
        "code: ends the process when imported",
        (r"mine",),
        files={"mine.py": CODE + "\nimport os\nos._exit(3)\n"},
    ),
    Mistake(
        "code: a reward of one argument",
        ("reward", "row, turns|argument"),
        files={"mine.py": "def reward(row):\n    return 1.0\n"},
    ),
    Mistake(
        "code: a reward that is no function",
        ("reward", "function|callable|called"),
        files={"mine.py": "reward = 1.0\n"},
    ),
    Mistake(
        "code: an environment that cannot be made",
        (r"mine\.py", "no board"),
        set=_USE,
        files=_environment("return Environment()", "raise ValueError('no board')"),
    ),
    Mistake(
        "code: an environment without step",
        ("step",),
        set=_USE,
        files=_environment("def step", "def stpe"),
    ),
    Mistake(
        "code: an environment that opens with nothing",
        ("open", "None|text"),
        set=_USE,
        files=_environment('return row["prompt"]', "return None"),
    ),
    Mistake(
        "code: an environment that misses a key of the row",
        (r"mine\.py", "question"),
        set=_USE,
        files=_environment('row["prompt"]', 'row["question"]'),
    ),
    Mistake(
        "code: no such tool",
        ("pythn", "python"),
        set=_USE | {"environment.tools": {"python": "pythn"}},
        files={"mine.py": CODE + _ENVIRONMENT},
    ),
    Mistake(
        "code: a tool's function is missing",
        ("mine:calcualte|calcualte",),
        set=_USE | {"environment.tools": {"calculate": "mine:calcualte"}},
        files={"mine.py": CODE + _ENVIRONMENT},
    ),
    Mistake(
        "code: demonstrations that do not exist",
        ("demo",),
        set={"warm_start.demonstrations": "mine:demo"},
    ),
    Mistake(
        "code: demonstrations that are none",
        ("demonstrat", r"mine\.py|mine:show"),
        running=True,
        set={"warm_start.demonstrations": "mine:show", "warm_start.steps": 5, "cache": ""},
        files={"mine.py": CODE + "\n\ndef show(rng, progress):\n    return 'a text'\n"},
    ),
)
