"""`job.json`, which identifies a run: read, and rewritten from the copy in Redis."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import CorruptData
from meshrl.common.base.files import corruption
from meshrl.common.state import jobs
from meshrl.common.state.redis.client import StateClient
from meshrl.directory.directory_paths import read_json, write_json

JOB_FILE_NAME = "job.json"
SOURCE_URL_KEY = "brought"  # from which URL, of a run that another host has made


def read_job_file(path: Path) -> dict[str, Any]:
    """Return a run's `job.json`: job, document, and packed files.

    Raises CorruptData when it is invalid, FileNotFoundError when there is none.
    """
    content = read_json(path)
    if not isinstance(content.get("job"), str) or not isinstance(content.get("document"), dict):
        raise CorruptData("it lacks the job's name or its document", where=str(path))
    return content


async def restore_job_file(
    state: StateClient, run_dir: Path, extra_fields: Mapping[str, Any], reason: str
) -> dict[str, Any] | None:
    """Rewrite a corrupt `job.json` from Redis, with `extra_fields`; return the fields of an event.

    Returns None if Redis has no job in this directory.
    """
    rows = [row for row in await jobs.read_jobs(state) if row.run_dir == str(run_dir)]
    if not rows:
        return None
    path = run_dir / JOB_FILE_NAME
    quarantined_path = corruption.quarantine(path, run_dir) if path.exists() else None
    write_json(path, {"job": rows[-1].id, "document": rows[-1].document} | dict(extra_fields))
    then = "rewritten from the copy in Redis"
    return corruption.make_event_fields(
        "job", path, reason, then, job=rows[-1].id, quarantined_path=quarantined_path
    )
