"""How often the product is wrong where it grades at all, by style, and in which rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from loadtests.conformance.graded import Answers
from loadtests.conformance.judge import Verdicts
from loadtests.conformance.rows import RIGHT, WRONG, Row
from meshrl.common.api.sandbox import OK, UNSUPPORTED

SAME = 1e-9  # shares of tests are small fractions


def supported(row: Row, answers: Answers) -> bool:
    """Whether the product grades a row's tests, whatever the solution."""
    return all(answers[row.name, which].status != UNSUPPORTED for which in row.solutions)


def score(row: Row, which: str, answers: Answers) -> float | None:
    answer = answers[row.name, which]
    return float(answer.value) if answer.status == OK else None


def rejected(row: Row, answers: Answers) -> bool:
    value = score(row, RIGHT, answers)
    return value is None or value < 1.0


def accepted(row: Row, which: str, answers: Answers) -> bool:
    return score(row, which, answers) == 1.0


def rates(rows: Iterable[Row], answers: Answers, judged: Verdicts) -> dict[str, Any]:
    """`support`: share of the rows that are graded. Of those, `false_reject`: right solutions
    without the full score; `false_accept`: wrong ones with it; `other_share`: wrong ones with
    another share of the tests passed than the judge has; `errors`: answers that are no score.
    """
    rows = list(rows)
    taken = [row for row in rows if supported(row, answers)]
    wrong = [(row, which) for row in taken for which in WRONG]
    scores = [(score(*one, answers), judged[one[0].name, one[1]].share) for one in wrong]
    return {
        "rows": len(rows),
        "support": _share(len(taken), len(rows)),
        "false_reject": _share(sum(rejected(row, answers) for row in taken), len(taken)),
        "false_accept": _share(sum(accepted(*one, answers) for one in wrong), len(wrong)),
        "other_share": _share(
            sum(ours is not None and abs(ours - its) > SAME for ours, its in scores), len(wrong)
        ),
        "errors": sum(
            score(row, which, answers) is None for row in taken for which in row.solutions
        ),
    }


def offenders(rows: Iterable[Row], answers: Answers) -> list[str]:
    """A line for each row that is not supported or graded wrongly."""
    found = []
    for row in rows:
        for which in row.solutions:
            answer = answers[row.name, which]
            said = f"{row.style} {row.name} {which}: {answer.status} {answer.value} {answer.error}"
            if answer.status == UNSUPPORTED:
                found.append(f"unsupported {said}")
                break
            if which == RIGHT and rejected(row, answers):
                found.append(f"false_reject {said}")
            if which != RIGHT and accepted(row, which, answers):
                found.append(f"false_accept {said}")
    return found


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0
