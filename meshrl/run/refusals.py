"""Errors of a run that cannot go on as asked."""

from __future__ import annotations

from typing import Any

from common.base.errors import ConfigError, Refused
from meshrl.directory.target import Run


def too_few(steps: int, done: int) -> ConfigError:
    """The error of a budget of fewer steps than are done."""
    return ConfigError(
        f"budget.steps = {steps}, and {done} steps are done", fix=f"Set it to {done} or more"
    )


def finished(run: Run, document: dict[str, Any]) -> Refused:
    """The error of a run that has nothing left to do."""
    steps = document["budget"]["steps"]
    return Refused(
        f"{run.shown} is finished, after {steps} steps",
        fix=f"To extend it: meshrl resume {run.shown} --set budget.steps=N, N above {steps}",
    )
