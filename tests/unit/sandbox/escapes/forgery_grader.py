"""Grading of forgeries: each must score 0, and the right answer to the same tests 1."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from typing import Any

from meshrl.services.sandbox.grading.code.code_reward import CodeGrader
from meshrl.services.sandbox.grading.code.pytest_tests import PytestJails
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.resources.limits import JailLimits
from meshrl.services.sandbox.isolation.resources.slots import JailSlots
from tests.load import scaled
from tests.unit.sandbox.escapes import forging

CASE_S, HANGING_CASE_S = 1.0, 0.1
SHORT_CASE_S = 0.15  # for a forgery that may hang; right answers have more time
STYLES = {style: forging.read(style) for style in ("stdin", "calls", "python")}
TESTS, FORGERIES = forging.read("any")
Work = Iterator[Coroutine[Any, Any, dict[str, Any]]]


class Grader:
    """Grader of forgeries. `suites` runs the real pytest; without it, Python tests are isolated."""

    def __init__(
        self,
        launcher: JailLauncher,
        slots: JailSlots,
        limits: JailLimits,
        suites: PytestJails | None = None,
    ) -> None:
        self._launcher, self._slots, self._limits = launcher, slots, limits
        self._suites = suites

    async def grade(
        self,
        name: str,
        source: str,
        tests: Any,
        case_s: float,
        expected_score: float = 0.0,
        refused: bool = False,
    ) -> dict[str, Any]:
        runner = "pytest" if self._suites else "isolated"
        options = {"case_s": case_s, "runner": runner}
        resources = (self._launcher, self._slots, self._limits)
        grader = CodeGrader(*resources, options, self._suites)
        answer = await grader.compute_reward(
            {"tests": tests}, [{"role": "model", "text": f"```python\n{source}\n```"}]
        )
        return {
            "name": name,
            "contained": (answer.status, answer.value)
            in (("ok", expected_score), *([("unsupported", None)] if refused else [])),
            "status": answer.status,
            "error": answer.error,
            "said": str(answer.value),
        }

    def grade_all_styles(self) -> Work:
        """Grade answers that are wrong in every style of tests."""
        for forgery in FORGERIES:
            case_s = HANGING_CASE_S if forgery.brief else scaled(CASE_S)
            for style, tests in TESTS.items():
                yield self.grade(f"{forgery.name} ({style})", forgery.source, tests, case_s)

    def grade_each_style(self) -> Work:
        for style in STYLES:
            yield from self.grade_style(style)

    def grade_style(self, style: str) -> Work:
        """Grade the forgeries of one style of tests, and the right answers to the same tests."""
        suites, forgeries = STYLES[style]
        for name, suite in suites.items():
            yield self.grade(
                f"right: {name} ({style})", suite.right, suite.tests, scaled(CASE_S), 1.0
            )
        for forgery in forgeries:
            tests = suites[forgery.suite].tests
            yield self.grade(
                f"{forgery.name} ({style})",
                forgery.source,
                tests,
                SHORT_CASE_S,
                refused=forgery.refused,
            )
