"""`meshrl resume`: continues a run from its checkpoint, with new values of changeable keys."""

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
    CorruptData,
    NotFound,
    Refused,
    StateUnavailable,
)
from meshrl.common.base.files import corruption
from meshrl.common.job.bundle import bundle_files
from meshrl.common.job.change_rules import apply_changes, diff_documents, explain_rejected_change
from meshrl.common.records.checkpoints import (
    STATE_FOLDER,
    is_initial,
    list_manifest_paths,
    read_last_committed_name,
    read_last_version,
    read_manifest,
)
from meshrl.common.state import events, jobs
from meshrl.common.state.redis import embedded_server
from meshrl.common.state.redis.client import StateClient
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.common.weights.layout.manifest import read_complete_manifest
from meshrl.directory import directory_paths, job_file
from meshrl.directory.command_target import RunLocation
from meshrl.directory.directory_paths import MeshPaths, format_path, write_json
from meshrl.directory.mesh_query import ANSWER_TIMEOUT_S, query_mesh
from meshrl.directory.run_claims import is_mesh_running, lock_mesh
from meshrl.job import edited_job_file
from meshrl.job.job_file import JobFile
from meshrl.launch.head.job_restore import restore_job
from meshrl.launch.head.mesh_shape import MeshShape, read_shape

if TYPE_CHECKING:
    from meshrl.launch.head.launcher import Launcher


def continue_run(
    run: RunLocation, record: dict[str, Any], job: JobFile, changes: dict[str, tuple[Any, Any]]
) -> int:
    """Continue the run and return the exit status.

    `record` is the content of `job.json`, `job` the job to continue with, and `changes` their
    differences.
    """
    from meshrl.launch.checks import mesh_checks  # a run that is refused needs none of these
    from meshrl.runs.session import derive_mesh_shape, run_session

    own = run.mesh_paths.root == run.directory
    if changes:
        mesh_checks.check_job_and_mesh(job)
    elif own:
        mesh_checks.check_mesh(job)

    async def begin(launcher: Launcher) -> None:
        row = await _restore_job(run, record, launcher)
        # The steps were done with the document in Redis; the user's changes are applied to it.
        document = apply_changes(row.document, {key: new for key, (_, new) in changes.items()})
        await _apply_changes(run, record, row, document, launcher.state)

    # The mesh that the job requests now, or the one that it was submitted to.
    shape = derive_mesh_shape(job.config) if own else read_shape(run.mesh_paths)
    return asyncio.run(run_session(run.directory, shape, begin))


async def _restore_job(run: RunLocation, record: dict[str, Any], launcher: Launcher) -> jobs.JobRow:
    """Return the job's row in Redis; restore it first if it is missing, before any service runs."""
    state = launcher.state
    known = {row.id: row for row in await jobs.read_jobs(state)}
    if run.job not in known:
        watermark = launcher.find_watermark(run.job)
        checkpoint = await restore_job(state, run.directory, run.job, record["document"], watermark)
        if checkpoint is not None:
            print(f"Redis has no job {run.job}; it restarts from {checkpoint.name}")
    elif known[run.job].run_dir != str(run.directory):
        public_url = embedded_server.redact_password(embedded_server.read_configured_url())
        raise Refused(f"another job named {run.job} is in {public_url}")
    return await jobs.read_job(state, run.job)


async def _apply_changes(
    run: RunLocation,
    record: dict[str, Any],
    row: jobs.JobRow,
    document: dict[str, Any],
    state: StateClient,
) -> None:
    """Record the job's new document, and reopen the run if it had ended."""
    path = run.directory / "job.json"
    if changes := diff_documents(row.document, document):
        steps = document["budget"]["steps"]
        if steps < row.version:
            raise make_too_few_steps_error(steps, row.version)
        await jobs.change_document(state, run.job, document, changes, uuid.uuid4().hex)
        change_record = {
            "from_step": row.version + 1,
            "lineage": row.lineage,
            "was": {key: old for key, (old, _) in changes.items()},
            "set": {key: new for key, (_, new) in changes.items()},
        }
        so_far = [*record.get("changes", []), change_record]
        write_json(path, record | {"document": document, "changes": so_far})
        for key, (old, new) in changes.items():
            print(f"{key}: {old} -> {new}, from step {row.version + 1} on", flush=True)
        row = await jobs.read_job(state, run.job)
    elif record["document"] != document:  # changed, but interrupted before the record
        write_json(path, record | {"document": document})
    if row.phase == jobs.Phase.FINISHED:
        raise make_finished_error(run, row.document)
    if row.is_terminal:
        await jobs.reopen(state, run.job, uuid.uuid4().hex)


