"""Restore of jobs that Redis has lost: each at its newest checkpoint, in a lineage of its own."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError, CorruptData, MeshError, NotFound
from meshrl.common.records.checkpoints import (
    find_committed,
    is_initial,
    list_manifest_paths,
    read_best_version,
    read_last_lineage,
    read_manifest,
)
from meshrl.common.state import jobs, steps
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.server_state.rollback import JobWatermark, StateWatermark
from meshrl.directory.directory_paths import read_json
from meshrl.launch.redis.run_watermark import read_run_watermark


async def restore_job(
    state: StateClient, run_dir: Path, job: str, document: dict[str, Any], watermark: JobWatermark
) -> Path | None:
    """Submit a job that Redis has lost, from its newest checkpoint or else from its beginning.

    Returns the checkpoint. `watermark`: the furthest known progress of the job. A job that had
    begun resumes in a lineage above all that its record and its checkpoints name. The checkpoint
    before its first step is enough for that: groups are opened from then on, and a power cut may
    have removed every record of them.
    """
    checkpoint, lineage = (
        find_newest_checkpoint(run_dir),
        max(watermark.lineage, read_last_lineage(run_dir)),
    )
    if checkpoint is not None:
        manifest = read_manifest(checkpoint)
        account = manifest["account"] | {
            "manifest": manifest["weights"],
            "checkpoint": checkpoint.stem,
        }
        account |= {key: manifest.get(key, "") for key in ("image", "masters")}
        if (found := read_best_version(run_dir)) is not None:  # perhaps after the checkpoint
            best_fields = {
                "best_version": found.version,
                "best_manifest": found.manifest_digest,
                "best_value": found.value,
            }
            account["kept"] = account.get("kept", {}) | best_fields
        await steps.restore_job(state, job, document, str(run_dir), account, lineage)
        return checkpoint
    if find_committed(run_dir) is None and (run_dir / "metrics.jsonl").is_file():
        raise NotFound(
            f"{run_dir} has neither Redis data nor a checkpoint",
            fix="Run `meshrl run JOB` to start over",
        )
    recorded = read_run_watermark(run_dir, job).jobs.get(job)
    has_begun = watermark.has_begun or (recorded is not None and recorded.has_begun)
    if has_begun or list_manifest_paths(run_dir):
        await steps.restart_job(state, job, document, str(run_dir), lineage)
    else:
        await jobs.submit(state, job, document, str(run_dir), uuid.uuid4().hex)
    return None


def find_newest_checkpoint(run_dir: Path) -> Path | None:
    """Return the last committed checkpoint; the one before the first step has no account."""
    found = find_committed(run_dir)
    return None if found is None or is_initial(found) else found


async def restore_all_jobs(state: StateClient, watermark: StateWatermark, required: bool) -> None:
    """Restore every known job that had not ended and is missing, and print each.

    A job that fails does not block the others. `required`: raise its error when no job can be
    restored.
    """
    there, errors, back = {row.id for row in await jobs.read_jobs(state)}, list[MeshError](), 0
    for job, one in watermark.jobs.items():
        if job in there or one.phase in jobs.TERMINAL_PHASES or not one.run_dir:
            continue
        run_dir = Path(one.run_dir)
        try:
            document = read_json(run_dir / "job.json")["document"]
            checkpoint = await restore_job(state, run_dir, job, document, one)
        except (NotFound, CorruptData, ConfigError, OSError) as error:
            errors.append(NotFound(f"{job} cannot resume: {error}", where=str(run_dir)))
            print(errors[-1], file=sys.stderr, flush=True)
            continue
        back += 1
        at = checkpoint.name if checkpoint is not None else "its beginning"
        print(f"{job} restarts from {at}", flush=True)
    if required and errors and not back:
        raise errors[0]
