"""Measurement of how often `code_tests` rejects a right solution or accepts a wrong one, by style.

Usage:

    python -m loadtests.conformance                             # all rows, runner "isolated"
    python -m loadtests.conformance --styles unit --runner auto --jobs 2
    python -m loadtests.conformance --only cache                # rows with this in their names

Judges every solution with real pytest, or a plain process, and has the product grade it. Prints one
JSON object; the rows where the two differ go to standard error. Ends with 1 where the set itself is
wrong, a wrong solution is paid, or more than 1 % of the right ones are not.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable
from typing import Any

from loadtests.conformance import judge
from loadtests.conformance.judge import Verdicts
from loadtests.conformance.rows import ALL, RIGHT, STYLES, WRONG, Answers, Row, graded
from loadtests.measuring.entry import options, report
from meshrl.common.api.sandbox import OK, UNSUPPORTED

RUNNERS = ("isolated", "pytest", "auto")
FALSE_REJECT = 0.01  # at most
SAME = 1e-9  # shares of tests are small fractions


def score(row: Row, which: str, answers: Answers) -> float | None:
    answer = answers[row.name, which]
    return float(answer.value) if answer.status == OK else None


def accepted(row: Row, which: str, answers: Answers) -> bool:
    return score(row, which, answers) == 1.0


def rates(rows: Iterable[Row], answers: Answers, judged: Verdicts) -> dict[str, Any]:
    """`support`: share of the rows that are graded. Of those, `false_reject`: right solutions
    without the full score; `false_accept`: wrong ones with it; `other_share`: wrong ones with
    another share of the tests passed than the judge has; `errors`: answers that are no score.
    """
    rows = list(rows)
    unsupported = {name for (name, _), answer in answers.items() if answer.status == UNSUPPORTED}
    taken = [row for row in rows if row.name not in unsupported]
    wrong = [(row, which) for row in taken for which in WRONG]
    scores = [(score(*one, answers), judged[one[0].name, one[1]].share) for one in wrong]
    return {
        "rows": len(rows),
        "support": _share(len(taken), len(rows)),
        "false_reject": _share(sum(not accepted(row, RIGHT, answers) for row in taken), len(taken)),
        "false_accept": _share(sum(accepted(*one, answers) for one in wrong), len(wrong)),
        "other_share": _share(
            sum(ours is not None and abs(ours - its) > SAME for ours, its in scores), len(wrong)
        ),
        "errors": sum(
            score(row, which, answers) is None for row in taken for which in row.solutions
        ),
    }


def offenders(rows: Iterable[Row], answers: Answers) -> list[str]:
    """Return a line for each row that is not supported or graded wrongly."""
    found = []
    for row in rows:
        for which in row.solutions:
            answer = answers[row.name, which]
            said = f"{row.style} {row.name} {which}: {answer.status} {answer.value} {answer.error}"
            if answer.status == UNSUPPORTED:
                found.append(f"unsupported {said}")
                break
            if accepted(row, which, answers) != (which == RIGHT):
                found.append(f"{'false_reject' if which == RIGHT else 'false_accept'} {said}")
    return found


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def main() -> int:
    parser = options(
        __doc__,
        jobs=(os.cpu_count() or 1, "at a time"),
        only=("", "rows with this in their names"),
        judge_only=(False, "checks the set, grades nothing"),
    )
    parser.add_argument("--styles", nargs="+", choices=STYLES, default=list(STYLES))
    parser.add_argument("--runner", choices=RUNNERS, default=RUNNERS[0])
    given = parser.parse_args()
    rows = [row for row in ALL if row.style in given.styles and given.only in row.name]
    judged = judge.verdicts(rows, given.jobs)
    mistaken = judge.mistakes(rows, judged)
    print(*mistaken, sep="\n", end="\n" if mistaken else "", file=sys.stderr)
    if given.judge_only:
        report({"rows": len(rows), "mistaken": len(mistaken)})
        return 1 if mistaken else 0
    answers = asyncio.run(graded(rows, given.jobs, given.runner))
    for line in offenders(rows, answers):
        print(line, file=sys.stderr)
    found = rates(rows, answers, judged)
    styles = {
        style: rates([row for row in rows if row.style == style], answers, judged)
        for style in given.styles
    }
    told = {"runner": given.runner, **found, "mistaken": len(mistaken), **styles}
    report(told)
    bad = mistaken or found["false_accept"] or found["false_reject"] > FALSE_REJECT
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
