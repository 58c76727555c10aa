"""Programs that read and print are judged as an online judge would."""

from __future__ import annotations

from typing import Any

import pytest

from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from tests.unit.sandbox.grading.graded import Judge, rows

pytestmark = pytest.mark.needs("bwrap")

READS, ENDS, PRINTS = (rows("printed.toml", kind) for kind in ("reads", "ends", "prints"))


@pytest.mark.parametrize(
    ("case", "programs"),
    [
        ({"input": "3\n1\n2\n3", "output": "9\n"}, READS),
        ({"input": "1\n2", "output": "6"}, [{**row, "before": "print(6)\n"} for row in ENDS]),
        ({"input": "", "output": "6"}, PRINTS),
    ],
    ids=["reads", "ends", "prints"],
)
async def test_programs_as_people_write_them(
    launcher: JailLauncher, case: dict[str, str], programs: list[dict[str, Any]]
) -> None:
    sources = {row["name"]: ([case], row.get("before", "") + row["source"]) for row in programs}
    scores = {row["name"]: row.get("score", 1.0) for row in programs}
    assert await Judge(launcher).all(sources) == scores


async def test_large_inputs_and_outputs(launcher: JailLauncher) -> None:
    lines = "\n".join(map(str, range(40_000)))
    echo = [{"input": lines, "output": lines}]
    wide = [{"input": "ä" * 5_000_000, "output": "5000000"}]
    scores = await Judge(launcher).all(
        {
            "echo": (echo, "import sys\nfor line in sys.stdin:\n    print(line, end='')"),
            "less": (echo, "import sys\nprint(sys.stdin.read()[:-1])"),
            "endless": (echo, "while True: print('1')"),
            "wide": (wide, "print(len(input()))"),
        }
    )
    assert scores == {"echo": 1.0, "less": 0.0, "endless": 0.0, "wide": 1.0}


async def test_shapes_of_the_corpora(launcher: JailLauncher) -> None:
    double = "print(2 * int(input()))"
    pairs = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}
    scores = await Judge(launcher).all(
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


async def test_what_cannot_be_judged_is_no_score(launcher: JailLauncher) -> None:
    judge = Judge(launcher)
    for tests, status in (
        ([{"input": "1", "output": "2", "testtype": "functional"}], "unsupported"),
        ([{"input": [[1]], "output": "2"}], "unsupported"),
        ([{"input": None, "output": "2"}], "bad_value"),
        ({"inputs": ["1"], "outputs": []}, "bad_value"),
        ({"inputs": ["1"]}, "bad_value"),
    ):
        answer = await judge.answer(tests, "print(2)")
        assert (answer.status, answer.value) == (status, None), tests


async def test_the_options_set_the_tolerance(launcher: JailLauncher) -> None:
    tests = [{"input": "", "output": "3.14"}]
    loose, tight = Judge(launcher, rel_tol=0.01), Judge(launcher)
    assert (await loose.answer(tests, "print(3.1415)")).value == 1.0
    assert (await tight.answer(tests, "print(3.1415)")).value == 0.0
