"""Outcomes as a Markdown table for docs/operate/gpu.md, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadtests.gpu.case_runner import PASSED, Outcome
from loadtests.gpu.plan import Figures

DIGITS = 4


def format_table(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table with a row of each case."""
    rows = ["| part | case | result | figures | s |", "|---|---|---|---|---|"]
    rows += [
        f"| {row.case.part} | {row.case.name} | {row.state} | {describe(row)} | {row.seconds:.1f} |"
        for row in outcomes
    ]
    return "\n".join(rows)


def describe(outcome: Outcome) -> str:
    """Return a row's figures as text on one line, or the reason why there are none."""
    reason = " ".join(outcome.reason.split()).replace("|", "\\|")
    figures = ", ".join(f"{name} {value}" for name, value in round_figures(outcome.figures).items())
    return "; ".join(text for text in (figures, reason) if text)


def round_figures(figures: Figures) -> Figures:
    """Return the figures with four digits."""
    return {
        name: float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
        for name, value in figures.items()
    }


def nest_figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return figures by part and case, with names of the cases that failed or were skipped."""
    found: dict[str, Any] = {}
    for outcome in outcomes:
        figures = found.setdefault(outcome.case.part, {})
        figures[outcome.case.name] = round_figures(outcome.figures)
        if outcome.state != PASSED:
            label = f"{outcome.case.part}.{outcome.case.name}"
            found.setdefault(outcome.state, []).append(f"{label}: {outcome.reason}")
    return found
