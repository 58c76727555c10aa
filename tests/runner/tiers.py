"""Tiers of tests: daily, deep and timing.

Usage:

    --tier daily   what `make test` runs: all but `deep` and `timing`; of `rotating` cases a part
    --tier deep    everything but `timing`: `make test-deep`
    --tier timing  only the `timing` tests: `make test-timing`, in one process
    --tier ci      daily, one seventh of the rest, and the rest of what changed lately

The commit selects the part (`--rotation N` replays one). The next commit selects the next part, so
that every case runs within as many commits as there are parts.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import pytest

SLICES = 7
LATELY = 20  # commits
TIERS = ("daily", "deep", "timing", "ci")
# Tests of the product's folders, of which one entry runs in full after a change.
TESTS_OF = {
    "services/sandbox/": ("tests/unit/sandbox/", "tests/mesh/faults/test_jailed_code"),
    "common/mesh/process/": ("tests/unit/common/mesh/process/",),
    "services/weights/": ("tests/unit/weights/", "tests/mesh/weights/"),
    "services/trainer/": ("tests/unit/trainer/", "tests/mesh/training/"),
}


class Tiers:
    """Plugin that deselects the tests of other tiers, and prints how many."""

    KEY: pytest.StashKey[Tiers] = pytest.StashKey()

    def __init__(self, config: pytest.Config) -> None:
        self._tier: str = config.option.tier
        given = config.option.rotation
        self.rotation: int = find_rotation(config.rootpath) if given is None else given
        self._changed: tuple[str, ...] = ()
        if self._tier == "ci":
            self._changed = affected_tests(changed_paths(config.rootpath), self.rotation)
        self._deep: set[str] = set()
        self._deselected: Counter[str] = Counter()

    def is_deep(self, nodeid: str) -> bool:
        """Return True if the daily tier of this commit leaves the test out."""
        return nodeid in self._deep

    def _wanted(self, item: pytest.Item) -> bool:
        """Return True if the test belongs to the chosen tier."""
        timing = item.get_closest_marker("timing") is not None
        if timing or self._tier == "timing":
            return timing and self._tier == "timing"
        deep = item.get_closest_marker("deep") is not None
        rotating = item.get_closest_marker("rotating")
        if rotating is not None and not is_drawn(item, rotating.args[0], self.rotation):
            deep = True
        if not deep:
            return True
        self._deep.add(item.nodeid)
        if self._tier == "ci":
            return is_turn(item.nodeid, SLICES, self.rotation) or item.nodeid.startswith(
                self._changed
            )
        return self._tier == "deep"

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Deselect the tests that the tier leaves out."""
        selected: list[pytest.Item] = []
        dropped: list[pytest.Item] = []
        for item in items:
            (selected if self._wanted(item) else dropped).append(item)
        for item in dropped:
            timing = item.get_closest_marker("timing") is not None
            self._deselected["timing" if timing else "deep"] += 1
        if dropped:
            config.hook.pytest_deselected(items=dropped)
            items[:] = selected

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the deselected tests, and how to run the same tests again."""
        for tier, count in sorted(self._deselected.items()):
            terminalreporter.write_line(f"deselected {count} {tier} tests: --tier {tier}")
        terminalreporter.write_line(
            f"tests of this commit: --tier {self._tier} --rotation {self.rotation}"
        )
        if self._changed:
            terminalreporter.write_line(
                f"in full, as the product changed there lately: {' '.join(self._changed)}"
            )


def is_drawn(item: pytest.Item, parts: int, rotation: int) -> bool:
    """Return True if this rotation draws a case of a parametrized test: one in `parts`, in turn.

    Tests begin at different cases, so that the dear cases of all do not meet in one rotation.
    """
    drawn = getattr(item, "callspec", None)
    case = max(drawn.indices.values()) if drawn is not None else 0
    return (case + crc32(item.nodeid.partition("[")[0].encode())) % parts == rotation % parts


def is_turn(nodeid: str, parts: int, rotation: int) -> bool:
    """Return True if a test's part, of so many, is the one of this rotation."""
    return crc32(nodeid.encode()) % parts == rotation % parts


def find_rotation(root: Path) -> int:
    """Return the number of commits up to HEAD, or a number drawn from it in a shallow clone."""
    try:
        if read_git(root, "rev-parse", "--is-shallow-repository").strip() == "true":
            return int(read_git(root, "rev-parse", "HEAD")[:8], 16)
        return int(read_git(root, "rev-list", "--count", "HEAD"))
    except (OSError, subprocess.CalledProcessError, ValueError):
        return 0  # not a checkout


def changed_paths(root: Path) -> Sequence[str]:
    """Return the files that the last commits changed; nothing where there is no history."""
    try:
        names = read_git(root, "log", f"-{LATELY}", "--name-only", "--format=")
    except (OSError, subprocess.CalledProcessError):
        return ()
    return sorted(set(names.split()))


def affected_tests(paths: Sequence[str], rotation: int) -> tuple[str, ...]:
    """Return the beginning of the names of tests that are run in full after such changes.

    Of several, one is taken in turn: all of them are `make test-deep`.
    """
    changed = [
        begin
        for folder, begins in TESTS_OF.items()
        if any(path.startswith(folder) for path in paths)
        for begin in begins
    ]
    return (changed[rotation % len(changed)],) if changed else ()


def read_git(root: Path, *words: str) -> str:
    """Return git's output about the repository at `root`."""
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def add_options(parser: pytest.Parser) -> None:
    """Add the options of this plugin."""
    parser.addoption("--tier", choices=TIERS, default="daily", help="which tests are run")
    parser.addoption("--rotation", type=int, help="which part of rotating tests; by the commit")
