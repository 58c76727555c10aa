"""A run that is resumed: its mesh starts again, and Redis has the job with its changes before any
service looks for one.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from typing import Any

from common.base.errors import Refused
from common.job.changing import changed, differences
from common.job.config import JobConfig
from common.state import jobs
from common.state.redis import embedded
from meshrl.directory.places import write_json
from meshrl.directory.target import Run
from meshrl.job.loaded import JobFile
from meshrl.launch.checks import mesh_checks
from meshrl.launch.head.launcher import Launcher
from meshrl.launch.head.restoring import put_back
from meshrl.launch.head.shape import MeshShape, shape_of
from meshrl.run.refusals import finished, too_few
from meshrl.run.session import session, shape_for


def go_on(
    run: Run,
    held: dict[str, Any],
    job: JobFile,
    document: dict[str, Any],
    changes: dict[str, tuple[Any, Any]],
) -> int:
    """The rest of the run; the exit status. `held` is what `job.json` says, `document` what the run
    is to go on with, and `changes` how it differs.
    """
    if changes:
        mesh_checks.check(job)
    elif run.place.root == run.directory:
        mesh_checks.check_mesh(job)
    begin = _Begin(run, held, document, changes)
    return asyncio.run(session(run.directory, _shape(run, job.config), begin))


@dataclass(frozen=True)
class _Begin:
    """Gives Redis the job, and the changes to it, before any service runs."""

    run: Run
    held: dict[str, Any]  # what job.json says
    document: dict[str, Any]
    changes: dict[str, tuple[Any, Any]]

    async def __call__(self, launcher: Launcher) -> None:
        run, state = self.run, launcher.state
        known = {row.id: row for row in await jobs.jobs(state)}
        if run.job not in known:
            was = self.held["document"]
            seen = launcher.seen(run.job)
            checkpoint = await put_back(state, run.directory, run.job, was, seen)
            if checkpoint is not None:
                print(f"redis has no job {run.job}; it starts again from {checkpoint.name}")
        elif known[run.job].run_dir != str(run.directory):
            shown = embedded.without_password(embedded.configured_url())
            raise Refused(f"another job named {run.job} is in {shown}")
        row = await jobs.job(state, run.job)
        document = self._document(row)
        if changes := differences(row.document, document):
            steps = document["budget"]["steps"]
            if steps < row.version:
                raise too_few(steps, row.version)
            await jobs.change(state, run.job, document, changes, uuid.uuid4().hex)
            self._remember(row, document, changes)
            for key, (old, new) in changes.items():
                print(f"{key}: {old} -> {new}, from step {row.version + 1} on", flush=True)
            row = await jobs.job(state, run.job)
        elif self.held["document"] != document:  # it was changed, and cut off before it was noted
            write_json(run.directory / "job.json", self.held | {"document": document})
        if row.phase == jobs.Phase.FINISHED:
            raise finished(run, row.document)
        if row.ended:
            await jobs.reopen(state, run.job, uuid.uuid4().hex)

    def _document(self, row: jobs.JobRow) -> dict[str, Any]:
        """What Redis has is what the steps were done with; the user's changes go on top of it."""
        values = {key: new for key, (_, new) in self.changes.items()}
        return changed(row.document, values)

    def _remember(
        self, row: jobs.JobRow, document: dict[str, Any], changes: dict[str, tuple[Any, Any]]
    ) -> None:
        told = {
            "from_step": row.version + 1,
            "lineage": row.lineage,
            "was": {key: old for key, (old, _) in changes.items()},
            "set": {key: new for key, (_, new) in changes.items()},
        }
        changed_so_far = [*self.held.get("changes", []), told]
        record = self.held | {"document": document, "changes": changed_so_far}
        write_json(self.run.directory / "job.json", record)


def _shape(run: Run, config: JobConfig) -> MeshShape:
    """The mesh that the job asks for now, or the one that it was submitted to."""
    if run.place.root == run.directory:
        return shape_for(config)
    return shape_of(run.place)
