"""Rewards, environments and tools that fail while trajectories run: said from the first, with file
and line.
"""

from __future__ import annotations

from typing import Any

from loadtests.mistakes.job import CODE, LETTERS
from loadtests.mistakes.mistake import Mistake

_TOOLS = """

class Environment:
    def open(self, row):
        return row["prompt"]

    def step(self, text):
        return {"tool": "look", "input": text}

    def result(self, value):
        return {"done": True}


def environment():
    return Environment()


def look(text):
    return len(text)
"""
_USE = {"environment.use": "mine:environment", "environment.tools": {"look": "mine:look"}}


def _reward(body: str) -> dict[str, str]:
    return {"mine.py": f"import time\n\n\ndef reward(row, turns):\n    {body}\n"}


def _changed(old: str, new: str) -> dict[str, str]:
    assert old in _TOOLS
    return {"mine.py": "import time\n" + CODE + _TOOLS.replace(old, new)}


def _in_a_reward(name: str, body: str, *says: str, **set_: Any) -> Mistake:
    keys = {"reward.deadline_s": 2.0} | {key.replace("__", "."): v for key, v in set_.items()}
    return Mistake(f"reward: {name}", says, running=True, files=_reward(body), set=keys)


def _in_an_environment(name: str, old: str, new: str, *says: str, **set_: Any) -> Mistake:
    # Any letter ends a turn, so that every trajectory comes to the environment's step.
    keys = _USE | {"rollout.stop": list(LETTERS), "environment.tool_deadline_s": 2.0}
    keys |= {"environment.step_deadline_s": 2.0}
    keys |= {key.replace("__", "."): value for key, value in set_.items()}
    return Mistake(f"environment: {name}", says, running=True, files=_changed(old, new), set=keys)


MISTAKES = (
    _in_a_reward("raises", 'return row["anwser"]', "anwser", r"mine\.py:5|mine\.py.*line 5"),
    _in_a_reward("returns nothing", "row.get(1)", "reward", "None"),
    _in_a_reward("returns NaN", 'return float("nan")', "reward", "nan|finite"),
    _in_a_reward("returns a text", 'return "good"', "reward", "good|str|number"),
    _in_a_reward("sleeps", "time.sleep(600)", r"mine(\.py)?:reward|mine\.py", "deadline|2 s|sleep"),
    _in_a_reward("spins", "while True: pass", r"mine(\.py)?:reward|mine\.py", "deadline|2 s"),
    _in_a_reward("ends its process", "__import__('os')._exit(1)", "reward", "ended|died|exit"),
    _in_a_reward(
        "needs more memory than there is",
        "return len(bytearray(1 << 45))",
        "MemoryError|memory",
        r"mine\.py",
    ),
    Mistake(
        "reward: raises for one row in four, and its share is told",
        ("ZeroDivisionError|division", r"mine\.py:5|mine\.py.*line 5", r"step 2.*failed"),
        running=True,
        ends=False,
        set={"budget.steps": 40, "algorithm.min_group": 1, "algorithm.group_size": 4},
        files=_reward("return 1 / (sum(map(ord, turns[-1]['text'])) % 4)"),
    ),
    Mistake(
        "reward: fails in evaluation only, and what is missing from the figure is told",
        (r"held.out", r"of \d+(\.\d+)? ?%"),
        running=True,
        ends=False,
        set={"evaluation.before": True, "budget.steps": 30, "evaluation.problems": 16},
        files=_reward("return 1 / (len(row['prompt'] + row['answer']) % 2)"),
    ),
    _in_an_environment(
        "step raises",
        'return {"tool": "look", "input": text}',
        "return self.board",
        "board",
        r"mine\.py",
    ),
    _in_an_environment(
        "step answers garbage",
        'return {"tool": "look", "input": text}',
        "return 5",
        "step",
        "5|int",
    ),
    _in_an_environment(
        "step hangs",
        'return {"tool": "look", "input": text}',
        "time.sleep(600)",
        "step|environment",
        "deadline|2 s",
    ),
    _in_an_environment(
        "asks for a tool that is none", '"tool": "look"', '"tool": "lok"', "lok", "look"
    ),
    _in_an_environment(
        "appends what is no text",
        'return {"done": True}',
        'return {"append": 7}',
        "append",
        "7|int|text",
    ),
    _in_an_environment(
        "a tool raises", "return len(text)", "return text.size", "size", r"mine\.py"
    ),
    _in_an_environment(
        "a tool hangs", "return len(text)", "time.sleep(600)", "look", "deadline|2 s"
    ),
    _in_an_environment(
        "a tool answers what cannot travel", "return len(text)", "return object()", "look", "object"
    ),
    _in_an_environment(
        "an import at the first call that fails",
        "return len(text)",
        "import nosuchpackage",
        "nosuchpackage",
        r"mine\.py",
    ),
)
