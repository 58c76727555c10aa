"""`meshrl resume`: a run goes on where it stands, with other values of keys that may change."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError, NotFound, Refused, StateUnavailable
from common.job.changing import changed, differences, refusal
from common.job.config import JobConfig
from common.records.checkpoints import steps_done
from common.state import embedded, jobs
from meshrl.asking import ANSWER_S, ask
from meshrl.job import edited, jobfile
from meshrl.launch import places
from meshrl.launch.claims import locked, runs
from meshrl.launch.launcher import Launcher, Shape, shape_of
from meshrl.launch.places import MeshPlace, write_json
from meshrl.launch.session import put_back, session, shape_for
from meshrl.preflight import checks
from meshrl.run import whole
from meshrl.run.target import Run


def resume(directory: Path, settings: list[str]) -> int:
    """Continues the run in a directory, with `KEY=VALUE` settings; the exit status."""
    run_dir = places.existing_run(directory)
    held = whole.record_of(run_dir)
    run = Run(run_dir, held["job"], MeshPlace(Path(held.get("mesh", run_dir))))
    if "mesh" in held and runs(run.place):
        return _on_the_mesh(run, settings)
    with locked(run.place, run_dir):
        whole.check(run_dir, held, run.place)
    _, was = jobfile.again(held["document"], [])  # with what later versions have added
    job, document = jobfile.again(held["document"], settings)
    changes = _allowed(run, was, document)
    _refuse_if_done(run, held["document"], document)
    for line in edited.notice(held["file"], document, run.shown) if "file" in held else []:
        print(line)
    if changes:
        checks.check(job)
    elif run.place.root == run_dir:
        checks.check_mesh(job)
    begin = _Begin(run, held, document, changes)
    return asyncio.run(session(run_dir, _shape(run, job.config), begin))


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
            checkpoint = await put_back(state, run.directory, run.job, was)
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
                raise _too_few(steps, row.version)
            await jobs.change(state, run.job, document, changes, uuid.uuid4().hex)
            self._remember(row, document, changes)
            for key, (old, new) in changes.items():
                print(f"{key}: {old} -> {new}, from step {row.version + 1} on", flush=True)
            row = await jobs.job(state, run.job)
        elif self.held["document"] != document:  # it was changed, and cut off before it was noted
            write_json(run.directory / "job.json", self.held | {"document": document})
        if row.phase == jobs.Phase.FINISHED:
            raise _finished(run, row.document)
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


def _allowed(run: Run, was: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The changes of a document; ConfigError says which of them may not be, and why."""
    changes = differences(was, now)
    refused = {key: why for key, (old, new) in changes.items() if (why := refusal(key, old, new))}
    if refused:
        raise ConfigError(
            "; ".join(f"{key} may not change in a run: {why}" for key, why in refused.items()),
            fix="Start a new run with it: meshrl run JOB --set KEY=VALUE",
        )
    if run.place.root != run.directory and (own := [k for k in changes if k.startswith("mesh.")]):
        raise ConfigError(
            f"{own[0]} is the mesh's, which the run was submitted to",
            fix=f"meshrl down --mesh {run.place.root}, and meshrl up with other options",
        )
    done = steps_done(run.directory)
    if "budget.steps" in changes and now["budget"]["steps"] < done:
        raise _too_few(now["budget"]["steps"], done)
    return changes


def _too_few(steps: int, done: int) -> ConfigError:
    return ConfigError(
        f"budget.steps = {steps}, and {done} steps are done", fix=f"Set it to {done} or more"
    )


def _refuse_if_done(run: Run, was: dict[str, Any], now: dict[str, Any]) -> None:
    """Refused when the run has finished and gets no more steps: no mesh need start to say so."""
    summary = run.directory / "summary.json"
    if not summary.is_file() or was["budget"]["steps"] < now["budget"]["steps"]:
        return
    told = places.read_json(summary)
    if told.get("phase") == jobs.Phase.FINISHED and told.get("steps", 0) >= was["budget"]["steps"]:
        raise _finished(run, was)


def _finished(run: Run, document: dict[str, Any]) -> Refused:
    steps = document["budget"]["steps"]
    return Refused(
        f"{run.shown} is finished, after {steps} steps",
        fix=f"To extend it: meshrl resume {run.shown} --set budget.steps=N, N above {steps}",
    )


def _shape(run: Run, config: JobConfig) -> Shape:
    """The mesh that the job asks for now, or the one that it was submitted to."""
    if run.place.root == run.directory:
        return shape_for(config)
    return shape_of(run.place)


def _on_the_mesh(run: Run, settings: list[str]) -> int:
    """A job that was stopped goes on, on its mesh, which runs."""
    try:
        row = ask(run.place, lambda state: jobs.job(state, run.job), ANSWER_S)
    except (NotFound, StateUnavailable) as error:
        raise Refused(
            f"the mesh in {run.place.root} runs, and does not know {run.shown}: {error.message}",
            fix=f"meshrl down --mesh {run.place.root}; then resume the run",
        ) from error
    if not row.ended:
        raise Refused(
            f"{run.shown} goes on, on the mesh in {run.place.root}",
            fix=f"meshrl watch {run.shown} shows it",
        )
    if settings:
        raise Refused(
            f"{run.shown} is on the mesh in {run.place.root}, whose processes have read its job",
            fix=f"meshrl down --mesh {run.place.root}; then resume the run with --set",
        )
    if row.phase == jobs.Phase.FINISHED:
        raise _finished(run, row.document)
    ask(run.place, lambda state: jobs.reopen(state, run.job, uuid.uuid4().hex), ANSWER_S)
    print(f"{run.job} goes on, on the mesh in {run.place.root}; meshrl watch {run.shown}")
    return 0
