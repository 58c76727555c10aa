"""Judges the conformance set: real pytest for tests in Python, plain processes for the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtests.conformance.rows import RIGHT, Row

RUN_S = 60.0  # for a program and one input, on a busy host
BATCH_S = 900.0  # for one process of `judging`
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # importing them takes longer than a row


@dataclass(frozen=True)
class Verdict:
    passed: int
    failed: int
    other: int = 0  # skipped, expected to fail

    @property
    def right(self) -> bool:
        return self.passed > 0 and not self.failed and not self.other

    @property
    def share(self) -> float:
        return self.passed / (self.passed + self.failed + self.other)


Verdicts = dict[tuple[str, str], Verdict]  # by row and solution


def verdicts(rows: Iterable[Row], jobs: int) -> Verdicts:
    solutions = [(row, which) for row in rows for which in row.solutions]
    printed = [one for one in solutions if isinstance(one[0].tests, list)]
    tested = [one for one in solutions if not isinstance(one[0].tests, list)]
    found: Verdicts = {}
    with ThreadPoolExecutor(jobs) as pool:
        batches = [batch for batch in (tested[i::jobs] for i in range(jobs)) if batch]
        for said in pool.map(_batch, batches):
            found |= said
        for (row, which), verdict in zip(printed, pool.map(_printed, printed), strict=True):
            found[row.name, which] = verdict
    return found


def mistakes(rows: Iterable[Row], found: Verdicts) -> list[str]:
    """Return the errors of the set itself: right solutions that fail, wrong ones that pass."""
    return [
        f"{row.name} {which}: the judge says {found[row.name, which]}"
        for row in rows
        for which in row.solutions
        if found[row.name, which].right != (which == RIGHT)
    ]


def _batch(solutions: list[tuple[Row, str]]) -> Verdicts:
    with tempfile.TemporaryDirectory(prefix="conformance-") as place:
        for row, which in solutions:
            folder = Path(place, f"{row.name}-{which}")
            folder.mkdir()
            (folder / "solution.py").write_text(row.solutions[which])
            if isinstance(row.tests, str):
                (folder / "test_solution.py").write_text(row.tests)
            else:
                (folder / "calls.json").write_text(json.dumps(row.tests))
        ran = subprocess.run(
            [sys.executable, "-m", "loadtests.conformance.judging", place],
            stdout=subprocess.PIPE,
            timeout=BATCH_S,
            check=True,
            env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | ALONE,
        )
    document: dict[str, list[int]] = json.loads(ran.stdout)
    return {
        (row.name, which): Verdict(*document[f"{row.name}-{which}"]) for row, which in solutions
    }


def _printed(solution: tuple[Row, str]) -> Verdict:
    row, which = solution
    passed = [_prints(row.solutions[which], case) for case in row.tests]
    return Verdict(sum(passed), len(passed) - sum(passed))


def _prints(program: str, case: dict[str, Any]) -> bool:
    try:
        ran = subprocess.run(
            [sys.executable, "-I", "-c", program],
            input=case["input"].encode(),
            capture_output=True,
            timeout=RUN_S,
        )
    except subprocess.TimeoutExpired:
        return False
    got, want = ran.stdout.decode("utf-8", "replace").split(), case["output"].split()
    if ran.returncode or len(got) != len(want):
        return False
    return all(g == w or _close(g, w) for g, w in zip(got, want, strict=True))


def _close(got: str, want: str) -> bool:
    """Compare answers; numbers with a point or an exponent may differ by 1e-6, absolute or
    relative.
    """
    if want.lstrip("+-").isdigit():
        return False
    try:
        said, wanted = float(got), float(want)
    except ValueError:
        return False
    return abs(said - wanted) <= 1e-6 * max(1.0, abs(wanted))
