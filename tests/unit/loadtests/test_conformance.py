"""Conformance set of code tasks, and the product's rates on a slice of it."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from loadtests.conformance import judge
from loadtests.conformance.__main__ import offenders, rates
from loadtests.conformance.judge import Verdict
from loadtests.conformance.rows import ALL, edited, graded
from meshrl.common.api.sandbox import OK, RAISED, UNSUPPORTED
from meshrl.services.sandbox.outcomes import CallResult

SLICE = ALL[::20]


def test_rows_have_unique_names_and_three_programs() -> None:
    assert len({row.name for row in ALL}) == len(ALL)
    assert len(ALL) >= 300
    for row in ALL:
        programs = {ast.dump(ast.parse(text)) for text in row.solutions.values()}
        assert len(programs) == 3, row.name
        assert row.tests, row.name
        if isinstance(row.tests, str):
            ast.parse(row.tests)


def test_edit_that_matches_twice_or_never_is_an_error() -> None:
    assert edited("a + b", ["+", "-"]) == "a - b"
    for old in ("a", "c"):
        with pytest.raises(ValueError, match="times"):
            edited("a + a", [old, "b"])


@pytest.mark.deep
@pytest.mark.needs("bwrap")
async def test_only_correct_solutions_of_a_slice_are_paid_and_the_judge_agrees() -> None:
    judged = judge.verdicts(SLICE, jobs=1)
    assert judge.mistakes(SLICE, judged) == []
    answers = await graded(SLICE, jobs=2, runner="isolated")
    found = offenders(SLICE, answers)
    refused = [each for each in found if each.startswith("unsupported")]
    assert [each for each in found if each not in refused] == []
    assert [each.split()[2] for each in refused] in ([], ["async_fixture_bus"])


def test_judge_distinguishes_correct_from_wrong_solutions() -> None:
    rows = [next(row for row in ALL if row.style == style) for style in ("mbpp", "apps")]
    swapped = [replace(row, right=row.wrong1, wrong1=row.right) for row in rows]
    said = judge.mistakes(swapped, judge.verdicts(swapped, jobs=1))
    assert [line.split(":")[0] for line in said] == [
        f"{row.name} {which}" for row in rows for which in ("right", "wrong1")
    ]


def test_rates_are_shares_of_graded_solutions() -> None:
    one, other, third = ALL[:3]
    judged = {(row.name, which): Verdict(1, 1) for row in ALL[:3] for which in row.solutions}
    full, half = CallResult(OK, 1.0, ""), CallResult(OK, 0.5, "")
    answers = {
        (one.name, "right"): half,
        (one.name, "wrong1"): full,
        (one.name, "wrong2"): half,
        (other.name, "right"): full,
        (other.name, "wrong1"): CallResult(RAISED, None, "?"),
        (other.name, "wrong2"): CallResult(OK, 0.25, ""),
        **{(third.name, which): CallResult(UNSUPPORTED, None, "mock") for which in third.solutions},
    }
    assert rates(ALL[:3], answers, judged) == {
        "rows": 3,
        "support": 0.6667,
        "false_reject": 0.5,
        "false_accept": 0.25,
        "other_share": 0.5,
        "errors": 1,
    }
    said = [line.split()[:3] for line in offenders(ALL[:3], answers)]
    assert said == [
        ["false_reject", one.style, one.name],
        ["false_accept", one.style, one.name],
        ["unsupported", third.style, third.name],
    ]
