"""Equality of texts and JSON values, and the part of an answer that is compared."""

from __future__ import annotations

import ast
import json
import math
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.grading.answers import strip_reasoning
from meshrl.services.sandbox.grading.code.comparison import Tolerance, is_equal, is_same_text
from meshrl.services.sandbox.grading.code.program_extraction import extract_program, prepend
from meshrl.services.sandbox.grading.text_rewards import score_choice
from meshrl.services.sandbox.jail.wire import plain_data

NUMBERS = st.floats(allow_nan=False) | st.integers()
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
SMALL = st.floats(0.0, 1e-2)


@pytest.mark.parametrize(
    ("result", "expected", "equal"),
    [
        ("5000001.0", "5000000", False),
        ("5000001.0", "5000000.0", False),
        ("5000001", "5000000.0", False),
        ("5.0", "5", False),
        ("5", "5.0", True),
        ("05", "5", False),
        ("+5", "5", False),
        ("-0", "0", False),
        ("-0.0", "0.0", True),
        ("1.9999999999", "2.0", True),
        ("0.333333", "0.3333333333333333", True),
        ("0.33333", "0.3333333333333333", False),
        ("1e5", "100000.0", True),
        ("100000", "1e5", True),
        ("1e5", "100000", False),
        ("1e-12", "0.0", True),
        ("1e-8", "0.0", False),
        ("nan", "0.5", False),
        ("nan", "nan", True),
        ("inf", "inf", True),
        ("inf", "-inf", False),
        ("inf", "1e308", False),
        ("1_000.5", "1000.5", False),
        ("٣.5", "3.5", False),
        ("yes", "YES", False),
        ("Ω ≠ o", "Ω ≠ o", True),
        ("1 2\r\n3 \n", "1 2\n3", True),
        ("12", "1 2", False),
        ("", " \n", True),
        ("0.5 7", "0.5", False),
        ("3.14.15", "3.14.15", True),
        ("3.14.16", "3.14.15", False),
        ("9" * 4000 + ".5", "9" * 4000 + ".0", False),
    ],
)
def test_texts_are_compared_word_by_word(result: str, expected: str, equal: bool) -> None:
    assert is_same_text(result, expected, Tolerance()) is equal


@pytest.mark.parametrize(
    ("result", "expected", "equal"),
    [
        (5.0, 5, True),
        (5000001.0, 5000000, False),
        (5000001.0, 5000000.0, False),
        (5000001, 5000000.0, False),
        (5000000.4, 5000000.0, True),
        (round(((1 + 5**0.5) / 2) ** 80 / 5**0.5), 23416728348467685, False),  # Binet's formula
        (3.0000000000000004, 3, False),
        (float(2**70 + 1), 2**70 + 1, False),
        (1e17 * (1 + 1e-15), 1e17, True),
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
        (-math.inf, math.inf, False),
        (10**400, 1.5, False),
        ("5", 5, False),
        (None, 0, False),
        ([], {}, False),
    ],
)
def test_values_are_compared_by_type(result: Any, expected: Any, equal: bool) -> None:
    assert is_equal(plain_data.to_jsonable(result), expected, Tolerance()) is equal


@settings(max_examples=50)
@given(VALUES)
def test_value_equals_itself_after_serialization(value: Any) -> None:
    assert is_equal(plain_data.to_jsonable(value), value, Tolerance(0.0, 0.0))


@settings(max_examples=50)
@given(VALUES, VALUES, SMALL, SMALL)
def test_only_values_of_one_kind_are_equal(
    a: Any, b: Any, relative: float, absolute: float
) -> None:
    def same_kind(x: Any, y: Any) -> bool:
        numbers = (int, float)
        if type(x) in numbers and type(y) in numbers:
            return True
        return type(x) is type(y)

    result = is_equal(plain_data.to_jsonable(a), b, Tolerance(relative, absolute))
    if result:
        assert same_kind(a, b)
    if type(a) is type(b) is float:
        assert result == is_equal(b, a, Tolerance(relative, absolute))


@given(NUMBERS, NUMBERS, SMALL, SMALL, SMALL, SMALL)
def test_wider_tolerance_accepts_everything_a_narrow_one_does(
    a: float,
    b: float,
    relative: float,
    absolute: float,
    extra_relative: float,
    extra_absolute: float,
) -> None:
    narrow = Tolerance(relative, absolute)
    wide = Tolerance(relative + extra_relative, absolute + extra_absolute)
    assert is_equal(plain_data.to_jsonable(a), b, wide) or not is_equal(
        plain_data.to_jsonable(a), b, narrow
    )
    assert is_same_text(str(a), str(b), wide) or not is_same_text(str(a), str(b), narrow)


