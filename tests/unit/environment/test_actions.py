"""Answers of environments are taken whole, or refused by what is wrong, at the author's line."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.common.environment.numbers import finite_number
from meshrl.services.environment.actions import BadAnswer, EnvironmentAnswer, call_for_answer
from meshrl.services.environment.environments import Environments
from tests.unit.common.model.chatting import qwen3_tokenizer

TAKEN: list[tuple[Any, EnvironmentAnswer]] = [
    ({"tool": "look", "input": {"at": 1}}, EnvironmentAnswer("look", {"at": 1})),
    ({"tool": "look"}, EnvironmentAnswer("look")),
    ({"tool": "look", "input": None, "done": False, "reward": None}, EnvironmentAnswer("look")),
    ({"append": "so?"}, EnvironmentAnswer(append="so?")),
    ({"append": "so?", "done": False}, EnvironmentAnswer(append="so?")),
    ({"append": [], "done": True}, EnvironmentAnswer(done=True)),
    ({"append": "", "done": True, "reward": 1}, EnvironmentAnswer(done=True, reward=1.0)),
    ({"done": True}, EnvironmentAnswer(done=True)),
    ({"done": np.True_, "reward": None}, EnvironmentAnswer(done=True)),
    ({"done": True, "reward": 1}, EnvironmentAnswer(done=True, reward=1.0)),
    ({"done": True, "reward": True}, EnvironmentAnswer(done=True, reward=1.0)),
    ({"done": True, "reward": np.float32(0.5)}, EnvironmentAnswer(done=True, reward=0.5)),
    ({"append": "over", "done": True}, EnvironmentAnswer(append="over", done=True)),
    (
        {"append": "over", "done": True, "reward": 0.5},
        EnvironmentAnswer("", None, "over", True, 0.5),
    ),
]
REFUSED: list[tuple[Any, str]] = [
    (None, "step() returned None: an environment answers {'tool'"),
    ("done", "returned 'done': an environment answers"),
    (({"done": True},), "an environment answers"),
    ({}, "it neither ends nor goes on"),
    ({"done": False}, "it neither ends nor goes on"),
    ({"append": None}, "it neither ends nor goes on"),
    ({"done": 1}, "'done' is True or False, not 1"),
    ({"done": "yes"}, "'done' is True or False, not 'yes'"),
    ({"tool": "look", "done": True}, "'tool' goes with 'input' alone, not with 'done'"),
    ({"tool": "look", "append": "x"}, "'tool' goes with 'input' alone, not with 'append'"),
    ({"tool": "look", "reward": 0.0}, "'tool' goes with 'input' alone, not with 'reward'"),
    ({"tool": 5}, "'tool' is the name of a tool, not 5"),
    ({"tool": ""}, "'tool' is the name of a tool, not ''"),
    ({"input": 1, "append": "x"}, "'input' goes with 'tool'"),
    ({"append": "x", "reward": 1.0}, "'reward' goes with 'done': True"),
    ({"append": "x", "done": False, "reward": 0.0}, "'reward' goes with 'done': True"),
    ({"reward": 1.0}, "'reward' goes with 'done': True"),
    ({"done": True, "rewrad": 1.0}, "there is no key 'rewrad'"),
    ({"done": True, "reward": "1.0"}, "'reward' is a finite number, not '1.0', a str"),
    ({"done": True, "reward": [1.0]}, "'reward' is a finite number, not [1.0], a list"),
    ({"done": True, "reward": math.nan}, "'reward' must be finite, not nan"),
    ({"done": True, "reward": -math.inf}, "'reward' must be finite, not -inf"),
    ({"done": True, "reward": 10**400}, "'reward' must be finite"),
    ({"done": True, "reward": 1j}, "'reward' is a finite number, not 1j"),
]


def test_answers_are_taken_as_a_whole() -> None:
    for value, expected in TAKEN:
        assert call_for_answer(lambda text, value=value: value, "x") == expected, value


def test_answers_that_mix_what_does_not_go_together_are_refused_by_name() -> None:
    for value, says in REFUSED:

        def step(text: str, value: Any = value) -> Any:
            return value

        with pytest.raises(BadAnswer) as caught:
            call_for_answer(step, "x")
        assert says in str(caught.value), value


def test_one_rule_holds_for_numbers() -> None:
    for value in (1, True, 0.5, np.int64(2), np.float16(1), Fraction(1, 2), 1e300):
        assert finite_number(value, "it") == float(value)
    others: list[Any] = ["1", None, np.True_, [], Decimal(1), 1j, np.zeros(1)]
    for other in others:
        with pytest.raises(TypeError, match="it is a finite number"):
            finite_number(other, "it")


class Playing:
    """Answers what the class is told to; this file is the author's."""

    answer: Any = None

    def open(self, row: dict[str, Any]) -> Any:
        return row["prompt"]

    def step(self, text: str) -> Any:
        return self.answer

    def cut(self, text: str) -> Any:
        return "0.5"

    def close(self) -> None:
        return None


def test_a_bad_answer_is_told_at_the_line_of_the_authors_function(tmp_path: Path) -> None:
    served = Environments(
        Playing, qwen3_tokenizer(tmp_path), "", modules=str(Path(__file__).parent)
    )
    told = [
        served.perform(1, "begin", {"prompt": 5}),
        served.perform(1, "begin", {"prompt": "hi"}),
        served.perform(1, "step", [5]),
        served.perform(1, "cut", [5]),
    ]
    assert [status for status, _ in told] == ["raised", "ok", "raised", "raised"]
    for at, method in ((0, "open"), (2, "step"), (3, "cut")):
        text = told[at][1]
        assert text.startswith(f"{method}() returned") and f" in {method}())" in text
        assert " (test_actions.py:" in text


def test_a_last_observation_comes_with_the_end(tmp_path: Path) -> None:
    tokenizer = qwen3_tokenizer(tmp_path)
    served = Environments(Playing, tokenizer, "")
    served.perform(1, "begin", {"prompt": "hi"})
    Playing.answer = {"append": " over", "done": True, "reward": 0.5}
    status, (_, action, (ids, score)) = served.perform(1, "step", tokenizer.encode("x"))
    assert (status, action, tokenizer.decode(ids), score) == ("ok", "last", " over", 0.5)
