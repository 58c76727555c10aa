"""Puts jobs back that Redis does not have any more: each at its newest checkpoint, in a lineage of
its own.
"""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError, Damaged, MeshError, NotFound
from meshrl.common.records.checkpoints import (
    all_checkpoints,
    best,
    committed,
    is_first,
    last_lineage,
    manifest_of,
)
from meshrl.common.state import jobs, steps
from meshrl.common.state.redis.client import State
from meshrl.common.state.server.rollback import JobMark, RollbackMark
from meshrl.directory.places import read_json
from meshrl.launch.redis.recorded import recorded


async def put_back(
    state: State,
    run_dir: Path,
    job: str,
    document: dict[str, Any],
    seen: JobMark,
) -> Path | None:
    """Submits a job that Redis does not have: as its newest checkpoint, which is returned, has it,
    or else from its beginning. `seen`: how far anybody has seen it come.

    A job that had begun goes on in a lineage above all that its record and its checkpoints tell of.
    The checkpoint before its first step is enough for that: groups are opened from then on, and a
    power cut may have taken all that told of them.
    """
    checkpoint, lineage = newest_checkpoint(run_dir), max(seen.lineage, last_lineage(run_dir))
    if checkpoint is not None:
        held = manifest_of(checkpoint)
        account = held["account"] | {"manifest": held["weights"], "checkpoint": checkpoint.stem}
        account |= {key: held.get(key, "") for key in ("image", "masters")}
        if (found := best(run_dir)) is not None:  # perhaps after the checkpoint
            kept = {
                "best_version": found.version,
                "best_manifest": found.manifest,
                "best_value": found.value,
            }
            account["kept"] = account.get("kept", {}) | kept
        await steps.restore_job(state, job, document, str(run_dir), account, lineage)
        return checkpoint
    if committed(run_dir) is None and (run_dir / "metrics.jsonl").is_file():
        raise NotFound(
            f"{run_dir} has neither Redis data nor a checkpoint",
            fix="Start over with `meshrl run JOB`",
        )
    told = recorded(run_dir, job).jobs.get(job)
    begun = seen.begun or (told is not None and told.begun)
    if begun or all_checkpoints(run_dir):
        await steps.restart_job(state, job, document, str(run_dir), lineage)
    else:
        await jobs.submit(state, job, document, str(run_dir), uuid.uuid4().hex)
    return None


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The last committed checkpoint; the one before the first step has no account."""
    found = committed(run_dir)
    return None if found is None or is_first(found) else found


async def put_all_back(state: State, known: RollbackMark, needed: bool) -> None:
    """Puts back every job that was known, had not ended, and is not there, and says so.

    One that cannot be keeps no other from going on; `needed`: its error is raised when none can.
    """
    there, errors, back = {row.id for row in await jobs.jobs(state)}, list[MeshError](), 0
    for job, one in known.jobs.items():
        if job in there or one.phase in jobs.ENDED or not one.run_dir:
            continue
        run_dir = Path(one.run_dir)
        try:
            document = read_json(run_dir / "job.json")["document"]
            checkpoint = await put_back(state, run_dir, job, document, one)
        except (NotFound, Damaged, ConfigError, OSError) as error:
            errors.append(NotFound(f"{job} cannot go on: {error}", where=str(run_dir)))
            print(errors[-1], file=sys.stderr, flush=True)
            continue
        back += 1
        at = checkpoint.name if checkpoint is not None else "its beginning"
        print(f"{job} starts again from {at}", flush=True)
    if needed and errors and not back:
        raise errors[0]