@given(st.integers(), st.integers())
def test_integers_are_exact_at_any_tolerance(a: int, b: int) -> None:
    wide = Tolerance(1.0, 1e30)
    assert is_equal(plain_data.to_jsonable(a), b, wide) == (a == b)
    assert is_same_text(str(a), str(b), wide) == (a == b)


@given(st.integers(), st.floats(0.999, 1.001))
def test_rounded_float_does_not_equal_an_integer(a: int, factor: float) -> None:
    try:
        result = a * factor
    except OverflowError:
        return
    assert is_equal(result, a, Tolerance()) == (result == a)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_all_spellings_of_a_float_are_equal(value: float) -> None:
    spellings = (f"{value!r}", f"{value:.17g}", f"{value:.17e}", f"{value:+.20E}")
    for expected in (repr(value), f"{value:.17e}"):
        assert all(is_same_text(result, expected, Tolerance()) for result in spellings)


ROWS = tomllib.loads((Path(__file__).parent / "programs.toml").read_text())
READS, F, FENCED = (ROWS["blocks"][name] for name in ("READS", "F", "FENCED"))


def read_programs(kind: str) -> list[tuple[str, str]]:
    """Return the answers of a kind with their programs, each with its blocks in it."""

    def expand_blocks(text: str) -> str:
        for name, block in ROWS["blocks"].items():
            text = text.replace(f"@{name}@", block)
        return text

    return [(expand_blocks(row["text"]), expand_blocks(row["program"])) for row in ROWS[kind]]


@pytest.mark.parametrize(("text", "program"), read_programs("prints"))
def test_last_block_that_is_a_program_is_extracted(text: str, program: str) -> None:
    assert extract_program(strip_reasoning(text) or "", reads_stdin=True) == program


@pytest.mark.parametrize(("text", "program"), read_programs("defines"))
def test_last_block_that_defines_the_required_name_is_extracted(text: str, program: str) -> None:
    assert extract_program(text, required_names={"f"}) == program


def test_class_that_defines_the_required_method_is_extracted() -> None:
    method = F.replace("\n", "\n    ")
    text = f"```python\nclass Solution:\n    {method}\n```\n"
    assert "class Solution" in extract_program(text, required_names={"f"})


def test_block_with_all_required_names_precedes_partial_blocks() -> None:
    both = f"class A: pass\n{F}"
    text = f"```python\n{both}```\nThe second again:\n```python\n{F}```\n"
    assert extract_program(text, required_names={"A", "f"}) == both
    assert extract_program(text, required_names={"f"}) == F


def test_prefix_is_parsed_with_the_program() -> None:
    text = "```python\n    return x + 1\n```\nprints\n```\n5\n```"
    assert extract_program(text, prefix="def f(x):\n", required_names={"f"}) == "    return x + 1\n"


@pytest.mark.parametrize(
    "program",
    [
        f"from __future__ import annotations\n{F}",
        f'"""Doc."""\n# so\nfrom __future__ import (\n    annotations,\n    division,\n)\n{F}',
        f"from __future__ import division; import sys\nfrom __future__ import annotations\n{F}",
        f"TEXT = '__future__'\n{F}",
    ],
)
@pytest.mark.parametrize("prefix", ["import math\n", "from __future__ import generators\nx = 1\n"])
def test_prefix_is_inserted_after_future_imports(prefix: str, program: str) -> None:
    result: dict[str, Any] = {}
    source = prepend(prefix, extract_program(f"```python\n{program}```", prefix, {"f"}))
    exec(compile(source, "main.py", "exec", dont_inherit=True), result)
    assert result["f"](1) == 2 and source.endswith(F)
    assert extract_program(f"```python\n{program}```\n```\nx = 5\n```", prefix, {"f"}) == program


PROGRAMS = st.sampled_from(
    [
        READS,
        FENCED,
        "import sys\nfor line in sys.stdin:\n    print(line)\n",
        "s = '```'\nprint(s * int(input()))\n",
        "def main():\n    '''\n    ~~~\n    Reads.\n    ~~~\n    '''\n    print(input())\nmain()\n",
        "print(r'''\n```\nin\n```\nbetween\n~~~~\n''', input())\n",
        "if True:\n\n\tprint(input(), '</think>')\n",
    ]
)
PROSE = st.sampled_from(
    ["", "Let me see.", "It's O(n).", "Use `print` here:", "* a list\n* of `x = 1`", "> quoted"]
)
NOISE = st.sampled_from(
    ["", "```\n5\n```", "```text\nprint(1)\n```", "```\n1 2 3\n```", "~~~json\n{}\n~~~", "`5`"]
)
FENCES = st.sampled_from(["```", "~~~", "`````", "~~~~~~"])
TAGS = st.sampled_from(["python", "py", "Python", "python3", 'python title="a b"', ""])
INDENTS = st.sampled_from(["", "  ", "   "])


