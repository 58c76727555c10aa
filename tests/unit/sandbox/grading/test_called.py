"""Comparison of a function's results across a jail's border, as Python would compare them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from meshrl.common.grading.cases import (
    MAX_DEPTH,
    MAX_DIGITS,
    FunctionTests,
    InvalidTests,
    StdioTests,
    find_required_names,
    parse_tests,
)
from meshrl.common.grading.isolated_support import UnsupportedTests
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from tests.unit.sandbox.grading.graders import BatchGrader, on_shared_loop, read_rows

RETURNS: dict[str, tuple[Any, str, float]] = {  # (expected, the body of f, score)
    "float for int": (5, "return 5.0", 1.0),
    "other float for int": (5000000, "return 5000001.0", 0.0),
    "almost int": (3, "return 3.0000000000000004", 0.0),
    "int for float": (5.0, "return 5", 1.0),
    "rounded": (0.3, "return 0.1 + 0.2", 1.0),
    "text for int": (5, "return '5'", 0.0),
    "true for 1": (1, "return True", 0.0),
    "tuple": ([1, [2, 3]], "return 1, (2, 3)", 1.0),
    "named tuple": ([1, 2], "import collections as c\n return c.namedtuple('P', 'x y')(1, 2)", 1.0),
    "set": ([1, 2, 3], "return {3, 1, 2}", 1.0),
    "set that lost the order": ([3, 1, 2], "return {3, 1, 2}", 0.0),
    "keys": ({"1": "a", "2": "b"}, "return {1: 'a', 2: 'b'}", 1.0),
    "keys that collide": ({"1": "b"}, "return {1: 'a', '1': 'b'}", 0.0),
    "Counter": ({"a": 2}, "from collections import Counter\n return Counter('aa')", 1.0),
    "defaultdict": ({"a": [1]}, "import collections as c\n return c.defaultdict(list, a=[1])", 1.0),
    "deque": ([1], "from collections import deque\n return deque([1])", 0.0),
    "generator": ([1], "yield 1", 0.0),
    "iterator": ([1], "return iter([1])", 0.0),
    "bytes": ("a", "return b'a'", 0.0),
    "complex": (1, "return 1j", 0.0),
    "object": (1, "return object()", 0.0),
    "dataclass": ([1], "import dataclasses as d\n return d.make_dataclass('D', 'x')(1)", 0.0),
    "cycle": ([1], "x = []\n x.append(x)\n return x", 0.0),
    "enum of texts": ("a", "import enum\n class C(str, enum.Enum): A = 'a'\n return C.A", 1.0),
    "enum of numbers": (7, "import enum\n class C(enum.IntEnum): A = 7\n return C.A", 1.0),
    "fraction": (0.5, "from fractions import Fraction\n return Fraction(1, 2)", 1.0),
    "whole fraction": (2, "from fractions import Fraction\n return Fraction(4, 2)", 1.0),
    "nan": (float("nan"), "return float('nan')", 1.0),
    "infinite": (float("inf"), "return float('inf')", 1.0),
    "surrogate": ("\ud800", "return chr(0xd800)", 1.0),
    "none": (None, "pass", 1.0),
    "much printed beside": (5, "import os\n os.write(1, b'x' * 10**6)\n return 5", 1.0),
    "printed": (5, "print(5)", 0.0),
    "async": (5, "return 5", 1.0),
    "ended": (5, "exit()", 0.0),
    "left": (5, "import os\n os._exit(0)", 0.0),
    "a child's": (5, "import os\n if not os.fork(): return 4\n os.wait()\n return 5", 1.0),
    "too deep": (5, "return f()", 0.0),
    "70 bits": (2**70, "return 2**70", 1.0),
    "70 bits but one": (2**70, "return 2**70 + 1", 0.0),
    "negative": ([-(2**64)], "return [-2**64]", 1.0),
    "20,000 digits": (7**20_000, "return 7**20_000", 1.0),
    "20,000 digits but one": (7**20_000, "return 7**20_000 - 1", 0.0),
    "a forged integer": (255, "return {'\\0int': 'ff'}", 0.0),
    "2 MiB": ("é" * (1 << 20), "return 'é' * (1 << 20)", 1.0),
}  # fmt: skip


@on_shared_loop
@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap")
async def test_results_are_compared_like_in_python(launcher: JailLauncher) -> None:
    programs = {}
    for name, (expected, body, _) in RETURNS.items():
        tests = {"function": "f", "cases": [{"args": [], "output": expected}]}
        word = "async def" if name == "async" else "def"
        programs[name] = (tests, f"{word} f():\n {body}")
    assert await BatchGrader(launcher).grade_all(programs) == {
        n: score for n, (*_, score) in RETURNS.items()
    }


@on_shared_loop
@pytest.mark.needs("bwrap")
async def test_call_formats_of_datasets_are_graded(launcher: JailLauncher) -> None:
    method = "class Solution:\n def add(self, a, b=1): return a + b"
    plain = "if True:\n def add(a, b=1): return a + b"
    big = 3**30_000
    inputs = {"fn_name": "add", "inputs": [[1, 2], [3, 4]]}
    lines = {"function": "add", "cases": [{"input": "[1]\n[2]", "output": "[1, 2]"}]}
    keywords = {"function": "add", "cases": [{"args": [1], "kwargs": {"b": 5}, "output": 6}]}
    large = {"function": "add", "cases": [{"args": [big], "output": big + 1}]}
    programs = {
        "wrapped": (inputs | {"outputs": [[3], [7]]}, method),
        "bare": (inputs | {"outputs": [3, 7]}, method),
        "half": (inputs | {"outputs": [3, [7]]}, plain),
        "lines": (lines, method),
        "JSON text": (json.dumps(lines), plain),
        "keywords": (keywords, plain),
        "large": (large, plain),
        "method": ({**keywords, "function": "Solution.add"}, method),
    }
    scores = dict.fromkeys(programs, 1.0) | {"half": 0.5}
    assert await BatchGrader(launcher).grade_all(programs) == scores


def test_ambiguous_test_formats_are_rejected() -> None:
    for tests, message in (
        ({"function": "f", "cases": [{"args": "ab", "output": 1}]}, "args must be a list"),
        ({"function": "f", "cases": [{"output": 1}]}, "has no 'input'"),
        ({"function": "f", "cases": [{"args": []}]}, "has no 'output'"),
        ({"function": "f", "cases": ["f() == 1"]}, "a case must be a table"),
        ({"function": "f", "inputs": [[1]], "outputs": []}, "1 inputs but 0 outputs"),
        ({"function": "f"}, "inputs and outputs; it has 'function'"),
        ([{"input": "1", "outputs": []}], "an empty list"),
        (["f() == 1"], "must be assertions"),
        (["assert f()", 1], "a case must be a table"),
        (5, "not a int"),
    ):
        with pytest.raises(InvalidTests, match=message):
            parse_tests(tests)
    deep: Any = 1
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    for unsupported, part in (
        ({"function": "f", "cases": [{"args": [b"x"], "output": 1}]}, "bytes"),
        ({"function": "f", "cases": [{"args": [deep], "output": 1}]}, "nested deeper"),
        ({"function": "f", "types": ["TreeNode"], "inputs": [[1]], "outputs": [1]}, "TreeNode"),
        ({"function": "f", "cases": [{"args": [], "type": "ListNode", "output": 1}]}, "ListNode"),
        (
            '{"function": "f", "cases": [{"args": [' + "9" * (MAX_DIGITS + 1) + "]}]}",
            "whole number",
        ),
    ):  # fmt: skip
        with pytest.raises(UnsupportedTests, match=part):
            parse_tests(unsupported)


def test_large_numbers_are_parsed_quickly() -> None:
    text = '{"inputs": [[1]], "outputs": [' + "-" + "7" * (MAX_DIGITS - 1) + '], "fn_name": "f"}'
    start_s = time.thread_time()
    parsed = parse_tests(text)
    assert isinstance(parsed, FunctionTests) and time.thread_time() - start_s < 2.0
    assert parsed.cases[0].accepted_results == [-(10 ** (MAX_DIGITS - 1) - 1) // 9 * 7 - 7 + 7]


def test_python_tests_are_distinguished_from_json() -> None:
    for source in ("def test_f(): pass", "[1, 2][0]\ndef test(): pass", "{x for x in ()}"):
        assert parse_tests(source) == source
    assert parse_tests("[]") == StdioTests([])


def test_list_of_assertions_becomes_a_test_for_each() -> None:
    tests = parse_tests(["assert f(1) == 2, 'one'", 'assert g("""a\nb""") is None'])
    assert tests == (
        "from solution import *\n\ndef test_0():\n    assert f(1) == 2, 'one'\n\n"
        "def test_1():\n    assert g('a\\nb') is None\n"
    )
    assert find_required_names(tests) == {"f", "g"}
    for wrong in ("print(f(1))", "assert f(1) ==", "x = 1; assert x"):
        with pytest.raises(InvalidTests, match="must be assertions"):
            parse_tests(["assert f(1)", wrong])


def test_required_names_are_those_that_tests_use() -> None:
    assert find_required_names(parse_tests({"function": "A.f", "cases": []})) == {"A"}
    assert find_required_names(parse_tests([])) == set()
    assert find_required_names("import solution as s\nfrom solution import f, A as B\n") == {
        "f",
        "A",
    }
    assert find_required_names("import solution\ndef test(): solution.g()") == {"g"}
    assert find_required_names(
        "from solution import *\nimport math\ndef test(x):\n    y = f(x)\n"
    ) == {"f"}
    assert find_required_names("def test(") == set()


@on_shared_loop
@pytest.mark.needs("bwrap")
async def test_arguments_larger_than_a_frame_are_unsupported(launcher: JailLauncher) -> None:
    tests = {"function": "f", "cases": [{"args": ["x" * (16 << 20)], "output": 1}]}
    answer = await BatchGrader(launcher).answer(tests, "def f(x): return 1")
    assert (answer.status, answer.value) == ("unsupported", None)


READS, ENDS, PRINTS = (read_rows("printed.toml", kind) for kind in ("reads", "ends", "prints"))


@on_shared_loop
@pytest.mark.needs("bwrap")
@pytest.mark.parametrize(
    ("case", "programs"),
    [
        ({"input": "3\n1\n2\n3", "output": "9\n"}, READS),
        ({"input": "1\n2", "output": "6"}, [{**row, "before": "print(6)\n"} for row in ENDS]),
        ({"input": "", "output": "6"}, PRINTS),
    ],
    ids=["reads", "ends", "prints"],
)
async def test_common_program_styles_are_graded(
    launcher: JailLauncher, case: dict[str, str], programs: list[dict[str, Any]]
) -> None:
    sources = {row["name"]: ([case], row.get("before", "") + row["source"]) for row in programs}
    scores = {row["name"]: row.get("score", 1.0) for row in programs}
    assert await BatchGrader(launcher).grade_all(sources) == scores


@on_shared_loop
@pytest.mark.needs("bwrap")
async def test_large_inputs_and_outputs_are_graded(launcher: JailLauncher) -> None:
    lines = "\n".join(map(str, range(40_000)))
    echo = [{"input": lines, "output": lines}]
    wide = [{"input": "ä" * 5_000_000, "output": "5000000"}]
    scores = await BatchGrader(launcher).grade_all(
        {
            "echo": (echo, "import sys\nfor line in sys.stdin:\n    print(line, end='')"),
            "less": (echo, "import sys\nprint(sys.stdin.read()[:-1])"),
            "endless": (echo, "while True: print('1')"),
            "wide": (wide, "print(len(input()))"),
        }
    )
    assert scores == {"echo": 1.0, "less": 0.0, "endless": 0.0, "wide": 1.0}


@on_shared_loop
@pytest.mark.needs("bwrap")
async def test_stdin_formats_of_datasets_are_graded(launcher: JailLauncher) -> None:
    double = "print(2 * int(input()))"
    pairs = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}
    scores = await BatchGrader(launcher).grade_all(
        {
            "pairs": (pairs, double),
            "JSON text": ('{"inputs": ["1", "3"], "outputs": ["2", "5"]}', double),
            "lines": ([{"input": ["1", "2"], "output": ["2", "2"]}], double + "\nprint(2)"),
            "any": ([{"input": "1", "outputs": ["3", "2"]}], double),
            "none": ([{"input": "1", "outputs": ["3", "4"]}], double),
            "CRLF": ([{"input": "1\r\n", "output": "2  \r\n3\r\n"}], double + "\nprint(3)"),
            "numbers": ([{"input": 1, "output": 2}], double),
        }
    )
    assert scores == {
        "pairs": 1.0,
        "JSON text": 0.5,
        "lines": 1.0,
        "any": 1.0,
        "none": 0.0,
        "CRLF": 1.0,
        "numbers": 1.0,
    }


@on_shared_loop
@pytest.mark.needs("bwrap")
async def test_ungradable_tests_give_no_score(launcher: JailLauncher) -> None:
    grader = BatchGrader(launcher)
    for tests, status in (
        ([{"input": "1", "output": "2", "testtype": "functional"}], "unsupported"),
        ([{"input": [[1]], "output": "2"}], "unsupported"),
        ([{"input": None, "output": "2"}], "bad_value"),
        ({"inputs": ["1"], "outputs": []}, "bad_value"),
        ({"inputs": ["1"]}, "bad_value"),
    ):
        answer = await grader.answer(tests, "print(2)")
        assert (answer.status, answer.value) == (status, None), tests


@on_shared_loop
@pytest.mark.needs("bwrap")
async def test_options_set_the_tolerance(launcher: JailLauncher) -> None:
    tests = [{"input": "", "output": "3.14"}]
    loose_grader, tight_grader = BatchGrader(launcher, rel_tol=0.01), BatchGrader(launcher)
    assert (await loose_grader.answer(tests, "print(3.1415)")).value == 1.0
    assert (await tight_grader.answer(tests, "print(3.1415)")).value == 0.0
