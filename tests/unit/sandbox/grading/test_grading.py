"""Rewards of texts, the calculator, answer extraction, and sums of rewards."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.api.sandbox import RewardPart
from meshrl.common.grading.answers import extract_answer, strip_reasoning
from meshrl.services.sandbox.grading.calculator import calculate
from meshrl.services.sandbox.grading.text_rewards import score_choice, score_exact, score_regex
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.loaded_job import sum_rewards
from meshrl.services.sandbox.outcomes import CallResult
from tests.load import scaled
from tests.unit.sandbox.grading.graders import grade, make_turns, on_shared_loop


@pytest.mark.parametrize(
    ("text", "options", "score"),
    [
        ("Paris", {}, 1.0),
        (" Paris\n", {}, 1.0),
        ("paris", {}, 0.0),
        ("paris", {"ignore_case": True}, 1.0),
        ("P a r i s", {"ignore_space": True}, 1.0),
        ("Paris<|end|>", {"strip": ["<|end|>"]}, 1.0),
        ("Paris!", {}, 0.0),
        ("", {}, 0.0),
    ],
)
def test_exact_reward(text: str, options: dict[str, Any], score: float) -> None:
    assert score_exact({"answer": "Paris"}, make_turns(text), options) == score


@pytest.mark.parametrize(
    ("text", "pattern", "score"),
    [
        ("so #42$", r"#\d+", 1.0),
        ("so 42", r"#\d+", 0.0),
        ("#41 #42", r"#(?P<answer>\d+)", 1.0),
        ("#42 #41", r"#(?P<answer>\d+)", 0.0),
        ("none", r"#(?P<answer>\d+)", 0.0),
    ],
)
def test_regex_reward(text: str, pattern: str, score: float) -> None:
    assert score_regex({"answer": 42}, make_turns(text), {"pattern": pattern}) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("B", 1.0),
        ("b.", 1.0),
        ("(B)", 1.0),
        ("The answer is B.", 1.0),
        ("Answer: **B**", 1.0),
        (r"\boxed{B}", 1.0),
        (r"\boxed{\text{(B)}}", 1.0),
        ("Not (A); the answer is (B).", 1.0),
        ("Not (B); the answer is (A).", 0.0),
        ("I do not know", 0.0),
        ("A B C D", 0.0),
        ("", 0.0),
    ],
)
def test_choice_reward(text: str, score: float) -> None:
    assert score_choice({"answer": "(b)"}, make_turns(text), {}) == score


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("2^10", "1024"),
        ("(1 + 2) / 4", "0.75"),
        ("-7 // 2", "-4"),
        ("sqrt(2) * sqrt(2)", "2"),
        ("max(3, 7, 5)", "7"),
        ("pi", "3.14159265359"),
        ("1/0", "error: division by zero"),
        ("9**9**9", "error: a number of over 4000 digits"),
        ("__import__('os')", "error: "),
        ("(lambda: 1)()", "error: "),
        ("'a' * 9", "error: "),
        ("open('x')", "error: no function open"),
        ("1 +", "error: "),
        ("(-1) ** 0.5", "error: not a real number"),
        ("(" * 600 + "1" + ")" * 600, "error: "),
        ("1 " * 600, "error: an expression is a text of at most"),
    ],
)
def test_calculator(expression: str, value: str) -> None:
    assert calculate(expression).startswith(value)


@given(st.text(alphabet="0123456789+-*/%^(). episqrt", max_size=40))
def test_calculator_always_returns_text(expression: str) -> None:
    assert isinstance(calculate(expression), str)


def test_answer_is_the_models_last_turn() -> None:
    turns = [*make_turns("first"), {"role": "tool", "value": 1}, *make_turns("last$$")]
    assert extract_answer(turns, {"strip": "$"}) == "last"
    assert extract_answer(turns[:2], {}) == "first", "a tool may end a trajectory"
    assert extract_answer(turns[1:2], {}) is None
    assert extract_answer([], {}) is None


TRUNCATED_TURN: dict[str, Any] = {"role": "model", "text": "8", "stop": "", "truncated": True}
NO_ANSWERS = [
    [TRUNCATED_TURN],
    [TRUNCATED_TURN | {"text": "7; so 8;", "stop": ";"}, {"role": "tool", "value": 1}],
    make_turns("<think>8"),
    make_turns("[THINK]8"),
    make_turns("<think>7</think><think>8"),
    [],
]
ANSWERS = {
    "8": "8",
    "<think>7</think>8": "8",
    "7</think>\n\n8": "8",
    "<think>7</think>\n<think>6</think>8": "8",
    "[THINK]7[/THINK]8": "8",
    "<|channel|>analysis<|message|>7<|end|><|channel|>final<|message|>8": "8",
    "<think>it says `</think>`, then 7</think>8": "8",
}


def test_all_rewards_extract_the_same_answer() -> None:
    """Check that all rewards agree on the answer of a trajectory; for judges, see test_judge.py."""
    row = {"answer": 8}
    for turns in NO_ANSWERS:
        assert extract_answer(turns, {}) is None, turns
        assert score_exact(row, turns, {}) == score_regex(row, turns, {"pattern": ""}) == 0.0, turns
        assert score_choice({"answer": "A"}, turns, {}) == 0.0
    for text, answer in ANSWERS.items():
        assert strip_reasoning(text) == answer, text
        assert score_exact(row, make_turns(text), {}) == 1.0, text
        assert score_regex(row, make_turns(text), {"pattern": "^(?P<answer>.)$"}) == 1.0, text
        assert score_regex(row, make_turns(text), {"pattern": "7"}) == 0.0, "reasoning is no answer"
    last = TRUNCATED_TURN | {"text": "8;", "stop": ";"}
    assert score_exact(row, [last], {}) == 1.0, "the last of max_turns is whole"


def test_pattern_with_reasoning_tags_searches_the_whole_turn() -> None:
    pattern = r"^<think>.+</think>\s*<answer>.+</answer>$"
    turns = make_turns("<think>7 + 1</think>\n<answer>8</answer>")
    assert score_regex({}, turns, {"pattern": pattern}) == 1.0
    assert score_regex({}, make_turns("<answer>8</answer>"), {"pattern": pattern}) == 0.0
    assert score_regex({}, make_turns("<think>I think 8</think>7"), {"pattern": "think 8"}) == 0.0


def test_reward_sum_is_rounded_once_and_finite() -> None:
    results = [CallResult("ok", 1.0, "")] * 3
    assert sum_rewards(make_parts(0.7, 0.2, 0.1), results).value["reward"] == 1.0
    tenths = make_parts(*[0.1] * 10)
    assert sum_rewards(tenths, [CallResult("ok", 1.0, "")] * 10).value["reward"] == 1.0
    for weights in ([1e308, 1e308, 1.0], [2.0, -2.0, 1.0]):
        large_results = [
            CallResult("ok", 1.7e308, ""),
            CallResult("ok", 1.7e308, ""),
            CallResult("ok", 1.0, ""),
        ]
        total = sum_rewards(make_parts(*weights), large_results)
        assert (total.status, total.value) == ("bad_value", None)
        assert "not finite" in total.error


def test_reward_sum_needs_every_part() -> None:
    results = [CallResult("ok", 1.0, ""), CallResult("ok", 0.5, "")]
    assert sum_rewards(make_parts(1.0, -0.5), results).value["reward"] == 0.75
    failed_result = CallResult("timeout", None, "late")
    assert sum_rewards(make_parts(1.0, 0.0), [results[0], failed_result]) is failed_result


def test_parts_of_a_sum_are_metrics_with_their_own() -> None:
    parts = [RewardPart("a:right"), RewardPart("b:right", 0.5), RewardPart("math", 0.0)]
    answers: list[Any] = [1.0, {"reward": 0.5, "metrics": {"length": 7.0}}, 0.0]
    total = sum_rewards(parts, [CallResult("ok", answer, "") for answer in answers])
    assert total.value == {
        "reward": 1.25,
        "metrics": {"right": 1.0, "right_2": 0.5, "math": 0.0, "right_2/length": 7.0},
    }
    alone = sum_rewards(parts[:1], [CallResult("ok", answers[1], "")])
    assert alone.value == answers[1]
    assert sum_rewards(parts[:1], [CallResult("ok", 1.0, "")]).value == 1.0


def make_parts(*weights: float) -> list[RewardPart]:
    return [RewardPart("exact", weight) for weight in weights]


def make_identity_tests(count: int) -> tuple[dict[str, Any], str]:
    """Return tests of a function `f` that returns its argument, as cases and in Python."""
    cases = [{"args": [x], "output": x} for x in range(count)]
    python = "".join(f"def test_{x}():\n    assert f({x}) == {x}\n" for x in range(count))
    return {"function": "f", "cases": cases}, "from solution import f\n" + python


@on_shared_loop
@pytest.mark.needs("bwrap")
async def test_invalid_tests_give_an_error_and_no_score(launcher: JailLauncher) -> None:
    source = "def f(x):\n    return x"
    for tests in (
        "def test_f(:",
        "x = 1",
        [],
        {"function": "f"},
        {"function": "f", "cases": []},
        [{"input": "x"}],
        None,
    ):
        answer = await grade(launcher, tests, source)
        assert answer.status in ("bad_value", "raised") and answer.value is None, (tests, answer)
    unsupported = await grade(launcher, "import missing_module\ndef test_f(): pass", source)
    assert unsupported.status == "unsupported" and "missing_module" in unsupported.error
    for tests, score in (
        ("from solution import g\ndef test_g(): pass", 0.0),
        ("from solution import f\ndef test_f():\n    assert f(2) == 2", 1.0),
    ):
        assert (await grade(launcher, tests, source)).value == score


@on_shared_loop
@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap")
async def test_hanging_or_crashing_case_fails_alone(launcher: JailLauncher) -> None:
    source = "def f(x):\n    if x == 2:\n        while True: pass\n    if x == 3:\n"
    source += "        import os; os._exit(0)\n    return x"
    for tests in make_identity_tests(5):
        answer = await grade(launcher, tests, source, case_s=min(2.0, scaled(0.5)))
        assert answer == CallResult("ok", 0.6, "")


@on_shared_loop
@pytest.mark.deep
@pytest.mark.needs("bwrap")
async def test_limits_apply_to_each_case(launcher: JailLauncher) -> None:
    source = "import time\ndef f(x):\n    end = time.process_time() + 0.2\n"
    source += "    while time.process_time() < end: pass\n    return x"
    for tests in make_identity_tests(5):
        answer = await grade(launcher, tests, source, case_s=min(0.8, scaled(0.35)))
        assert answer == CallResult("ok", 1.0, "")


@on_shared_loop
@pytest.mark.needs("bwrap")
async def test_score_without_partial_credit_is_zero_or_one(launcher: JailLauncher) -> None:
    options: dict[str, Any] = {"partial": False, "prefix": "def f(x): "}
    cases = [{"args": [x], "output": x * 2} for x in (0, 1, 2)]
    for source, score in (("return x + x", 1.0), ("return x * x", 0.0)):
        tests = {"function": "f", "cases": cases}
        assert (await grade(launcher, tests, source, **options)).value == score


@on_shared_loop
@pytest.mark.needs("bwrap")
async def test_program_that_exits_between_cases_scores_zero(launcher: JailLauncher) -> None:
    source = "import os, threading\nthreading.Timer(0.05, os._exit, [0]).start()\n"
    source += "def f(x):\n    import time\n    time.sleep(0.2)\n    return x"
    for tests in make_identity_tests(4):
        assert await grade(launcher, tests, source, case_s=1.0) == CallResult("ok", 0.0, "")


FORGED = """
import pytest
from solution import GCD, Maths, Vector

