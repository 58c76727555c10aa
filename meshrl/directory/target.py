"""What an argument of the command line means: a run, a mesh, or the mesh that was started last."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError, Damaged, NotFound, Refused, StateUnavailable
from meshrl.common.state import jobs, registry
from meshrl.common.state.redis.client import State
from meshrl.directory import job_file, places
from meshrl.directory.asking import ANSWER_S, ask
from meshrl.directory.places import MeshPlace, find_mesh, running_launcher


@dataclass(frozen=True)
class Run:
    """A run: its directory, the name of its job, and the mesh that it was started or submitted
    on.
    """

    directory: Path
    job: str
    place: MeshPlace

    @classmethod
    def of(cls, directory: Path, held: dict[str, Any]) -> Run:
        """The run in a directory whose `job.json` holds this."""
        return cls(directory, held["job"], MeshPlace(Path(held.get("mesh", directory))))

    @property
    def shown(self) -> str:
        """Its directory as one would type it."""
        return places.shown(self.directory)


def run_in(directory: Path) -> Run:
    """The run in a directory; NotFound when there is none, Damaged when `job.json` is."""
    found = places.existing_run(directory)
    path = found / job_file.NAME
    try:
        return Run.of(found, job_file.read(path))
    except Damaged as error:
        raise Damaged(
            f"{path} is damaged: {error.message}",
            fix=f"`meshrl resume {places.shown(found)}` writes it anew if the run's Redis has it",
        ) from error


def place_of(chosen: Path | None, mesh: Path | None) -> MeshPlace:
    """The mesh that a run or mesh directory, `--mesh`, or neither of them means."""
    if chosen is not None and mesh is not None:
        raise ConfigError(f"both {chosen} and --mesh {mesh} name a mesh", fix="Give one of them")
    chosen = chosen or mesh
    if chosen is not None and (chosen / "job.json").is_file():
        place = run_in(chosen).place
        if place.settings.is_file():
            return place
        raise NotFound(
            f"the run in {chosen} has no mesh any more", fix=f"`meshrl resume {chosen}` starts one"
        )
    try:
        return find_mesh(chosen)
    except NotFound as error:
        if chosen is None:
            raise
        raise NotFound(
            f"there is neither a run nor a mesh in {chosen}", fix="Name a directory under runs/"
        ) from error


def run_of(chosen: Path | None, mesh: Path | None) -> Run:
    """The run that is meant: a run's directory, a job of the mesh by its name, or, when neither is
    given, the job that the mesh works on (the last one if it works on none).
    """
    if chosen is not None and (chosen / "job.json").is_file():
        return run_in(chosen)
    if chosen is not None and chosen.exists():
        return _job_of(place_of(chosen, None), "")
    if chosen is None:
        place = find_mesh(mesh)
        if (place.root / "job.json").is_file():
            return run_in(place.root)
        return _job_of(place, "")
    try:
        return _job_of(find_mesh(mesh), str(chosen))
    except (NotFound, StateUnavailable) as error:
        raise NotFound(
            f"there is no run in {chosen}, and no mesh that has a job of that name",
            fix="Name a directory under runs/, or a job as `meshrl status` shows it",
        ) from error


def mesh_meant(chosen: Path | None, mesh: Path | None) -> MeshPlace | None:
    """The mesh, where that is meant and no run or job of it; None: it is one of these. NotFound
    when there is none.
    """
    if chosen is not None and (not chosen.exists() or (chosen / "job.json").is_file()):
        return None
    place = place_of(chosen, mesh)
    return None if (place.root / "job.json").is_file() else place


def _job_of(place: MeshPlace, name: str) -> Run:
    rows = ask(place, jobs.jobs, ANSWER_S)
    if name:
        rows = [row for row in rows if row.id == name]
    if not rows:
        raise NotFound(
            f"the mesh in {place.root} has no job {name}".rstrip(), fix="`meshrl submit JOB`"
        )
    row = next((row for row in rows if not row.ended), rows[-1])
    return Run(Path(row.run_dir), row.id, place)


async def row_of(state: State, run: Run) -> jobs.JobRow:
    """The run's row in the Redis of its mesh; NotFound when that has no such job, Refused when it
    has another one of that name.
    """
    row = await jobs.job(state, run.job)
    if row.run_dir != str(run.directory):
        raise Refused(f"the mesh's job {run.job} is another run, in {row.run_dir}")
    return row


def may_live(place: MeshPlace) -> bool:
    """Whether there may be a mesh: its launcher runs on this host, or its Redis answers and a
    process of it holds a lease.
    """
    if not place.settings.is_file():
        return False
    if running_launcher(place):
        return True
    try:
        return any(entry.alive for entry in ask(place, registry.entries, ANSWER_S))
    except StateUnavailable:
        return False
