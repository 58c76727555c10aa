"""Target of a command-line argument: a run, a mesh, or the mesh that was started last."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError, CorruptData, NotFound, Refused, StateUnavailable
from meshrl.common.state import jobs, registry
from meshrl.common.state.redis.client import StateClient
from meshrl.directory import directory_paths, job_file
from meshrl.directory.directory_paths import MeshPaths, find_mesh, find_root_pid
from meshrl.directory.mesh_query import ANSWER_TIMEOUT_S, query_mesh


@dataclass(frozen=True)
class RunLocation:
    """Run: its directory, its job's name, and the mesh that it was started or submitted on."""

    directory: Path
    job: str
    mesh_paths: MeshPaths

    @classmethod
    def from_job_file(cls, directory: Path, content: dict[str, Any]) -> RunLocation:
        """Return the run in a directory whose `job.json` has this content."""
        return cls(directory, content["job"], MeshPaths(Path(content.get("mesh", directory))))

    @property
    def display_path(self) -> str:
        """Run's directory as a user would type it."""
        return directory_paths.format_path(self.directory)


def read_run(directory: Path) -> RunLocation:
    """Return the run in a directory.

    Raises NotFound when there is none, CorruptData when its `job.json` is corrupt.
    """
    found = directory_paths.require_run(directory)
    path = found / job_file.JOB_FILE_NAME
    try:
        return RunLocation.from_job_file(found, job_file.read_job_file(path))
    except CorruptData as error:
        raise CorruptData(
            f"{path} is corrupt: {error.message}",
            fix=(
                f"Run `meshrl resume {directory_paths.format_path(found)}`, which rewrites it "
                "if the run's Redis has a copy"
            ),
        ) from error


def resolve_mesh(target: Path | None, mesh: Path | None) -> MeshPaths:
    """Return the mesh that a run or mesh directory, `--mesh`, or neither of them means."""
    if target is not None and mesh is not None:
        raise ConfigError(
            f"{target} and --mesh {mesh} both name a mesh", fix="Pass only one of them"
        )
    target = target or mesh
    if target is not None and (target / "job.json").is_file():
        place = read_run(target).mesh_paths
        if place.settings.is_file():
            return place
        raise NotFound(
            f"the run in {target} has no mesh", fix=f"Run `meshrl resume {target}` to start one"
        )
    try:
        return find_mesh(target)
    except NotFound as error:
        if target is None:
            raise
        raise NotFound(
            f"{target} contains neither a run nor a mesh", fix="Name a directory under runs/"
        ) from error


def resolve_run(target: Path | None, mesh: Path | None) -> RunLocation:
    """Return the run that is meant: a run's directory, or a job of the mesh by its name.

    When neither is given, it is the job that the mesh works on (the last one if it works on none).
    """
    if target is not None and (target / "job.json").is_file():
        return read_run(target)
    if target is not None and target.exists():
        return _resolve_job(resolve_mesh(target, None), "")
    if target is None:
        place = find_mesh(mesh)
        if (place.root / "job.json").is_file():
            return read_run(place.root)
        return _resolve_job(place, "")
    try:
        return _resolve_job(find_mesh(mesh), str(target))
    except (NotFound, StateUnavailable) as error:
        raise NotFound(
            f"{target} is neither a run directory nor a job of the mesh",
            fix="Name a directory under runs/, or a job that `meshrl status` lists",
        ) from error


def resolve_bare_mesh(target: Path | None, mesh: Path | None) -> MeshPaths | None:
    """Return the mesh if the target is a mesh; None if it is a run or a job.

    Raises NotFound when there is none.
    """
    if target is not None and (not target.exists() or (target / "job.json").is_file()):
        return None
    place = resolve_mesh(target, mesh)
    return None if (place.root / "job.json").is_file() else place


def _resolve_job(mesh_paths: MeshPaths, name: str) -> RunLocation:
    rows = query_mesh(mesh_paths, jobs.read_jobs, ANSWER_TIMEOUT_S)
    if name:
        rows = [row for row in rows if row.id == name]
    if not rows:
        raise NotFound(
            f"the mesh in {mesh_paths.root} has no job {name}".rstrip(),
            fix="Run `meshrl submit JOB` to submit one",
        )
    row = next((row for row in rows if not row.is_terminal), rows[-1])
    return RunLocation(Path(row.run_dir), row.id, mesh_paths)


async def read_run_row(state: StateClient, run: RunLocation) -> jobs.JobRow:
    """Return the run's row in the Redis of its mesh.

    Raises NotFound when that has no such job, Refused when its job of that name is another run.
    """
    row = await jobs.read_job(state, run.job)
    if row.run_dir != str(run.directory):
        raise Refused(f"the mesh runs {run.job} in another directory, {row.run_dir}")
    return row


def may_be_running(mesh_paths: MeshPaths) -> bool:
    """Return True if there may be a mesh.

    Its launcher runs on this host, or its Redis answers and one of its processes holds a lease.
    """
    if not mesh_paths.settings.is_file():
        return False
    if find_root_pid(mesh_paths):
        return True
    try:
        return any(
            entry.alive for entry in query_mesh(mesh_paths, registry.list_entries, ANSWER_TIMEOUT_S)
        )
    except StateUnavailable:
        return False
