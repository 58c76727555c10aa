"""Grading of answers with known results: maths pairs, and programs with their tests."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.grading.answers import strip_reasoning
from meshrl.services.sandbox.grading.code.code_reward import CodeGrader
from meshrl.services.sandbox.grading.code.comparison import Tolerance, is_equal
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.resources.limits import JailLimits
from meshrl.services.sandbox.isolation.resources.slots import JailSlots
from tests.load import scaled
from tests.unit.sandbox.grading.graders import on_shared_loop

KNOWN = Path(__file__).parents[3] / "known"


def read_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (KNOWN / name).read_text().splitlines()]


MATHS = read_rows("maths.jsonl")
CODING = read_rows("coding.jsonl")


@pytest.mark.rotating(8)
@pytest.mark.group("maths")  # sympy is imported by one worker
@pytest.mark.parametrize("family", sorted({row["family"] for row in MATHS}))
def test_maths_pairs_are_graded_correctly(family: str) -> None:
    from meshrl.services.sandbox.grading.mathematics.math_reward import is_equal

    pairs = [row for row in MATHS if row["family"] == family]
    assert len(pairs) >= 15
    answers = [(row, strip_reasoning(row["answer"])) for row in pairs]
    wrong = [
        row
        for row, text in answers
        if (text is not None and is_equal(row["gold"], text)) != row["right"]
    ]
    assert wrong == []


@pytest.mark.group("maths")
@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("yes", "Yes.", True),
        ("yes", "No.", False),
        ("no", "**No**", True),
        ("even", "Even.", True),
        ("even", "odd", False),
        ("1 1/2", r"\boxed{\frac32}", True),
        ("1 1/2", r"\boxed{\frac12}", False),
        ("-1 1/2", r"\boxed{-1.5}", True),
        ("1 1/2", "It is 1 1/2.", True),
        ("1 1/2", "1 1/2", True),
        ("3/2", r"\boxed{1 1/2}", True),
        (r"6.63 \times 10^{-34}", "6.63 x 10^-34", True),
        (r"6.63 \times 10^{-34}", "It is 6.63 × 10^(-34).", True),
        (r"6.63 \times 10^{-34}", "6.63 x 10^-33", False),
        ("8", r"<think>\boxed{8}", False),
        ("8", r"<think>7</think>\boxed{8}", True),
    ],
)
def test_common_notations_of_golds_and_answers_are_graded(
    gold: str, answer: str, right: bool
) -> None:
    from meshrl.services.sandbox.grading.mathematics.math_reward import is_equal

    stripped = strip_reasoning(answer)
    assert (stripped is not None and is_equal(gold, stripped)) is right


def test_maths_pairs_include_right_and_wrong_answers() -> None:
    assert len(MATHS) >= 200
    assert 0.3 < sum(row["right"] for row in MATHS) / len(MATHS) < 0.7


ENDLESS_ANSWERS = [
    r"\boxed{1000000!}",
    r"\boxed{10^{10^9}}",
    r"\boxed{\binom{10^9}{10^8}}",
    r"\boxed{\prod_{k=1}^{10^8} k}",
    r"\boxed{" + "(" * 400 + "7" + ")" * 400 + "}",
    r"\boxed{" + "{" * 5000 + "}" * 5000 + "}",
    r"\boxed{__import__('os').system('echo gone')}",
    r"\boxed{" * 4000,
    "9" * 200_000,
    "7 " * 40_000,
    r"\boxed{\int_0^{\infty} \frac{x^{99}}{e^x-1} \sin(x^x) dx}",
]
# One process per answer, as an answer may end it; they share the imports.
GRADE_EACH_PROGRAM = """
import json, os, sys
from meshrl.services.sandbox.grading.mathematics import math_reward
math_reward.PAIR_CPU_LIMIT_S = 0.5
for answer in json.load(sys.stdin):
    if os.fork() == 0:
        print(math_reward.is_equal("8", answer), flush=True)
        os._exit(0)
    if os.wait()[1]:
        print("ended", flush=True)
"""


@pytest.fixture(scope="module")
def endless_results() -> list[str]:
    """Return the result of each endless answer, once all processes have ended."""
    completed = subprocess.run(
        [sys.executable, "-c", GRADE_EACH_PROGRAM],
        input=json.dumps(ENDLESS_ANSWERS),
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=scaled(100),
    )
    lines = completed.stdout.splitlines()
    assert len(lines) == len(ENDLESS_ANSWERS), completed.stderr
    return lines


@pytest.mark.deep
@pytest.mark.group("endless answers")
@pytest.mark.parametrize(
    "index", range(len(ENDLESS_ANSWERS)), ids=[answer[:20] for answer in ENDLESS_ANSWERS]
)
def test_endless_answer_is_graded_wrong_in_time(endless_results: list[str], index: int) -> None:
    assert endless_results[index] == "False"


@on_shared_loop
@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap")
@pytest.mark.parametrize("style", ["stdin", "calls", "pytest"])
async def test_programs_are_graded_correctly(launcher: JailLauncher, style: str) -> None:
    grader = CodeGrader(launcher, JailSlots(SystemClock(), 4), JailLimits(), {})

    async def grade(row: dict[str, Any], source: str) -> Any:
        text = f"I think so:\n```python\n{source}\n```\nThat is it."
        turns = [{"role": "model", "text": text}]
        answer = await grader.compute_reward({"tests": row["tests"]}, turns)
        assert answer.status == "ok", (row["name"], answer)
        return answer.value

    problems = [row for row in CODING if row["style"] == style]
    assert len(problems) >= 16
    right = await asyncio.gather(*(grade(row, row["right"]) for row in problems))
    scores = dict(zip((row["name"] for row in problems), right, strict=True))
    assert scores == dict.fromkeys(scores, 1.0)
    subtle_errors = [(row, source) for row in problems for source in row["wrong"]]
    assert len(subtle_errors) == 2 * len(problems)
    partial_scores = await asyncio.gather(*(grade(row, source) for row, source in subtle_errors))
    wrong_scores = [
        (row["name"], score)
        for (row, _), score in zip(subtle_errors, partial_scores, strict=True)
        if not 0 < score < 1
    ]
    assert wrong_scores == []


def test_coding_set_has_fifty_problems() -> None:
    assert len(CODING) >= 50
    assert len(Counter(row["name"] for row in CODING)) == len(CODING)


@pytest.mark.parametrize(
    ("result", "expected", "equal"),
    [
        (2, 2.0, True),
        (0.1 + 0.2, 0.3, True),
        (1, True, False),
        (False, 0, False),
        ([1, 2.0], [1.0, 2], True),
        ([1], [1, 2], False),
        ({"a": [1]}, {"a": [1.0]}, True),
        ({"a": 1}, {"b": 1}, False),
        ("1", 1, False),
        (None, None, True),
        (None, 0, False),
    ],
)
def test_values_are_compared_as_json(result: Any, expected: Any, equal: bool) -> None:
    assert is_equal(result, expected, Tolerance()) is equal
