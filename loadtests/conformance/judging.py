"""Independent judge of Python solutions, each in a forked process; it uses no product code.

Usage:

    python -m loadtests.conformance.judging DIRECTORY

Every folder in DIRECTORY holds a solution: `solution.py` beside `test_solution.py`, which pytest
runs, or beside `calls.json`. Prints one JSON object: what is to be known of each folder's tests.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio.plugin  # noqa: F401 -- here, so that it need not be in each fork

CPU_S = 5  # of a solution, which needs a tenth of one; what hangs has failed
OPTIONS = ["-q", "-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin"]


class Counts:
    """Counts of a run's tests: passed, failed, and neither."""

    def __init__(self) -> None:
        self.passed = self.failed = self.other = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed += 1
        elif report.skipped or getattr(report, "wasxfail", None) is not None:
            self.other += 1
        elif report.when == "call":
            self.passed += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.failed += report.failed


def judged(folder: Path) -> list[int]:
    """Return the numbers of passed, failed and other tests of a folder."""
    counts = Counts()
    sys.path.insert(0, str(folder))
    calls = folder / "calls.json"
    if calls.exists():
        for right in called(folder, json.loads(calls.read_text())):
            counts.passed += right
            counts.failed += not right
    else:
        pytest.main([*OPTIONS, "--rootdir", str(folder), str(folder)], plugins=[counts])
    return [counts.passed, counts.failed, counts.other]


def called(folder: Path, tests: dict[str, Any]) -> list[bool]:
    spec = importlib.util.spec_from_file_location("solution", folder / "solution.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = []
    for case in tests["cases"]:
        owner, _, name = tests["function"].rpartition(".")
        target = getattr(getattr(module, owner)() if owner else module, name)
        try:
            found.append(equal(target(*case["args"]), case["output"]))
        except Exception:
            found.append(False)
    return found


def equal(got: Any, want: Any) -> bool:
    """Compare as documented: tuples as lists, sets as sorted lists, floats within 1e-6."""
    if isinstance(got, set | frozenset):
        got = sorted(got)
    if isinstance(want, list):
        return (
            isinstance(got, list | tuple)
            and len(got) == len(want)
            and all(equal(g, w) for g, w in zip(got, want, strict=True))
        )
    if isinstance(want, dict):
        return (
            isinstance(got, dict)
            and {str(key) for key in got} == set(want)
            and all(equal(value, want[str(key)]) for key, value in got.items())
        )
    if isinstance(want, float) and type(got) in (int, float):
        return bool(got == want or abs(got - want) <= 1e-6 * max(1.0, abs(want)))
    return type(got) is type(want) and bool(got == want)


def forked(folder: Path) -> list[int]:
    """Return the verdict of a forked process; nothing passed if it does not exit by itself."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        with contextlib.suppress(BaseException):
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
            os.chdir(folder)
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(nothing, descriptor)
            os.write(write, json.dumps(judged(folder)).encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        said = file.read()
    os.waitpid(child, 0)
    return list(json.loads(said)) if said else [0, 1, 0]


def main() -> None:
    folders = sorted(path for path in Path(sys.argv[1]).resolve().iterdir() if path.is_dir())
    print(json.dumps({folder.name: forked(folder) for folder in folders}))


if __name__ == "__main__":
    main()
