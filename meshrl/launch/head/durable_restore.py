"""Restore of a lost head's jobs on this host, from their durable copy."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from meshrl.common.base.errors import BadMessage, CorruptData, NotFound, Refused
from meshrl.common.base.files import documents
from meshrl.common.base.files.sealed_documents import encode_sealed
from meshrl.common.job.bundle import bundle_files
from meshrl.common.records.checkpoints import check_paths, install_checkpoint
from meshrl.common.records.durable_copy import DurableCopy, DurableCopyRecord, job_folder
from meshrl.common.state import jobs
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.server_state.rollback import JobWatermark
from meshrl.directory.directory_paths import MeshPaths, read_json, write_json
from meshrl.launch.head.job_restore import restore_job

RESTORED_RUNS_FILE = (
    "brought.json"  # in the mesh's directory: fetched runs whose jobs Redis does not have yet
)
OWNER_BYTES = 16


def configure_durable_copy(url: str, mesh_paths: MeshPaths) -> None:
    """Set the mesh's durable copy to `url`, or to none when `url` is empty.

    Raises Refused when the copy is another mesh's.
    """
    if not url:
        (mesh_paths.directory / "durable.json").unlink(missing_ok=True)
        return
    before = DurableCopyRecord.read_from(mesh_paths.directory)
    known = before.owner if before is not None and before.url == url else ""
    found = DurableCopy(url)
    owner = found.current_owner
    if owner and owner != known:
        raise Refused(
            f"{found.public_url} holds the jobs of another mesh",
            where="durable.url",
            fix=f"Run `meshrl up --resume {found.public_url}` to resume them, or set another URL",
        )
    DurableCopyRecord(url, known or secrets.token_hex(OWNER_BYTES)).write(mesh_paths.directory)


def fetch_runs(url: str, mesh_paths: MeshPaths) -> list[Path]:
    """Fetch the runs of all jobs that had not ended to `<root>/runs/JOB`, and return their paths.

    The copy belongs to this mesh from now on; it resumes the jobs when it starts. Raises NotFound
    when there is none.
    """
    copy = DurableCopy(url)
    unfinished_jobs = {
        job: lineage
        for job in copy.list_jobs()
        if (lineage := _read_lineage(copy, job)) is not None
    }
    if not unfinished_jobs:
        raise NotFound(
            f"{copy.public_url} holds no unfinished job",
            fix="Pass the durable.url of the lost mesh",
        )
    known = DurableCopyRecord.read_from(mesh_paths.directory)
    if known is None or (known.url, known.owner) != (url, copy.current_owner):
        durable = DurableCopyRecord(url, secrets.token_hex(OWNER_BYTES))
        durable.write(mesh_paths.directory)
        # A former head that still runs removes nothing any more.
        DurableCopy(url, durable.owner).take_over()
    path = mesh_paths.directory / RESTORED_RUNS_FILE
    fetched_runs = read_json(path)["runs"] if path.is_file() else []  # by an interrupted attempt
    there = {unquote(Path(one["run"]).name) for one in fetched_runs}
    for job, lineage in unfinished_jobs.items():
        if job not in there:
            fetched_runs.append({"run": str(_fetch_run(copy, job, mesh_paths)), "lineage": lineage})
            write_json(path, {"runs": fetched_runs})
    return [Path(one["run"]) for one in fetched_runs]


def _read_lineage(copy: DurableCopy, job: str) -> int | None:
    """Return the lineage that a job resumes from; None if it has ended or is incomplete."""
    try:
        standing = copy.read_document(f"{job_folder(job)}/standing.json")
        copy.read_document(f"{job_folder(job)}/job.json")
    except (CorruptData, NotFound) as error:
        print(f"{job} is incomplete in the copy and is skipped: {error}", flush=True)
        return None
    is_terminal = jobs.Phase(standing["phase"]) in jobs.TERMINAL_PHASES
    return None if is_terminal else int(standing["lineage"])


def _fetch_run(copy: DurableCopy, job: str, mesh_paths: MeshPaths) -> Path:
    folder = quote(job, safe="")
    run_dir = mesh_paths.root / "runs" / folder
    record = copy.read_document(f"{job_folder(job)}/job.json")
    document = record["document"]
    digest, files = str(document["bundle"]["digest"]), bundle_files.read_file_list(document)
    try:
        check_paths([folder, digest, *files])
    except BadMessage as error:
        raise CorruptData(
            f"{job!r:.80} in the copy is not a valid job: {error.message}", where=copy.public_url
        ) from error
    if os.path.lexists(run_dir):
        raise Refused(
            f"{run_dir} already exists", fix="Set another --root, or move the directory away"
        )
    scratch = run_dir.with_name(f".{folder}.fetching")
    shutil.rmtree(scratch, ignore_errors=True)
    (scratch / "checkpoints").mkdir(parents=True)
    for name, (_, of_file) in files.items():
        copy.download(job, str(of_file), scratch / "bundle" / digest / name)
    _fetch_checkpoint(copy, job, scratch / "checkpoints")
    document["bundle"]["dir"] = str(run_dir / "bundle" / digest)
    documents.write(
        scratch / "job.json", {"job": job, "mesh": str(mesh_paths.root), "document": document}
    )
    (scratch / "store").symlink_to(mesh_paths.root / "store")
    scratch.rename(run_dir)
    return run_dir


def _fetch_checkpoint(copy: DurableCopy, job: str, directory: Path) -> None:
    """Fetch the newest complete checkpoint; a job without one starts from its beginning."""
    for name in copy.list_checkpoints(job):
        scratch = directory / f"{name}.fetching"
        try:
            manifest = copy.read_document(f"{job_folder(job)}/checkpoints/{name}.json")
            check_paths(manifest["files"])
            for path, digest in manifest["files"].items():
                copy.download(job, digest, scratch / path)
        except (BadMessage, CorruptData, NotFound) as error:
            print(f"{name} of {job} is unusable and is skipped: {error}", flush=True)
            shutil.rmtree(scratch, ignore_errors=True)
            continue
        scratch.mkdir(exist_ok=True)
        install_checkpoint(scratch, directory / name)
        (directory / f"{name}.json").write_bytes(encode_sealed(manifest))
        return


def make_pending_restore(mesh_paths: MeshPaths) -> Callable[[StateClient], Awaitable[None]] | None:
    """Return a function that registers the fetched jobs in Redis once; None if there are none."""
    path = mesh_paths.directory / RESTORED_RUNS_FILE
    if not path.is_file():
        return None
    runs: list[dict[str, Any]] = read_json(path)["runs"]

    async def restore_pending(state: StateClient) -> None:
        there = {row.id for row in await jobs.read_jobs(state)}
        for one in runs:
            run_dir = Path(one["run"])
            record = read_json(run_dir / "job.json")
            if record["job"] in there:
                continue
            watermark = JobWatermark(lineage=int(one["lineage"]))
            checkpoint = await restore_job(
                state, run_dir, record["job"], record["document"], watermark
            )
            at = checkpoint.name if checkpoint is not None else "its beginning"
            print(f"{record['job']} resumes from {at}", flush=True)
        path.unlink()

    return restore_pending