@settings(max_examples=50)
@given(PROGRAMS, PROSE, NOISE, PROSE, NOISE, FENCES, TAGS, INDENTS, st.booleans())
def test_program_in_markdown_is_extracted_from_any_surroundings(
    program: str,
    before: str,
    noise: str,
    after: str,
    more_noise: str,
    fence: str,
    tag: str,
    indent: str,
    crlf: bool,
) -> None:
    block = "".join(
        indent + line if line.strip() else line
        for line in f"{fence}{tag}\n{program}{fence}\n".splitlines(keepends=True)
    )
    text = "\n\n".join([before, noise, block, after, more_noise])
    result = extract_program(text.replace("\n", "\r\n") if crlf else text, reads_stdin=True)
    assert ast.dump(ast.parse(result)) == ast.dump(ast.parse(program)) or indent
    assert compile(result, "result", "exec").co_names == compile(program, "as", "exec").co_names


@given(st.text(alphabet="`~\n pf(x)='\"1:", max_size=200))
def test_extraction_accepts_any_text(text: str) -> None:
    assert isinstance(extract_program(text, required_names={"f"}), str)


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    "text",
    [
        "```\n" * 50_000,
        "```python\n" * 30_000,
        "```python\n" + "x = (\n```\n" * 30_000,
        "```python\n" + "(" * 100_000,
        "`" * 200_000,
        " " * 200_000 + "```",
        "a ```" * 50_000,
        "</think>" * 30_000,
        "```\n" + "x = 1\n" * 100_000 + "```\n" + "```\nprint()\n```\n" * 1000,
        "\n".join("`" * k for k in range(600, 3, -1)),
        "<a>" * 70_000 + "\n" + "```" + " " * 100_000 + "<a> " * 20_000,
    ],
    ids=range(11),
)
def test_hostile_text_is_parsed_quickly(text: str) -> None:
    start_s = time.thread_time()
    extract_program(strip_reasoning(text) or "", reads_stdin=True)
    assert time.thread_time() - start_s < 3.0


TABLES = Path(__file__).parent / "texts"
MIN_ROWS = 150
MAX_REJECTED = 0.01  # share of right answers that may be scored 0

Reward = Callable[[dict[str, Any], list[dict[str, Any]], dict[str, Any]], float]


def check_table(name: str, reward: Reward) -> None:
    """Check that no wrong answer of a table is accepted and hardly any right one rejected."""
    rows = [json.loads(line) for line in (TABLES / name).read_text("utf-8").splitlines()]
    right = [row for row in rows if row["expected"]]
    assert len(rows) >= MIN_ROWS and 0.3 < len(right) / len(rows) < 0.8
    accepted: list[tuple[str, str]] = []
    rejected: list[tuple[str, str]] = []
    for row in rows:
        score = reward({"answer": row["gold"]}, [{"role": "model", "text": row["text"]}], {})
        if score != row["expected"]:
            (accepted if score else rejected).append((row["text"], row["gold"]))
    assert accepted == []
    assert len(rejected) <= MAX_REJECTED * len(right), rejected


def test_choice_reward_accepts_only_right_letters_in_all_formats() -> None:
    check_table("choice.jsonl", score_choice)


@pytest.mark.group("maths")  # sympy is imported by one worker
def test_math_reward_accepts_only_right_answers_in_all_formats() -> None:
    from meshrl.services.sandbox.grading.mathematics import math_reward

    check_table("math.jsonl", math_reward.compute_reward)


HOSTILE = [
    "选" * 20_000,
    "<answer>" * 12_000,
    "the answer is " * 7_000,
    r"\boxed{" * 14_000,
    "(A" * 50_000,
    " " * 100_000,
    "A is " * 4_000,
    "answer" + " " * 19_000,
]


def test_hostile_text_has_no_choice_and_is_parsed_quickly() -> None:
    start_s = time.thread_time()
    for text in HOSTILE:
        assert score_choice({"answer": "B"}, [{"role": "model", "text": text}], {}) == 0.0
    assert time.thread_time() - start_s < 3.0
