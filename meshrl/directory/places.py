"""Paths: the root of the mesh that a command means, the directory of a run, the files of a mesh.

A mesh lives under a root: `<root>/mesh/` holds its settings, logs and Redis data. `meshrl run`
makes the run directory the root; `meshrl up` uses `.meshrl/`. The pointer `.meshrl/current.json` in
the working directory ($MESHRL_HOME overrides) names the mesh that was started last.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import Damaged, NotFound, Refused
from meshrl.common.base.files import documents
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.access.owner import PERSON, person_settings
from meshrl.common.mesh.process.handle import start_time
from meshrl.directory.ownership import refuse_foreign


class _InMesh:
    """Attribute of a place: the file of this name in its directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, place: MeshPlace, _: type[MeshPlace]) -> Path:
        return place.directory / self._name


@dataclass(frozen=True)
class MeshPlace:
    """The files of one mesh."""

    root: Path

    home = _InMesh("home")  # the home directory of its processes, where their user has none
    settings = _InMesh("settings.json")
    shape = _InMesh("shape.json")  # what runs here, as it was started last
    membership = _InMesh("membership.json")  # on a host that has joined: which mesh, what token
    joined = _InMesh("joined.json")  # which hosts have joined the mesh
    redis = _InMesh("redis")
    redis_note = _InMesh("redis-note.json")  # how far it had come when the launcher looked last
    logs = _InMesh("logs")
    nursery = _InMesh("nursery")  # its socket
    lock = _InMesh("lock")
    launcher = _InMesh("launcher.json")  # who runs the mesh: `{pid, start_time, ready, end_s}`
    leaving = _InMesh("leaving")  # is there when who runs a host is to leave the mesh at its end

    @property
    def directory(self) -> Path:
        return self.root / "mesh"

    @property
    def redis_url(self) -> str:
        """The Redis of the mesh, as its own user reaches it; $MESHRL_REDIS_URL is already in its
        settings. Refused on a host that has joined: people ask at the head.
        """
        self.refuse_joined()
        settings = MeshSettings.from_file(self.settings)
        return person_settings(settings, self.directory).redis_as(PERSON)

    def refuse_joined(self) -> None:
        """Refused on a host that has joined a mesh: that is asked at its head."""
        if self.membership.is_file():
            raise Refused(
                f"{self.root} is a host that has joined a mesh, whose records are at its head",
                fix="Ask at the head, or with a token of `meshrl token create` there",
            )

    def log(self, name: str) -> Path:
        """The log of a service or worker: `planner/0` -> `planner-0.log`."""
        return self.logs / (name.replace("/", "-") + ".log")


def home() -> Path:
    return Path(os.environ.get("MESHRL_HOME") or Path.cwd() / ".meshrl")


def point_to(place: MeshPlace) -> None:
    """Makes `place` the mesh that commands without --mesh mean."""
    home().mkdir(parents=True, exist_ok=True)
    write_json(home() / "current.json", {"root": str(place.root.resolve())})


def find_mesh(chosen: Path | None) -> MeshPlace:
    """The mesh at `chosen` (a run directory, its mesh directory or settings file), or the last one.

    NotFound says how to start one.
    """
    if chosen is None:
        pointer = home() / "current.json"
        if not pointer.is_file():
            raise NotFound(
                "no mesh has been started from this directory",
                fix="Start one with `meshrl up` or `meshrl run JOB`, or name one with --mesh PATH",
            )
        refuse_foreign(pointer)
        try:
            chosen = Path(read_json(pointer)["root"])
        except (Damaged, KeyError) as error:
            raise NotFound(
                f"{pointer}, which names the mesh that was started last, is damaged: {error}",
                fix="Name the run or the mesh; the next start writes the file anew",
            ) from error
    for root in (chosen, chosen.parent, chosen.parent.parent):
        place = MeshPlace(root)
        if place.settings.is_file():
            refuse_foreign(place.directory)
            refuse_foreign(place.settings)
            return place
    raise NotFound(f"there is no mesh at {chosen}", fix="Start one with `meshrl up`")


def find_head(chosen: Path | None) -> MeshPlace:
    """The same; Refused on a host that has joined: records of hosts and tokens are at the head."""
    place = find_mesh(chosen)
    place.refuse_joined()
    return place


def run_directory(config: JobConfig, force: bool) -> Path:
    """Where a new run goes: `out`, or `runs/<name>`, `runs/<name>-2`, ...; nothing is made.

    What is already in `out` is refused, because the user named that very place, unless `force` is
    to replace it.
    """
    named = config.out_directory
    target = Path(named).expanduser() if named else Path("runs") / config.name
    if force or not occupied(target):
        return target.absolute()
    if named:
        raise Refused(
            f"{target} is not empty",
            fix=f"`meshrl resume {target}` continues it, --force starts over, or set another `out`",
        )
    number = 2
    while occupied(target.with_name(f"{config.name}-{number}")):
        number += 1
    return target.with_name(f"{config.name}-{number}").absolute()


def existing_run(directory: Path) -> Path:
    """`directory` made absolute; NotFound when no run is there."""
    if not (directory / "job.json").is_file():
        if (directory / "bundle").is_dir() and (directory / "events.jsonl").is_file():
            raise Damaged(
                f"the job.json of the run in {directory} is gone",
                fix=f"`meshrl resume {shown(directory)}` writes it anew if the run's Redis has it",
            )
        raise NotFound(
            f"there is no run in {directory}: it has no job.json",
            fix="Name a directory under runs/",
        )
    return directory.absolute()


def read_json(path: Path) -> dict[str, Any]:
    """What a document holds; Damaged when it is not what was written."""
    if path.exists() and not path.is_file():  # a pipe would be waited for without end
        raise Damaged("it is no file", where=str(path))
    return documents.decode(path.read_bytes(), str(path))


def read_if_whole(path: Path) -> dict[str, Any]:
    """The same of one that tells nothing that others do not: nothing when it is damaged or gone."""
    try:
        return read_json(path)
    except (Damaged, FileNotFoundError):
        return {}


def write_json(path: Path, content: dict[str, Any], *, durable: bool = True) -> None:
    """Whole or not at all: a reader never sees half a file. StorageFull."""
    documents.write(path, content, durable=durable)


def occupied(directory: Path) -> bool:
    """Whether anything is there but an empty directory."""
    if not os.path.lexists(directory):
        return False
    return not directory.is_dir() or any(directory.iterdir())


def shown(path: Path) -> str:
    """A path as one would type it: relative to the working directory where it lies below."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def running_launcher(place: MeshPlace) -> int:
    """The pid of the process that runs the mesh; 0 when none does."""
    marker = read_if_whole(place.launcher)
    pid = int(marker.get("pid", 0))
    if not pid:
        return 0
    return pid if start_time(pid) == marker["start_time"] != 0 else 0