MAX_NAMED_FILES = 3  # missing files that an error names


def check_run(run_dir: Path, record: Mapping[str, Any], place: MeshPaths) -> None:
    """Check that the run is complete; raise NotFound or CorruptData with what is not.

    Files of its record are repaired when it continues.
    """
    if place.root != run_dir and not place.directory.is_dir():
        raise NotFound(
            f"the run in {run_dir} was submitted to a mesh that does not exist: {place.root}",
            fix="Restore that directory, with its Redis data and weights. " + _START_OVER_FIX,
        )
    _check_bundle(run_dir, record)
    _check_checkpoint(run_dir, place)


def _check_bundle(run_dir: Path, record: Mapping[str, Any]) -> None:
    bundle_fields = record["document"]["bundle"]
    bundle = Path(bundle_fields["dir"])
    if not bundle.is_relative_to(run_dir.resolve()) and not bundle.is_relative_to(run_dir):
        original_dir = bundle.parent.parent
        raise NotFound(
            f"the run in {run_dir} was created in {original_dir}, and its records contain "
            "that path",
            fix=f"Move it back: mv {run_dir} {original_dir}",
        )
    if not bundle.is_dir():
        raise NotFound(f"the run is incomplete: {bundle} is missing", fix=bundle_files.RESTORE_FIX)
    try:
        bundle_files.check_files(
            bundle, bundle_files.read_file_list(record["document"]), read_large=True
        )
    except CorruptData as error:
        raise CorruptData(f"the run is incomplete: {error.message}", fix=error.fix) from error


def _check_checkpoint(run_dir: Path, place: MeshPaths) -> None:
    """Check that there is a checkpoint to resume from, or that none is needed.

    The trainer skips incomplete checkpoints, and checks every byte of the one that it loads.
    """
    named, paths = read_last_committed_name(run_dir), list_manifest_paths(run_dir)
    redis = place.redis_directory.is_dir() and any(place.redis_directory.iterdir())
    if (not named and not paths) or (not redis and all(is_initial(path) for path in paths)):
        return
    chunks = ChunkStore(place.root / "store")
    problem = f"{run_dir / 'checkpoints' / named}.json is missing"
    for number, path in enumerate(reversed(paths)):
        missing = _find_missing_files(path, chunks)
        if missing is None:
            return
        problem = problem if number else missing
    raise NotFound(
        f"no checkpoint of the run is complete: {problem}",
        fix="Restore it from a copy of the run. " + _START_OVER_FIX,
    )


def _find_missing_files(checkpoint: Path, chunks: ChunkStore) -> str | None:
    """Return what a checkpoint lacks, judged by names; None if nothing."""
    directory = checkpoint.with_suffix("")
    try:
        manifest = read_manifest(checkpoint)
    except (CorruptData, NotFound) as error:
        return f"{checkpoint}: {error.message}"
    listed = {
        directory / name: Path(name).is_relative_to(STATE_FOLDER) for name in manifest["files"]
    }
    missing = sorted(path for path in listed if not path.is_file())
    if any(listed[path] for path in missing) or not any(listed.values()):
        return _format_missing(missing or [directory / STATE_FOLDER])
    if not missing:  # the store's weights can be made again
        return None
    try:
        tensors = read_complete_manifest(chunks.read, manifest["weights"]).tensors
    except (NotFound, CorruptData, BadMessage) as error:
        path = chunks.chunk_path(manifest["weights"])
        return f"{_format_missing(missing)}, and {path}: {error.message}"
    absent = [path for path in {chunks.chunk_path(t.chunk) for t in tensors} if not path.is_file()]
    return _format_missing(missing + sorted(absent)) if absent else None