def test_attribute(): assert Maths.gcd(12, 8) == 4
def test_call(): assert GCD(12, 8) == 4
def test_order(): assert 3 < GCD(12, 8) < 5
def test_close(): assert abs(GCD(12, 8) - 4) < 1e-6
def test_product(): assert Vector(1, 2) * Vector(3, 4) == 11
def test_equal(): assert Vector(1, 2) + Vector(3, 4) == Vector(4, 6)
def test_raises():
    with pytest.raises(TypeError):
        Vector(1)
"""
VECTORS = """
class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, other): return Vector(self.x + other.x, self.y + other.y)
    def __mul__(self, other): return self.x * other.x + self.y * other.y
    def __eq__(self, other): return (self.x, self.y) == (other.x, other.y)
class Maths:
    @staticmethod
    def gcd(a, b): return a if not b else Maths.gcd(b, a % b)
GCD = Maths.gcd
"""
YES = """
class Yes:
    def __init__(self, *a): pass
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = lambda *a: True
    __add__ = __mul__ = lambda self, *a: self
    __sub__ = __abs__ = lambda self, *a: 0
class Maths:
    gcd = staticmethod(Yes)
GCD = Vector = Yes
"""


@on_shared_loop
@pytest.mark.needs("bwrap")
async def test_equality_of_a_class_under_test_is_used_only_if_correct(
    launcher: JailLauncher,
) -> None:
    assert (await grade(launcher, FORGED, VECTORS)).value == 1.0
    assert (await grade(launcher, FORGED, YES)).value == 0.0


@on_shared_loop
@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap")
@pytest.mark.parametrize(
    ("tests", "source"),
    [
        ({"function": "f", "cases": [{"args": [], "output": 1.5}]}, "def f(): return 10**400"),
        ({"function": "f", "cases": [{"args": [], "output": 1}]}, "def f(): return [[]] * 10**7"),
        (
            "from solution import make\nCFG = make()\nX = CFG['a']\ndef test_x(): assert X == 1",
            "def make(): return None",
        ),
        (
            "import pytest\nfrom solution import pairs\n"
            "@pytest.mark.parametrize('x', pairs())\ndef test_x(x): assert x",
            "def pairs(): return []",
        ),
        (
            "from solution import f\ndef test_f(): assert f() == 1",
            "import os, sys\nframes = sys.modules['jail.wire.frames']\n"
            "frames.send = lambda fd, value: os.write(fd, b'\\xa0\\x0f\\0\\0' + b'[' * 4000)\n"
            "def f(): return 1",
        ),
        (
            "from solution import f\ndef test_f(): assert f() == 1",
            "import sys\nframes = sys.modules['jail.wire.frames']\nsend = frames.send\n"
            "frames.send = lambda fd, value: send(fd, ['do'])\ndef f(): return 1",
        ),
        (
            {"function": "f", "cases": [{"args": [], "output": 1}]},
            "import ctypes, time\nctypes.CDLL(None).prctl(15, b'\\xff\\xfe')\n"
            "def f(): time.sleep(60)",
        ),
    ],
    ids=["huge", "wide", "module", "parameters", "deep frame", "odd frame", "odd name"],
)
async def test_wrong_answer_scores_zero_instead_of_causing_an_error(
    launcher: JailLauncher, tests: Any, source: str
) -> None:
    assert await grade(launcher, tests, source, case_s=1.0) == CallResult("ok", 0.0, "")


@on_shared_loop
@pytest.mark.needs("bwrap")
async def test_methods_sets_and_fast_input_are_graded(launcher: JailLauncher) -> None:
    source = "class Solution:\n    def __init__(self): self.seen = set()\n"
    source += "    def f(self, x):\n        self.seen |= {x, 10}\n        return self.seen"
    cases = [{"args": [2], "output": [2, 10]}, {"args": [3], "output": [3, 10]}]
    row: dict[str, Any] = {"tests": {"function": "Solution.f", "cases": cases}}
    assert (await grade(launcher, row["tests"], source)).value == 1.0
    source = (
        "import sys\ninput = sys.stdin.buffer.readline\nprint(sum(1 for _ in iter(input, b'')))"
    )
    row = {"tests": [{"input": "line of words\n" * 100_000, "output": "100000"}]}
    assert (await grade(launcher, row["tests"], source)).value == 1.0


@on_shared_loop
@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap")
async def test_grading_stops_early_if_every_case_hangs(launcher: JailLauncher) -> None:
    cases = [{"input": "", "output": str(x)} for x in range(200)]
    before = launcher.started_count
    answer = await grade(launcher, cases, "while True: pass", case_s=0.1)
    assert answer == CallResult("ok", 0.0, "")
    assert launcher.started_count - before <= 8
