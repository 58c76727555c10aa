"""Brings the jobs of a mesh whose head is gone to this host, from their durable copy."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from meshrl.common.base.errors import BadMessage, Damaged, NotFound, Refused
from meshrl.common.base.files import documents
from meshrl.common.base.files.sealed import sealed
from meshrl.common.job.bundle import bundle_files
from meshrl.common.records.checkpoints import appear, check_paths
from meshrl.common.records.durable_copy import Durable, DurableCopy, of_job
from meshrl.common.state import jobs
from meshrl.common.state.redis.client import State
from meshrl.common.state.server.rollback import JobMark
from meshrl.directory.places import MeshPlace, read_json, write_json
from meshrl.launch.head.restoring import put_back

BROUGHT = "brought.json"  # in the mesh's directory: runs whose jobs Redis is to be told of
OWNER_BYTES = 16


def keep(url: str, place: MeshPlace) -> None:
    """Makes the mesh at `place` keep its copy at `url`, or none when that is empty. Refused when
    the copy is another mesh's.
    """
    if not url:
        (place.directory / "durable.json").unlink(missing_ok=True)
        return
    before = Durable.of(place.directory)
    known = before.owner if before is not None and before.url == url else ""
    found = DurableCopy(url)
    owner = found.owner
    if owner and owner != known:
        raise Refused(
            f"{found.shown} holds the jobs of another mesh",
            where="durable.url",
            fix=f"`meshrl up --resume {found.shown}` goes on with them; or name another URL",
        )
    Durable(url, known or secrets.token_hex(OWNER_BYTES)).write(place.directory)


def bring(url: str, place: MeshPlace) -> list[Path]:
    """The runs of all jobs that had not ended, fetched to `<root>/runs/JOB`; the mesh at `place` is
    whose copy it is from now on, and goes on with them when it starts. NotFound when there is none.
    """
    copy = DurableCopy(url)
    going_on = {job: lineage for job in copy.jobs() if (lineage := _lineage(copy, job)) is not None}
    if not going_on:
        raise NotFound(
            f"{copy.shown} holds no job that goes on",
            fix="Name the durable.url of the mesh that is gone",
        )
    known = Durable.of(place.directory)
    if known is None or (known.url, known.owner) != (url, copy.owner):
        durable = Durable(url, secrets.token_hex(OWNER_BYTES))
        durable.write(place.directory)
        # Another head that is still there removes nothing any more.
        DurableCopy(url, durable.owner).take_over()
    path = place.directory / BROUGHT
    brought = read_json(path)["runs"] if path.is_file() else []  # by one that was interrupted
    there = {unquote(Path(one["run"]).name) for one in brought}
    for job, lineage in going_on.items():
        if job not in there:
            brought.append({"run": str(_fetched(copy, job, place)), "lineage": lineage})
            write_json(path, {"runs": brought})
    return [Path(one["run"]) for one in brought]


def _lineage(copy: DurableCopy, job: str) -> int | None:
    """The lineage that a job goes on from; None when it has ended, or its copy had only begun."""
    try:
        standing = copy.read(f"{of_job(job)}/standing.json")
        copy.read(f"{of_job(job)}/job.json")
    except (Damaged, NotFound) as error:
        print(f"{job} is not in the copy as a whole, and left out: {error}", flush=True)
        return None
    ended = jobs.Phase(standing["phase"]) in jobs.ENDED
    return None if ended else int(standing["lineage"])


def _fetched(copy: DurableCopy, job: str, place: MeshPlace) -> Path:
    folder = quote(job, safe="")
    run_dir = place.root / "runs" / folder
    held = copy.read(f"{of_job(job)}/job.json")
    document = held["document"]
    digest, files = str(document["bundle"]["digest"]), bundle_files.of(document)
    try:
        check_paths([folder, digest, *files])
    except BadMessage as error:
        raise Damaged(f"{job!r:.80} there is no job: {error.message}", where=copy.shown) from error
    if os.path.lexists(run_dir):
        raise Refused(f"{run_dir} is there already", fix="Name another --root, or move it away")
    scratch = run_dir.with_name(f".{folder}.fetching")
    shutil.rmtree(scratch, ignore_errors=True)
    (scratch / "checkpoints").mkdir(parents=True)
    for name, (_, of_file) in files.items():
        copy.get(job, str(of_file), scratch / "bundle" / digest / name)
    _fetch_checkpoint(copy, job, scratch / "checkpoints")
    document["bundle"]["dir"] = str(run_dir / "bundle" / digest)
    documents.write(
        scratch / "job.json", {"job": job, "mesh": str(place.root), "document": document}
    )
    (scratch / "store").symlink_to(place.root / "store")
    scratch.rename(run_dir)
    return run_dir


def _fetch_checkpoint(copy: DurableCopy, job: str, directory: Path) -> None:
    """The newest checkpoint that is whole; a job without one begins from its beginning."""
    for name in copy.checkpoints(job):
        scratch = directory / f"{name}.fetching"
        try:
            held = copy.read(f"{of_job(job)}/checkpoints/{name}.json")
            check_paths(held["files"])
            for path, digest in held["files"].items():
                copy.get(job, digest, scratch / path)
        except (BadMessage, Damaged, NotFound) as error:
            print(f"{name} of {job} is not used: {error}", flush=True)
            shutil.rmtree(scratch, ignore_errors=True)
            continue
        scratch.mkdir(exist_ok=True)
        appear(scratch, directory / name)
        (directory / f"{name}.json").write_bytes(sealed(held))
        return


def to_put_back(place: MeshPlace) -> Callable[[State], Awaitable[None]] | None:
    """Tells Redis of the jobs that were brought, once; None: there are none."""
    path = place.directory / BROUGHT
    if not path.is_file():
        return None
    runs: list[dict[str, Any]] = read_json(path)["runs"]

    async def tell(state: State) -> None:
        there = {row.id for row in await jobs.jobs(state)}
        for one in runs:
            run_dir = Path(one["run"])
            held = read_json(run_dir / "job.json")
            if held["job"] in there:
                continue
            seen = JobMark(lineage=int(one["lineage"]))
            checkpoint = await put_back(state, run_dir, held["job"], held["document"], seen)
            at = checkpoint.name if checkpoint is not None else "its beginning"
            print(f"{held['job']} goes on from {at}", flush=True)
        path.unlink()

    return tell