def _format_missing(paths: list[Path]) -> str:
    displayed = ", ".join(map(str, paths[:MAX_NAMED_FILES]))
    more = f" and {len(paths) - MAX_NAMED_FILES} more" if len(paths) > MAX_NAMED_FILES else ""
    return f"{displayed}{more} {'is' if len(paths) == 1 else 'are'} missing"


_START_OVER_FIX = "To start over: meshrl run JOB"


def resume_run(directory: Path, settings: list[str]) -> int:
    """Continue the run in a directory, with `KEY=VALUE` settings; return the exit status."""
    there = (directory / "bundle").is_dir() or (directory / "job.json").is_file()
    record = read_run_record(directory) if there else {}
    run_dir = directory_paths.require_run(directory)
    run = RunLocation.from_job_file(run_dir, record)
    if "imported" in record:
        raise Refused(
            f"{run.display_path} is an import of {record['imported']}: it has no training "
            "to continue",
            fix=f'Start a job from it: set model.path = "{run.display_path}/model"',
        )
    if "mesh" in record and is_mesh_running(run.mesh_paths):
        return _resume_on_mesh(run, settings)
    with lock_mesh(run.mesh_paths, run_dir):
        check_run(run_dir, record, run.mesh_paths)
    if not settings:
        _check_not_finished(run, record["document"], record["document"])
    from meshrl.job import job_reader  # here, because pydantic takes half a second to import

    # with what later versions have added
    _, was = job_reader.reload_document(record["document"], [])
    job, document = job_reader.reload_document(record["document"], settings)
    changes = _check_changes(run, was, document)
    _check_not_finished(run, was, document)
    for line in (
        edited_job_file.describe_edits(record["file"], document, run.display_path)
        if "file" in record
        else []
    ):
        print(line)
    # Imported here: only now is it sure that a mesh will be needed.

    return continue_run(run, record, job, changes)


