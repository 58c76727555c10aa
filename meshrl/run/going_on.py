"""A run that is resumed: its mesh starts again, and Redis has the job with its changes before any
service looks for one.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from meshrl.common.base.errors import Refused
from meshrl.common.job.changing import changed, differences
from meshrl.common.state import jobs
from meshrl.common.state.redis import embedded
from meshrl.common.state.redis.client import State
from meshrl.directory.places import write_json
from meshrl.directory.target import Run
from meshrl.job.loaded import JobFile
from meshrl.launch.checks import mesh_checks
from meshrl.launch.head.launcher import Launcher
from meshrl.launch.head.restoring import put_back
from meshrl.launch.head.shape import shape_of
from meshrl.run.resuming import finished, too_few
from meshrl.run.session import session, shape_for


def go_on(run: Run, held: dict[str, Any], job: JobFile, changes: dict[str, tuple[Any, Any]]) -> int:
    """The rest of the run; the exit status. `held` is what `job.json` says, `job` what the run is
    to go on with, and `changes` how that differs.
    """
    own = run.place.root == run.directory
    if changes:
        mesh_checks.check(job)
    elif own:
        mesh_checks.check_mesh(job)

    async def begin(launcher: Launcher) -> None:
        row = await _known(run, held, launcher)
        # What Redis has is what the steps were done with; the user's changes go on top of it.
        document = changed(row.document, {key: new for key, (_, new) in changes.items()})
        await _change(run, held, row, document, launcher.state)

    # The mesh that the job asks for now, or the one that it was submitted to.
    shape = shape_for(job.config) if own else shape_of(run.place)
    return asyncio.run(session(run.directory, shape, begin))


async def _known(run: Run, held: dict[str, Any], launcher: Launcher) -> jobs.JobRow:
    """The job as Redis has it, given back to it if it is gone, before any service runs."""
    state = launcher.state
    known = {row.id: row for row in await jobs.jobs(state)}
    if run.job not in known:
        seen = launcher.seen(run.job)
        checkpoint = await put_back(state, run.directory, run.job, held["document"], seen)
        if checkpoint is not None:
            print(f"redis has no job {run.job}; it starts again from {checkpoint.name}")
    elif known[run.job].run_dir != str(run.directory):
        shown = embedded.without_password(embedded.configured_url())
        raise Refused(f"another job named {run.job} is in {shown}")
    return await jobs.job(state, run.job)


async def _change(
    run: Run, held: dict[str, Any], row: jobs.JobRow, document: dict[str, Any], state: State
) -> None:
    """Puts what the run is to go on with on record, and opens it again if it had ended."""
    path = run.directory / "job.json"
    if changes := differences(row.document, document):
        steps = document["budget"]["steps"]
        if steps < row.version:
            raise too_few(steps, row.version)
        await jobs.change(state, run.job, document, changes, uuid.uuid4().hex)
        told = {
            "from_step": row.version + 1,
            "lineage": row.lineage,
            "was": {key: old for key, (old, _) in changes.items()},
            "set": {key: new for key, (_, new) in changes.items()},
        }
        so_far = [*held.get("changes", []), told]
        write_json(path, held | {"document": document, "changes": so_far})
        for key, (old, new) in changes.items():
            print(f"{key}: {old} -> {new}, from step {row.version + 1} on", flush=True)
        row = await jobs.job(state, run.job)
    elif held["document"] != document:  # it was changed, and cut off before it was noted
        write_json(path, held | {"document": document})
    if row.phase == jobs.Phase.FINISHED:
        raise finished(run, row.document)
    if row.ended:
        await jobs.reopen(state, run.job, uuid.uuid4().hex)
