"""`meshrl resume`: a run goes on where it stands, with other values of keys that may change."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrl.common.base.errors import (
    BadMessage,
    ConfigError,
    Damaged,
    NotFound,
    Refused,
    StateUnavailable,
)
from meshrl.common.base.files import damage
from meshrl.common.job.bundle import bundle_files
from meshrl.common.job.changing import changed, differences, refusal
from meshrl.common.records.checkpoints import (
    STATE,
    all_checkpoints,
    is_first,
    last_named,
    manifest_of,
    steps_done,
)
from meshrl.common.state import events, jobs
from meshrl.common.state.redis import embedded
from meshrl.common.state.redis.client import State
from meshrl.common.weights.chunks.chunks import ChunkStore
from meshrl.common.weights.layout.manifest import read_whole
from meshrl.directory import job_file, places
from meshrl.directory.asking import ANSWER_S, ask
from meshrl.directory.claims import locked, runs
from meshrl.directory.places import MeshPlace, shown, write_json
from meshrl.directory.target import Run
from meshrl.job import edited
from meshrl.job.loaded import JobFile
from meshrl.launch.head.restoring import put_back
from meshrl.launch.head.shape import MeshShape, shape_of

if TYPE_CHECKING:
    from meshrl.launch.head.launcher import Launcher


def go_on(run: Run, held: dict[str, Any], job: JobFile, changes: dict[str, tuple[Any, Any]]) -> int:
    """The rest of the run; the exit status. `held` is what `job.json` says, `job` what the run is
    to go on with, and `changes` how that differs.
    """
    from meshrl.launch.checks import mesh_checks  # a run that is refused needs none of these
    from meshrl.run.session import session, shape_for

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


NAMED = 3  # missing files that an error names


def check(run_dir: Path, held: Mapping[str, Any], place: MeshPlace) -> None:
    """Returns if the run is whole; NotFound or Damaged names what is not. Files of its record are
    mended when it goes on.
    """
    if place.root != run_dir and not place.directory.is_dir():
        raise NotFound(
            f"the mesh that the run in {run_dir} was submitted to is gone: {place.root}",
            fix="Its Redis data and weights were there. " + _START_OVER,
        )
    _bundle(run_dir, held)
    _checkpoint(run_dir, place)


def _bundle(run_dir: Path, held: Mapping[str, Any]) -> None:
    told = held["document"]["bundle"]
    bundle = Path(told["dir"])
    if not bundle.is_relative_to(run_dir.resolve()) and not bundle.is_relative_to(run_dir):
        made = bundle.parent.parent
        raise NotFound(
            f"the run in {run_dir} was made in {made}, and its records name that place",
            fix=f"Move it back: mv {run_dir} {made}",
        )
    if not bundle.is_dir():
        raise NotFound(f"the run is not whole: {bundle} is missing", fix=bundle_files.START_OVER)
    try:
        bundle_files.check(bundle, bundle_files.of(held["document"]), large=True)
    except Damaged as error:
        raise Damaged(f"the run is not whole: {error.message}", fix=error.fix) from error


def _checkpoint(run_dir: Path, place: MeshPlace) -> None:
    """Returns if there is a checkpoint to go on from, or nothing to go on from: the trainer passes
    over those that are not whole, and checks every byte of the one that it takes.
    """
    named, paths = last_named(run_dir), all_checkpoints(run_dir)
    redis = place.redis.is_dir() and any(place.redis.iterdir())
    if (not named and not paths) or (not redis and all(is_first(path) for path in paths)):
        return
    chunks = ChunkStore(place.root / "store")
    trouble = f"{run_dir / 'checkpoints' / named}.json: it is missing"
    for number, path in enumerate(reversed(paths)):
        missing = _missing_of(path, chunks)
        if missing is None:
            return
        trouble = trouble if number else missing
    raise NotFound(
        f"no checkpoint of the run is whole: {trouble}",
        fix="Put it back from a copy of the run. " + _START_OVER,
    )


def _missing_of(checkpoint: Path, chunks: ChunkStore) -> str | None:
    """What a checkpoint lacks, as far as names tell; None: nothing."""
    directory = checkpoint.with_suffix("")
    try:
        held = manifest_of(checkpoint)
    except (Damaged, NotFound) as error:
        return f"{checkpoint}: {error.message}"
    listed = {directory / name: Path(name).is_relative_to(STATE) for name in held["files"]}
    missing = sorted(path for path in listed if not path.is_file())
    if any(listed[path] for path in missing) or not any(listed.values()):
        return _named(missing or [directory / STATE])
    if not missing:  # the store's weights can be made again
        return None
    try:
        tensors = read_whole(chunks.read, held["weights"]).tensors
    except (NotFound, Damaged, BadMessage) as error:
        return f"{_named(missing)}, and {chunks.path(held['weights'])}: {error.message}"
    absent = [path for path in {chunks.path(t.chunk) for t in tensors} if not path.is_file()]
    return _named(missing + sorted(absent)) if absent else None


def _named(paths: list[Path]) -> str:
    shown = ", ".join(map(str, paths[:NAMED]))
    more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
    return f"{shown}{more} {'is' if len(paths) == 1 else 'are'} missing"


_START_OVER = "To start over: meshrl run JOB"


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
        check(run_dir, held, run.place)
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

            known = asyncio.run(Launcher(place, MeshShape()).ask_redis(put_back))
        if known:
            return job_file.read(path)
    raise Damaged(
        f"{path} is damaged: {why}; the run's Redis has no copy of it",
        fix=f"Put it back from a copy of the run. To start over: meshrl run JOB, which leaves "
        f"{shown(run_dir)} as it is",
    )
