"""Findings about a run's health, as data and as lines for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from meshrl.view.health.case import Case, Severity, Verdict
from meshrl.view.health.rules import RULES
from meshrl.view.health.run_figures import RunFigures


@dataclass(frozen=True)
class Finding:
    """Finding of a rule at a step. `severity`: warning; failure if the run cannot have learned."""

    rule: str
    severity: str
    step: int
    text: str
    cause: str
    keys: tuple[str, ...]

    @property
    def is_failure(self) -> bool:
        return self.severity == Severity.FAILURE.name.lower()

    @property
    def line(self) -> str:
        """Finding in words, with its likely cause and the keys to change."""
        kind = "no learning" if self.is_failure else "warning"
        *others, last = self.keys
        keys = f"{', '.join(others)} or {last}" if others else last
        return f"{kind} ({self.rule}): {self.text}. Likely cause: {self.cause}. Change {keys}"

    def to_document(self) -> dict[str, Any]:
        """Return the finding as JSON."""
        return asdict(self) | {"keys": list(self.keys)}


def judge_run(
    figures: RunFigures,
    document: Mapping[str, Any],
    counts: Mapping[str, int] | None = None,
    is_over: bool = False,
) -> dict[str, Verdict]:
    """Return the verdict of each rule that can judge the run, by its name.

    Args:
        figures: Figures of the run's steps.
        document: Document of the job.
        counts: Trajectories by outcome; None: not known.
        is_over: No further step comes.
    """
    case = Case(figures, document, counts or {}, is_over)
    if not figures.steps:
        return {}
    verdicts = ((rule.name, rule.judge(case)) for rule in RULES)
    return {name: verdict for name, verdict in verdicts if verdict is not None}


def find_problems(
    figures: RunFigures,
    document: Mapping[str, Any],
    counts: Mapping[str, int] | None = None,
    is_over: bool = False,
) -> tuple[Finding, ...]:
    """Return the findings about a run, failures first; the arguments are those of `judge_run`."""
    verdicts = judge_run(figures, document, counts, is_over)
    named = {name for name, verdict in verdicts.items() if verdict.severity}
    found = [
        Finding(
            rule=rule.name,
            severity=verdict.severity.name.lower(),
            step=figures.last_step,
            text=verdict.text,
            cause=verdict.cause or rule.cause,
            keys=verdict.keys or rule.keys,
        )
        for rule in RULES
        if rule.name in named and not named & {*rule.follows_from}
        for verdict in (verdicts[rule.name],)
    ]
    return tuple(sorted(found, key=lambda finding: not finding.is_failure))


def parse_findings(rows: Iterable[Mapping[str, Any]]) -> tuple[Finding, ...]:
    """Return the findings in the summary of a run."""
    return tuple(Finding(**{**row, "keys": tuple(row["keys"])}) for row in rows)


def has_failure(findings: Iterable[Finding]) -> bool:
    """Return True if the run cannot have learned."""
    return any(finding.is_failure for finding in findings)
