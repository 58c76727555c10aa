"""How often `code_tests` rejects a right solution or pays a wrong one, by style of tests.

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

from loadtests.conformance import judge
from loadtests.conformance.graded import graded
from loadtests.conformance.rates import offenders, rates
from loadtests.conformance.rows import ALL, STYLES
from loadtests.measuring.entry import options, report

RUNNERS = ("isolated", "pytest", "auto")
FALSE_REJECT = 0.01  # at most


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
