"""CPU seconds of every test, with a limit per test and a budget for all of them.

The kernel charges a test's cost to its worker and to all processes started from there. The cost is
divided by the machine's slowdown against the reference of `tests/load.py`, since the same work
costs up to twice the CPU time beside busy neighbours.
"""

from __future__ import annotations

import json
import statistics
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import load
from tests.runner.tiers import Tiers

# CPU seconds of a daily test: listed above the first, an error above the second. Beside seven
# others, whose caches it shares, a test costs up to half more: keep it below 10 s when alone.
NAMED_S, LIMIT_S = 5.0, 15.0
CALIBRATE_EVERY_S = 5.0
OTHERS_SHARE = 0.2  # share of the host's CPU time beyond which costs are those of a busy host


@dataclass
class Costs:
    """Plugin that collects and prints the tests' costs, and fails a run that exceeds them."""

    config: pytest.Config
    tests: dict[str, tuple[float, float]] = field(default_factory=dict)  # CPU s, wall s
    overhead_s: float = 0.0  # CPU seconds of collection and of workers between tests
    _began: float = field(default_factory=time.monotonic)
    _slowness: list[float] = field(default_factory=list)
    _pages: load.ColdPages = field(default_factory=load.ColdPages)
    _touches_ns: list[float] = field(default_factory=list)
    _calibrate_at: float = 0.0
    _host_s: float = field(default_factory=load.read_host_cpu_s)

    def add(self, nodeid: str, cpu_s: float, wall_s: float) -> None:
        """Record a test that has ended."""
        self.tests[nodeid] = (cpu_s, wall_s)
        if time.monotonic() >= self._calibrate_at:
            self._calibrate_at = time.monotonic() + CALIBRATE_EVERY_S
            self._slowness.append(load.timed_loop() / load.REFERENCE_S)
            self._touches_ns.append(self._pages.measure_touch_ns())

    @property
    def slowness(self) -> float:
        """Median CPU time of the calibration loop over that of the reference, at least 1."""
        return max(1.0, statistics.median(self._slowness)) if self._slowness else 1.0

    @property
    def worst_slowness(self) -> float:
        """Slowness in the slowest tenth of the samples: the error of the median is that large."""
        return max(1.0, sorted(self._slowness)[len(self._slowness) * 9 // 10])

    @property
    def daily_s(self) -> float:
        """CPU seconds of the daily tests and beside tests, as the kernel has charged them."""
        is_deep = self.config.stash[Tiers.KEY].is_deep
        return self.overhead_s + sum(s for name, (s, _) in self.tests.items() if not is_deep(name))

    @property
    def total_s(self) -> float:
        """CPU seconds of the whole run, as the kernel has charged them."""
        return self.overhead_s + sum(cpu_s for cpu_s, _ in self.tests.values())

    @property
    def others_share(self) -> float:
        """Share of the host's CPU time during the run that was not the run's own."""
        host_s = load.read_host_cpu_s() - self._host_s
        return max(0.0, 1.0 - self.total_s / host_s) if host_s else 0.0

    @property
    def inflation(self) -> float:
        """Factor by which limits rise: above 1 where the host takes memory away."""
        touch_ns = statistics.median(self._touches_ns) if self._touches_ns else 0.0
        return load.COLD_PAGE_FACTOR if touch_ns > load.COLD_PAGE_LIMIT_NS else 1.0

    def problems(self) -> Iterable[str]:
        """Yield the tests over their limit; nothing beside busy neighbours that inflate costs."""
        if self.others_share > OTHERS_SHARE:
            return
        limit_s = self.inflation * LIMIT_S
        for nodeid, (cpu_s, _) in self.tests.items():
            if cpu_s / self.slowness > limit_s and not self.config.stash[Tiers.KEY].is_deep(nodeid):
                yield f"{nodeid} costs {cpu_s / self.slowness:.1f} CPU-s; the limit is {limit_s:g}"
        budget_s = self.inflation * read_budget(self.config.rootpath)
        if self.daily_s / self.worst_slowness > budget_s:
            yield (
                f"the daily tests cost at least {self.daily_s / self.worst_slowness:.0f} CPU-s; "
                f"pyproject.toml allows {budget_s:g}"
            )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the figures; fail a run over budget if the budget is enforced."""
        if (path := self.config.option.costs) is not None:
            content = {name: [round(x, 4) for x in both] for name, both in self.tests.items()}
            Path(path).write_text(json.dumps(content, indent=0))
        if self.config.option.hold_budget and self.tests and any(self.problems()):
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the total, and the daily tests that cost much."""
        if not self.tests:
            return
        wall_s = time.monotonic() - self._began
        terminalreporter.write_line(
            f"{self.total_s:.0f} CPU-s ({self.overhead_s:.0f} of them beside tests) in "
            f"{wall_s:.0f} s; this machine was {self.slowness:.2f} times slower than the "
            f"reference; daily tests on the reference: {self.daily_s / self.slowness:.0f} CPU-s"
        )
        for nodeid, (cpu_s, _) in sorted(self.tests.items(), key=lambda item: -item[1][0]):
            if cpu_s / self.slowness <= NAMED_S:
                break
            if not self.config.stash[Tiers.KEY].is_deep(nodeid):
                terminalreporter.write_line(f"{cpu_s / self.slowness:5.1f} CPU-s: {nodeid}")
        if self.others_share > OTHERS_SHARE:
            share = f"{self.others_share:.0%}"
            terminalreporter.write_line(f"no limit is held: others used {share} of the CPU time")
        if self.inflation > 1.0:
            touch_ns = statistics.median(self._touches_ns)
            terminalreporter.write_line(
                f"limits are {self.inflation:g} times higher: the host takes memory away, and it "
                f"took {touch_ns:.0f} ns to touch a page again"
            )
        if self.config.option.hold_budget:
            for problem in self.problems():
                terminalreporter.write_line(f"too dear: {problem}", red=True)


def read_budget(root: Path) -> float:
    """Return the CPU seconds that the daily tests may cost, from `pyproject.toml`."""
    with (root / "pyproject.toml").open("rb") as file:
        return float(tomllib.load(file)["tool"]["meshrl"]["tests"]["cpu_budget_s"])


def add_options(parser: pytest.Parser) -> None:
    """Add the options of this plugin."""
    parser.addoption("--costs", metavar="FILE", help="write CPU and wall seconds of tests as JSON")
    parser.addoption(
        "--hold-budget", action="store_true", help="fail if tests cost more CPU than they may"
    )
