"""A job that code or a person hands in, checked as `meshrl run` does before it starts a mesh."""

from __future__ import annotations

from pathlib import Path

from meshrl.common.job.config import JobConfig
from meshrl.job import jobfile
from meshrl.job.checks.machine import all_checks as checks
from meshrl.job.loaded import JobFile


def job_file(
    job: Path | str | JobConfig | JobFile, overrides: list[str], base: Path | None
) -> JobFile:
    """The job with absolute paths; ConfigError names the key that is wrong. A JobFile has been
    checked.
    """
    if isinstance(job, JobFile):
        return job
    if isinstance(job, JobConfig):
        found = jobfile.of_config(job, (base or Path.cwd()).resolve(), overrides)
    else:
        found = jobfile.read(Path(job), overrides)
    checks.check(found)
    return found
