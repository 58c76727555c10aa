"""Check of a submitted job, as `meshrl run` does before it starts a mesh."""

from __future__ import annotations

from pathlib import Path

from meshrl.common.job.config import JobConfig
from meshrl.job import hub_origins, job_reader
from meshrl.job.checks.host import all_checks as checks
from meshrl.job.job_file import JobFile


def load_checked_job(
    job: Path | str | JobConfig | JobFile, overrides: list[str], base: Path | None
) -> JobFile:
    """Return the job with absolute paths, checked unless it is a JobFile.

    Raises ConfigError with the wrong key.
    """
    if isinstance(job, JobFile):
        return job
    if isinstance(job, JobConfig):
        found = job_reader.check_config(job, (base or Path.cwd()).resolve(), overrides)
    else:
        found = job_reader.read_job_file(Path(job), overrides)
    checks.check_host(found)
    hub_origins.fetch_weights(found)
    return found
