"""A job that code or a person hands in, checked as `meshrl run` does before it starts a mesh."""

from __future__ import annotations

from pathlib import Path

from meshrl.common.job.config import JobConfig
from meshrl.job import job_reader
from meshrl.job.checks.host import all_checks as checks
from meshrl.job.job_file import JobFile


def load_checked_job(
    job: Path | str | JobConfig | JobFile, overrides: list[str], base: Path | None
) -> JobFile:
    """The job with absolute paths; ConfigError names the key that is wrong. A JobFile has been
    checked.
    """
    if isinstance(job, JobFile):
        return job
    if isinstance(job, JobConfig):
        found = job_reader.check_config(job, (base or Path.cwd()).resolve(), overrides)
    else:
        found = job_reader.read_job_file(Path(job), overrides)
    checks.check_host(found)
    return found
