"""Checks that the rows' tests can be graded by, and tells how many rows each runner takes.

What is wrong is told of all rows at once, before any program is scored.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from meshrl.common.grading import shapes, under_pytest
from meshrl.common.grading.cases import BadTests
from meshrl.common.grading.support import Unsupported, unsupported
from meshrl.common.job import builtin
from meshrl.job.checks.machine.programs import imports, without
from meshrl.job.checks.machine.together import shown
from meshrl.job.loaded import JobFile
from meshrl.job.rows import TimedRows

LOOK_S = 4.0  # for the rows of all datasets: some thousands in Python, of cases many more
SHOWN = 5  # rows that an error names
INSTALL = "pip install 'meshrl[pytest]'"


def graded(job: JobFile, look_s: float = LOOK_S) -> None:
    """The tests of `code_tests` in all datasets, as many rows as the time allows."""
    for part in job.config.reward.declared:
        if part.use == "code_tests":
            runners = _Runners(job, str(part.options.get("runner", builtin.RUNNERS[0])))
            _check(job, str(part.options.get("tests", "tests")), runners, look_s)


def _check(job: JobFile, column: str, runners: _Runners, look_s: float) -> None:
    kinds: Counter[str] = Counter()
    wrong: list[str] = []  # rows whose tests cannot be graded by
    first = ""  # key of the dataset that has the first of them
    rows = TimedRows(job.scored_datasets, look_s)
    for key, row in rows:
        try:
            kinds[runners.kind(shapes.column(row.value, column))] += 1
            continue
        except (BadTests, Unsupported) as error:
            said = str(error)
        except Exception as error:  # of reading what somebody wrote: one row stops no other
            said = f"tests that cannot be read: {type(error).__name__}: {error}"
        first = first or key
        wrong.append(f"{row.place}: {said}")
    count = sum(kinds.values()) + len(wrong)
    order = (shapes.STDIN, shapes.CALLS, "isolated", "pytest")
    each = [f"{kind} {kinds[kind]}" for kind in order if kinds[kind]]
    each += [f"not gradable {len(wrong)}"] if wrong else []
    which = f"the first {count} rows" if rows.partly else f"{count} rows"
    rest = "; those behind them are looked at when they are graded" if rows.partly else ""
    print(f"tests: {which}: {', '.join(each)}{rest}", file=sys.stderr)
    if wrong:
        rows_have = "a row has" if len(wrong) == 1 else f"{len(wrong)} rows have"
        places = shown(wrong, SHOWN, "; and {} more rows")
        raise job.fail(
            first,
            f"{first}: {rows_have} tests that cannot be graded by: {places}",
            "Mend these rows or leave them out; what is missing in jails can be in sandbox.python",
        )


class _Runners:
    """Which runner takes tests in Python, and what neither of them can run."""

    def __init__(self, job: JobFile, runner: str) -> None:
        sandbox = job.config.sandbox
        self._runner, self._python, self._image = runner, sandbox.python, bool(sandbox.root)
        self._known: dict[str, str] = {}  # tests in Python -> their runner
        self._found: dict[str, bool] = {}  # packages, and whether jails have them

    def kind(self, tests: Any) -> str:
        """What grades them, or the runner of tests in Python; BadTests, Unsupported."""
        kind, found = shapes.read(tests)
        if not isinstance(found, str):
            return kind
        if found not in self._known:
            self._known[found] = self._of(found)
        return self._known[found]

    def _of(self, tests: str) -> str:
        """isolated or pytest; Unsupported if no runner that the job allows can run the tests."""
        isolated = ""
        if self._runner != "pytest":
            lacks = unsupported(tests)
            if not lacks:
                return "isolated"
            isolated = f"the runner isolated cannot run: {', '.join(lacks)}"
            if self._runner == "isolated":
                raise Unsupported(isolated)
        if why := self._pytest_lacks(tests):
            raise Unsupported("; ".join(filter(None, (isolated, why))))
        return "pytest"

    def _pytest_lacks(self, tests: str) -> str:
        if not self._pytest:
            return f"there is no pytest for the runner pytest ({INSTALL})"
        absent = [name for name in under_pytest.modules(tests) if not self._has(name)]
        if absent:
            return f"jails have no {', '.join(absent)}"
        plugins = self._python or self._image  # there may be some
        lacks = () if plugins else under_pytest.lacks(tests)
        return f"pytest alone has no {', '.join(lacks)}" if lacks else ""

    @functools.cached_property
    def _pytest(self) -> bool:
        """Whether jails have pytest: their interpreter's, or ours if it runs there."""
        ours = importlib.util.find_spec("pytest")
        if self._has("pytest") or not self._python or ours is None or ours.origin is None:
            return self._has("pytest") or ours is not None
        return imports(Path(self._python), "pytest", str(Path(ours.origin).parents[1]))

    def _has(self, package: str) -> bool:
        """Whether the interpreter of the model's code has a package, asked once for each. An image
        may have it: its interpreter is run where it is contained.
        """
        if self._image:
            return True
        if package not in self._found:
            own = bool(self._python) and package.isidentifier()
            self._found[package] = own and not without(Path(self._python), package)
        return self._found[package]
