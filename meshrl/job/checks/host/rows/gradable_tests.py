"""Checks that the rows' tests can grade programs, with the number of rows for each runner.

Errors of all rows are reported together, before any program is scored.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from meshrl.common.grading import pytest_support, styles
from meshrl.common.grading.cases import InvalidTests
from meshrl.common.grading.isolated_support import UnsupportedTests, find_unsupported
from meshrl.common.job import builtin
from meshrl.job.checks.host.error_texts import join_first
from meshrl.job.checks.host.programs import can_import, explain_missing_package
from meshrl.job.dataset_rows import TimedRows
from meshrl.job.job_file import JobFile

TIME_LIMIT_S = 4.0  # for the rows of all datasets: some thousands in Python, of cases many more
SHOWN_ROWS = 5  # rows that an error names
PYTEST_INSTALL = "pip install 'meshrl[pytest]'"


def check_tests(job: JobFile, time_limit_s: float = TIME_LIMIT_S) -> None:
    """Check the tests of `code_tests` in all datasets, as many rows as the time allows."""
    for part in job.config.reward.reward_parts:
        if part.use == "code_tests":
            runners = _TestRunnerChooser(
                job, str(part.options.get("runner", builtin.TEST_RUNNERS[0]))
            )
            _check_column(job, str(part.options.get("tests", "tests")), runners, time_limit_s)


def _check_column(
    job: JobFile, column: str, runners: _TestRunnerChooser, time_limit_s: float
) -> None:
    kinds: Counter[str] = Counter()
    wrong: list[str] = []  # rows whose tests cannot be graded by
    first = ""  # key of the dataset that has the first of them
    rows = TimedRows(job.scored_datasets, time_limit_s)
    for key, row in rows:
        try:
            kinds[runners.choose_runner(styles.get_tests(row.value, column))] += 1
            continue
        except (InvalidTests, UnsupportedTests) as error:
            message = str(error)
        except Exception as error:  # from an author's text: one bad row must not stop the others
            message = f"the tests cannot be read: {type(error).__name__}: {error}"
        first = first or key
        wrong.append(f"{row.location}: {message}")
    count = sum(kinds.values()) + len(wrong)
    order = (styles.STDIN, styles.CALLS, "isolated", "pytest")
    each = [f"{kind} {kinds[kind]}" for kind in order if kinds[kind]]
    each += [f"not gradable {len(wrong)}"] if wrong else []
    checked_rows = f"the first {count} rows" if rows.is_partial else f"{count} rows"
    rest = "; later rows are checked when they are graded" if rows.is_partial else ""
    print(f"tests: {checked_rows}: {', '.join(each)}{rest}", file=sys.stderr)
    if wrong:
        rows_have = "a row has" if len(wrong) == 1 else f"{len(wrong)} rows have"
        places = join_first(wrong, SHOWN_ROWS, "; and {} more rows")
        raise job.make_error(
            first,
            f"{first}: {rows_have} tests that cannot be graded: {places}",
            "Correct or remove these rows; packages missing in jails can be installed for "
            "sandbox.python",
        )


class _TestRunnerChooser:
    """Choice of the runner of Python tests, and errors of tests that no runner can run."""

    def __init__(self, job: JobFile, runner: str) -> None:
        sandbox = job.config.sandbox
        self._runner, self._python, self._has_image = runner, sandbox.python, bool(sandbox.root)
        self._runner_by_tests: dict[str, str] = {}  # tests in Python -> their runner
        self._has_package_cache: dict[str, bool] = {}  # packages, and whether jails have them

    def choose_runner(self, tests: Any) -> str:
        """Return the kind of tests, or the runner of Python tests; raise InvalidTests,
        UnsupportedTests.
        """
        kind, found = styles.classify_tests(tests)
        if not isinstance(found, str):
            return kind
        if found not in self._runner_by_tests:
            self._runner_by_tests[found] = self._choose_python_runner(found)
        return self._runner_by_tests[found]

    def _choose_python_runner(self, tests: str) -> str:
        """Return isolated or pytest; raise UnsupportedTests if no allowed runner can run them."""
        isolated = ""
        if self._runner != "pytest":
            unsupported = find_unsupported(tests)
            if not unsupported:
                return "isolated"
            isolated = f"the runner isolated cannot run: {', '.join(unsupported)}"
            if self._runner == "isolated":
                raise UnsupportedTests(isolated)
        if why := self._explain_pytest_unsupported(tests):
            raise UnsupportedTests("; ".join(filter(None, (isolated, why))))
        return "pytest"

    def _explain_pytest_unsupported(self, tests: str) -> str:
        if not self._has_pytest:
            return f"the runner pytest needs the package pytest ({PYTEST_INSTALL})"
        absent = [
            name
            for name in pytest_support.list_imported_packages(tests)
            if not self._has_package(name)
        ]
        if absent:
            return f"jails have no {', '.join(absent)}"
        plugins = self._python or self._has_image  # there may be some
        missing_plugins = () if plugins else pytest_support.find_missing_plugins(tests)
        return (
            f"pytest without plugins has no {', '.join(missing_plugins)}" if missing_plugins else ""
        )

    @functools.cached_property
    def _has_pytest(self) -> bool:
        """True if jails have pytest: their interpreter's, or ours if it runs there."""
        ours = importlib.util.find_spec("pytest")
        if self._has_package("pytest") or not self._python or ours is None or ours.origin is None:
            return self._has_package("pytest") or ours is not None
        return can_import(Path(self._python), "pytest", str(Path(ours.origin).parents[1]))

    def _has_package(self, package: str) -> bool:
        """Return True if the interpreter of the model's code has a package; probe once for each.

        An image may have it: its interpreter runs in the container.
        """
        if self._has_image:
            return True
        if package not in self._has_package_cache:
            own = bool(self._python) and package.isidentifier()
            self._has_package_cache[package] = own and not explain_missing_package(
                Path(self._python), package
            )
        return self._has_package_cache[package]
