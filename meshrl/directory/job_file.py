"""`job.json`, which says what a run is: read, and written again from the copy in Redis."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import Damaged
from meshrl.common.base.files import damage
from meshrl.common.state import jobs
from meshrl.common.state.redis.client import State
from meshrl.directory.places import read_json, write_json

NAME = "job.json"
BROUGHT = "brought"  # from which URL, of a run that another host has made


def read(path: Path) -> dict[str, Any]:
    """What a run's `job.json` holds: job, document, and what was packed. Damaged when that cannot
    be told, FileNotFoundError when there is none.
    """
    held = read_json(path)
    if not isinstance(held.get("job"), str) or not isinstance(held.get("document"), dict):
        raise Damaged("it names no job, or not what the job is", where=str(path))
    return held


async def put_back(
    state: State, run_dir: Path, about: Mapping[str, Any], why: str
) -> dict[str, Any] | None:
    """Writes a damaged one again from what Redis has of the job in this directory, with `about`;
    the fields of an event. None: Redis has no such job.
    """
    rows = [row for row in await jobs.jobs(state) if row.run_dir == str(run_dir)]
    if not rows:
        return None
    path = run_dir / NAME
    aside = damage.set_aside(path, run_dir) if path.exists() else None
    write_json(path, {"job": rows[-1].id, "document": rows[-1].document} | dict(about))
    then = "written again from the copy in Redis"
    return damage.fields("job", path, why, then, job=rows[-1].id, aside=aside)