def _check_changes(
    run: RunLocation, old_document: dict[str, Any], new_document: dict[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the changes of a document; raise ConfigError with the keys that may not change, and
    why.
    """
    changes = diff_documents(old_document, new_document)
    rejected = {
        key: why
        for key, (old, new) in changes.items()
        if (why := explain_rejected_change(key, old, new))
    }
    if rejected:
        raise ConfigError(
            "; ".join(f"{key} may not change in a run: {why}" for key, why in rejected.items()),
            fix="Start a new run with it: meshrl run JOB --set KEY=VALUE",
        )
    if run.mesh_paths.root != run.directory and (
        own := [k for k in changes if k.startswith("mesh.")]
    ):
        raise ConfigError(
            f"{own[0]} is a key of the mesh that the run was submitted to",
            fix=f"Run `meshrl down --mesh {run.mesh_paths.root}`, then `meshrl up` with changes",
        )
    done = read_last_version(run.directory)
    if "budget.steps" in changes and new_document["budget"]["steps"] < done:
        raise make_too_few_steps_error(new_document["budget"]["steps"], done)
    return changes


def _check_not_finished(
    run: RunLocation, old_document: dict[str, Any], new_document: dict[str, Any]
) -> None:
    """Raise Refused when the run has finished and gets no more steps, before a mesh starts."""
    summary = run.directory / "summary.json"
    if old_document["budget"]["steps"] < new_document["budget"]["steps"]:
        return
    summary_fields = directory_paths.read_json_or_empty(summary)
    stop = summary_fields.get("early_stop")
    changed = diff_documents(old_document, new_document).keys()
    if (
        stop
        and summary_fields["phase"] == jobs.Phase.FINISHED
        and changed.isdisjoint(jobs.EARLY_STOP_KEYS)
    ):
        raise Refused(
            f"{run.display_path} has finished early, after step {stop['step']}: {stop['reason']}",
            fix=f"To train on: meshrl resume {run.display_path} --set evaluation.patience=0",
        )
    if (
        summary_fields.get("phase") == jobs.Phase.FINISHED
        and summary_fields.get("steps", 0) >= old_document["budget"]["steps"]
    ):
        raise make_finished_error(run, old_document)


def _resume_on_mesh(run: RunLocation, settings: list[str]) -> int:
    """Resume a stopped job on its running mesh."""
    try:
        row = query_mesh(
            run.mesh_paths, lambda state: jobs.read_job(state, run.job), ANSWER_TIMEOUT_S
        )
    except (NotFound, StateUnavailable) as error:
        raise Refused(
            f"the mesh in {run.mesh_paths.root} runs, but has no record of {run.display_path}: "
            f"{error.message}",
            fix=f"Run `meshrl down --mesh {run.mesh_paths.root}`, then resume the run",
        ) from error
    if not row.is_terminal:
        raise Refused(
            f"{run.display_path} already runs on the mesh in {run.mesh_paths.root}",
            fix=f"Run `meshrl watch {run.display_path}` to see it",
        )
    if settings:
        raise Refused(
            f"the mesh in {run.mesh_paths.root} runs and has already read the job of "
            f"{run.display_path}",
            fix=f"Run `meshrl down --mesh {run.mesh_paths.root}`, then resume the run with --set",
        )
    if row.phase == jobs.Phase.FINISHED:
        raise make_finished_error(run, row.document)
    query_mesh(
        run.mesh_paths,
        lambda state: jobs.reopen(state, run.job, uuid.uuid4().hex),
        ANSWER_TIMEOUT_S,
    )
    print(
        f"{run.job} resumes on the mesh in {run.mesh_paths.root}; meshrl watch {run.display_path}"
    )
    return 0


def make_too_few_steps_error(steps: int, done: int) -> ConfigError:
    """Return the error of a budget of fewer steps than are done."""
    return ConfigError(
        f"budget.steps = {steps}, but {done} steps are done", fix=f"Set it to {done} or more"
    )


def make_finished_error(run: RunLocation, document: dict[str, Any]) -> Refused:
    """Return the error of a run that has nothing left to do."""
    steps = document["budget"]["steps"]
    return Refused(
        f"{run.display_path} has finished, after {steps} steps",
        fix=f"Extend it: meshrl resume {run.display_path} --set budget.steps=N, N above {steps}",
    )


def read_run_record(directory: Path) -> dict[str, Any]:
    """Return the content of `job.json`, rewritten from Redis if necessary.

    Raises CorruptData with the fix when Redis does not have it either.
    """
    run_dir = directory.absolute()
    path = run_dir / job_file.JOB_FILE_NAME
    try:
        return job_file.read_job_file(path)
    except FileNotFoundError:
        why = "the file does not exist"
    except CorruptData as error:
        why = error.message
    store = run_dir / "store"  # of the mesh that it was submitted to, or its own
    place = MeshPaths(store.resolve().parent if store.is_symlink() else run_dir)
    about = {} if place.root == run_dir else {"mesh": str(place.root)}

    async def put_back(state: StateClient) -> bool:
        event_fields = await job_file.restore_job_file(state, run_dir, about, why)
        if event_fields is not None:
            print(corruption.describe_event(event_fields), file=sys.stderr, flush=True)
            await events.append(state, corruption.CORRUPTION_EVENT, event_fields)
        return event_fields is not None

    if place.redis_directory.is_dir() and any(place.redis_directory.iterdir()):
        if is_mesh_running(place):
            known = query_mesh(place, put_back, ANSWER_TIMEOUT_S)
        else:
            from meshrl.launch.head.launcher import Launcher  # only now is it needed

            known = asyncio.run(Launcher(place, MeshShape()).query_redis(put_back))
        if known:
            return job_file.read_job_file(path)
    raise CorruptData(
        f"{path} is corrupt: {why}; the run's Redis has no copy of it",
        fix=f"Restore it from a copy of the run. To start over: meshrl run JOB, which leaves "
        f"{format_path(run_dir)} unchanged",
    )
