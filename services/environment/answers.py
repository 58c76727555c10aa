"""Validated return values of the functions of an author's environment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from meshrl.common.environment.reward_numbers import (
    REWARD_KEYS,
    parse_metrics,
    parse_reward,
    to_finite_float,
)

ANSWER_KEYS = ("tool", "input", "append", "done", "reward", "metrics")
ANSWER_FORMS = (
    "an environment returns {'tool': name, 'input': x}, {'append': observation}, {'done': True} or "
    "{'done': True, 'reward': number}; the last two may include 'append', and the last one "
    "'metrics': {name: number}"
)


class InvalidAnswer(Exception):
    """Error raised when the author's `function` returns an invalid value."""

    def __init__(self, message: str, function: Any) -> None:
        super().__init__(message)
        self.function = function


@dataclass(frozen=True, slots=True)
class EnvironmentAnswer:
    """Valid answer: a call of a tool, an observation, or the end with or without a last
    observation.
    """

    tool: str = ""
    input: Any = None
    append: Any = None  # None: nothing
    done: bool = False
    # a number, or with metrics as in `reward_numbers`; None: left to the job's reward
    reward: Any = None


def call_environment(function: Callable[..., Any], *arguments: Any) -> EnvironmentAnswer:
    """Call `step` or `result` of an environment; InvalidAnswer for an invalid return value."""
    value = function(*arguments)
    with _raise_invalid_answer(function, value):
        return _parse_answer(value)


def call_for_reward(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that returns a reward, perhaps with metrics, or None to leave it to the job's
    reward.
    """
    value = function(*arguments)
    with _raise_invalid_answer(function, value):
        return None if value is None else parse_reward(value)


@contextlib.contextmanager
def _raise_invalid_answer(function: Callable[..., Any], value: Any) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        problem = f"{function.__name__}() returned {value!r:.80}: {error}"
        raise InvalidAnswer(problem, function) from None


def _parse_answer(value: Any) -> EnvironmentAnswer:
    if not isinstance(value, dict):
        raise TypeError(ANSWER_FORMS)
    if unknown := [key for key in value if key not in ANSWER_KEYS]:
        raise ValueError(f"there is no key {unknown[0]!r}; {ANSWER_FORMS}")
    given = {key: item for key, item in value.items() if item is not None or key == "input"}
    done = given.pop("done", False)
    if type(done).__name__ not in ("bool", "bool_"):
        raise TypeError(f"'done' must be True or False, not {done!r:.80}")
    if "tool" in given:
        if done or not given.keys() <= {"tool", "input"}:
            others = [key for key in value if key not in ("tool", "input")]
            raise ValueError(f"'tool' allows only 'input', not {others[0]!r}")
        if not isinstance(given["tool"], str) or not given["tool"]:
            raise TypeError(f"'tool' must be the name of a tool, not {given['tool']!r:.80}")
        return EnvironmentAnswer(tool=given["tool"], input=given.get("input"))
    if "input" in given:
        raise ValueError("'input' requires 'tool'")
    for key in REWARD_KEYS:
        if key in given and not done:
            raise ValueError(f"{key!r} requires 'done': True; only the last answer may have it")
    if done and given.get("append") in ("", []):
        del given["append"]
    if not done and "append" not in given:
        raise ValueError(f"the answer lacks 'tool', 'append' and 'done'; {ANSWER_FORMS}")
    reward: Any = to_finite_float(given["reward"], "'reward'") if "reward" in given else None
    if metrics := parse_metrics(given.get("metrics", {})):
        reward = {"reward": reward, "metrics": metrics}
    return EnvironmentAnswer(append=given.get("append"), done=bool(done), reward=reward)
