"""Answers whose worth is known are graded right: maths pairs, and programs with their tests."""

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

KNOWN = Path(__file__).parents[3] / "known"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (KNOWN / name).read_text().splitlines()]


MATHS = rows("maths.jsonl")
CODING = rows("coding.jsonl")


@pytest.mark.rotating(4)
@pytest.mark.group("maths")  # sympy is imported by one worker
@pytest.mark.parametrize("family", sorted({row["family"] for row in MATHS}))
def test_maths_pairs_are_graded_right(family: str) -> None:
    from meshrl.services.sandbox.grading.mathematics.math_reward import is_equal

    pairs = [row for row in MATHS if row["family"] == family]
    assert len(pairs) >= 15
    said = [(row, strip_reasoning(row["answer"])) for row in pairs]
    wrong = [
        row
        for row, text in said
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
def test_golds_and_answers_as_people_write_them(gold: str, answer: str, right: bool) -> None:
    from meshrl.services.sandbox.grading.mathematics.math_reward import is_equal

    said = strip_reasoning(answer)
    assert (said is not None and is_equal(gold, said)) is right


def test_there_are_pairs_of_both_kinds() -> None:
    assert len(MATHS) >= 200
    assert 0.3 < sum(row["right"] for row in MATHS) / len(MATHS) < 0.7


ENDLESS = [
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
# A process for each, as an answer may end it; they share the imports.
TELLS = """
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
def told() -> list[str]:
    """What each endless answer came to, once all have ended by themselves."""
    done = subprocess.run(
        [sys.executable, "-c", TELLS],
        input=json.dumps(ENDLESS),
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=scaled(100),
    )
    found = done.stdout.splitlines()
    assert len(found) == len(ENDLESS), done.stderr
    return found


@pytest.mark.deep
@pytest.mark.group("endless answers")
@pytest.mark.parametrize("place", range(len(ENDLESS)), ids=[answer[:20] for answer in ENDLESS])
def test_an_answer_that_takes_for_ever_is_soon_wrong(told: list[str], place: int) -> None:
    assert told[place] == "False"


@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap")
@pytest.mark.parametrize("style", ["stdin", "calls", "pytest"])
async def test_programs_are_graded_right(launcher: JailLauncher, style: str) -> None:
    grading = CodeGrader(launcher, JailSlots(SystemClock(), 4), JailLimits(), {})

    async def graded(row: dict[str, Any], source: str) -> Any:
        text = f"I think so:\n```python\n{source}\n```\nThat is it."
        turns = [{"role": "model", "text": text}]
        answer = await grading.compute_reward({"tests": row["tests"]}, turns)
        assert answer.status == "ok", (row["name"], answer)
        return answer.value

    problems = [row for row in CODING if row["style"] == style]
    assert len(problems) >= 16
    right = await asyncio.gather(*(graded(row, row["right"]) for row in problems))
    scores = dict(zip((row["name"] for row in problems), right, strict=True))
    assert scores == dict.fromkeys(scores, 1.0)
    subtly = [(row, source) for row in problems for source in row["wrong"]]
    assert len(subtly) == 2 * len(problems)
    partly = await asyncio.gather(*(graded(row, source) for row, source in subtly))
    unjust = [
        (row["name"], score)
        for (row, _), score in zip(subtly, partly, strict=True)
        if not 0 < score < 1
    ]
    assert unjust == []


def test_there_are_fifty_coding_problems() -> None:
    assert len(CODING) >= 50
    assert len(Counter(row["name"] for row in CODING)) == len(CODING)


@pytest.mark.parametrize(
    ("found", "wanted", "equal"),
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
def test_values_are_compared_as_json(found: Any, wanted: Any, equal: bool) -> None:
    assert is_equal(found, wanted, Tolerance()) is equal
