"""Grades forgeries: each must score 0, and the right answer to the same tests 1."""

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

CASE_S, HANGING_CASE_S = 1.0, 0.2
BRIEFLY_S = 0.15  # for a forgery that may hang; right answers have longer
STYLES = {style: forging.read(style) for style in ("stdin", "calls", "python")}
TESTS, FORGERIES = forging.read("any")
Work = Iterator[Coroutine[Any, Any, dict[str, Any]]]


class Grader:
    """`suites` is where the real pytest runs; without it, tests in Python are isolated."""

    def __init__(
        self,
        launcher: JailLauncher,
        slots: JailSlots,
        limits: JailLimits,
        suites: PytestJails | None = None,
    ) -> None:
        self._launcher, self._slots, self._limits = launcher, slots, limits
        self._suites = suites

    async def graded(
        self,
        name: str,
        source: str,
        tests: Any,
        case_s: float,
        wanted: float = 0.0,
        refused: bool = False,
    ) -> dict[str, Any]:
        runner = "pytest" if self._suites else "isolated"
        options = {"case_s": case_s, "runner": runner}
        place = (self._launcher, self._slots, self._limits)
        grading = CodeGrader(*place, options, self._suites)
        answer = await grading.compute_reward(
            {"tests": tests}, [{"role": "model", "text": f"```python\n{source}\n```"}]
        )
        return {
            "name": name,
            "contained": (answer.status, answer.value)
            in (("ok", wanted), *([("unsupported", None)] if refused else [])),
            "status": answer.status,
            "error": answer.error,
            "said": str(answer.value),
        }

    def all_styles(self) -> Work:
        """Answers that are wrong in whatever style they are tested."""
        for forgery in FORGERIES:
            case_s = HANGING_CASE_S if forgery.brief else scaled(CASE_S)
            for style, tests in TESTS.items():
                yield self.graded(f"{forgery.name} ({style})", forgery.source, tests, case_s)

    def styles(self) -> Work:
        for style in STYLES:
            yield from self.style(style)

    def style(self, style: str) -> Work:
        """Answers that are made for tests of one style, and the right ones to the same tests."""
        suites, wrong = STYLES[style]
        for name, suite in suites.items():
            yield self.graded(
                f"right: {name} ({style})", suite.right, suite.tests, scaled(CASE_S), 1.0
            )
        for forgery in wrong:
            tests = suites[forgery.suite].tests
            yield self.graded(
                f"{forgery.name} ({style})",
                forgery.source,
                tests,
                BRIEFLY_S,
                refused=forgery.refused,
            )
