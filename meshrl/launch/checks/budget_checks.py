"""Checks of the byte budgets that a host's workers take from the environment."""

from __future__ import annotations

import os

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.host.settings import BUDGET_VARIABLES
from meshrl.job.job_file import JobFile


def check_budgets(job: JobFile) -> None:
    """Check the byte budgets of the workers of the job's mesh."""
    require_valid_budgets()


def require_valid_budgets() -> None:
    """Raise ConfigError unless each byte budget in the environment is a whole number."""
    for variable in BUDGET_VARIABLES.values():
        text = os.environ.get(variable, "0")
        if not text.isdecimal():
            raise ConfigError(
                f"{text!r} is not a number of bytes",
                where=f"${variable}",
                fix="Set a whole number, such as 8000000000, or remove the variable",
            )
