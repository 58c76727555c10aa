"""`meshrl resume`: a run goes on where it stands, with other values of keys that may change."""

from __future__ import annotations

import asyncio
import sys
import uuid
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError, Damaged, NotFound, Refused, StateUnavailable
from meshrl.common.base.files import damage
from meshrl.common.job.changing import differences, refusal
from meshrl.common.records.checkpoints import steps_done
from meshrl.common.state import events, jobs
from meshrl.common.state.redis.client import State
from meshrl.directory import job_file, places
from meshrl.directory.asking import ANSWER_S, ask
from meshrl.directory.claims import locked, runs
from meshrl.directory.places import MeshPlace, shown
from meshrl.directory.target import Run
from meshrl.job import edited
from meshrl.run import whole


def resume(directory: Path, settings: list[str]) -> int:
    """Continues the run in a directory, with `KEY=VALUE` settings; the exit status."""
    there = (directory / "bundle").is_dir() or (directory / "job.json").is_file()
    held = record_of(directory) if there else {}
    run_dir = places.existing_run(directory)
    run = Run.of(run_dir, held)
    if "imported" in held:
        raise Refused(
            f"{run.shown} is an import of {held['imported']}: there is nothing to go on with",
            fix=f'Begin a job from it: model.path = "{run.shown}/model"',
        )
    if "mesh" in held and runs(run.place):
        return _on_the_mesh(run, settings)
    with locked(run.place, run_dir):
        whole.check(run_dir, held, run.place)
    if not settings:
        _refuse_if_done(run, held["document"], held["document"])
    from meshrl.job import jobfile  # here, because pydantic takes half a second to import

    _, was = jobfile.again(held["document"], [])  # with what later versions have added
    job, document = jobfile.again(held["document"], settings)
    changes = _allowed(run, was, document)
    _refuse_if_done(run, was, document)
    for line in edited.notice(held["file"], document, run.shown) if "file" in held else []:
        print(line)
    # Imported here: only now is it sure that a mesh will be needed.
    from meshrl.run.going_on import go_on

    return go_on(run, held, job, changes)


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
        raise too_few(now["budget"]["steps"], done)
    return changes


def _refuse_if_done(run: Run, was: dict[str, Any], now: dict[str, Any]) -> None:
    """Refused when the run has finished and gets no more steps: no mesh need start to say so."""
    summary = run.directory / "summary.json"
    if was["budget"]["steps"] < now["budget"]["steps"]:
        return
    told = places.read_if_whole(summary)
    if told.get("phase") == jobs.Phase.FINISHED and told.get("steps", 0) >= was["budget"]["steps"]:
        raise finished(run, was)


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
        raise finished(run, row.document)
    ask(run.place, lambda state: jobs.reopen(state, run.job, uuid.uuid4().hex), ANSWER_S)
    print(f"{run.job} goes on, on the mesh in {run.place.root}; meshrl watch {run.shown}")
    return 0


def too_few(steps: int, done: int) -> ConfigError:
    """The error of a budget of fewer steps than are done."""
    return ConfigError(
        f"budget.steps = {steps}, and {done} steps are done", fix=f"Set it to {done} or more"
    )


def finished(run: Run, document: dict[str, Any]) -> Refused:
    """The error of a run that has nothing left to do."""
    steps = document["budget"]["steps"]
    return Refused(
        f"{run.shown} is finished, after {steps} steps",
        fix=f"To extend it: meshrl resume {run.shown} --set budget.steps=N, N above {steps}",
    )


def record_of(directory: Path) -> dict[str, Any]:
    """What `job.json` holds, written again from Redis if need be; Damaged says what to do when
    Redis does not have it either.
    """
    run_dir = directory.absolute()
    path = run_dir / job_file.NAME
    try:
        return job_file.read(path)
    except FileNotFoundError:
        why = "it is gone"
    except Damaged as error:
        why = error.message
    store = run_dir / "store"  # of the mesh that it was submitted to, or its own
    place = MeshPlace(store.resolve().parent if store.is_symlink() else run_dir)
    about = {} if place.root == run_dir else {"mesh": str(place.root)}

    async def put_back(state: State) -> bool:
        told = await job_file.put_back(state, run_dir, about, why)
        if told is not None:
            print(damage.sentence(told), file=sys.stderr, flush=True)
            await events.append(state, damage.EVENT, told)
        return told is not None

    if place.redis.is_dir() and any(place.redis.iterdir()):
        if runs(place):
            known = ask(place, put_back, ANSWER_S)
        else:
            from meshrl.launch.head.launcher import Launcher  # only now is it needed
            from meshrl.launch.head.shape import MeshShape

            known = asyncio.run(Launcher(place, MeshShape()).ask_redis(put_back))
        if known:
            return job_file.read(path)
    raise Damaged(
        f"{path} is damaged: {why}; the run's Redis has no copy of it",
        fix=f"Put it back from a copy of the run. To start over: meshrl run JOB, which leaves "
        f"{shown(run_dir)} as it is",
    )
