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

from meshrl.common.base.errors import CorruptData, NotFound, Refused
from meshrl.common.base.files import documents
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.access.owner import PERSON_ROLE, make_person_settings
from meshrl.common.mesh.process.child_handle import read_start_time
from meshrl.directory.file_ownership import require_own_file


class _MeshFile:
    """Attribute of `MeshPaths`: the file of this name in its directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, mesh_paths: MeshPaths, _: type[MeshPaths]) -> Path:
        return mesh_paths.directory / self._name


@dataclass(frozen=True)
class MeshPaths:
    """Paths of the files of one mesh."""

    root: Path

    # the home directory of its processes, where their user has none
    process_home = _MeshFile("home")
    settings = _MeshFile("settings.json")
    shape = _MeshFile("shape.json")  # shape of the last start
    membership = _MeshFile("membership.json")  # on a host that has joined: which mesh, what token
    joined_hosts = _MeshFile("joined.json")  # which hosts have joined the mesh
    redis_directory = _MeshFile("redis")
    redis_note = _MeshFile("redis-note.json")  # progress of Redis at the launcher's last check
    profiles = _MeshFile("profiles.json")  # of its instances' functions
    logs = _MeshFile("logs")
    fork_server_socket = _MeshFile("fork")  # its socket
    lock = _MeshFile("lock")
    root_marker = _MeshFile("launcher.json")  # root process: `{pid, start_time, ready, end_s}`
    # exists when a host's root process must leave the mesh at its end
    leave_marker = _MeshFile("leaving")

    @property
    def directory(self) -> Path:
        return self.root / "mesh"

    @property
    def redis_url(self) -> str:
        """URL of the mesh's Redis for its own user; $MESHRL_REDIS_URL is already in its settings.

        Raises Refused on a joined host: users run their commands at the head.
        """
        self.require_head()
        settings = MeshSettings.from_file(self.settings)
        return make_person_settings(settings, self.directory).make_redis_url(PERSON_ROLE)

    def require_head(self) -> None:
        """Raise Refused on a host that has joined a mesh: its head has the records."""
        if self.membership.is_file():
            raise Refused(
                f"{self.root} belongs to a joined host; the records of its mesh are at the head",
                fix="Run the command at the head, or use a token from `meshrl token create` there",
            )

    def log_path(self, name: str) -> Path:
        """Return the log of a service or worker: `planner/0` -> `planner-0.log`."""
        return self.logs / (name.replace("/", "-") + ".log")


def find_mesh_home() -> Path:
    return Path(os.environ.get("MESHRL_HOME") or Path.cwd() / ".meshrl")


def set_current_mesh(mesh_paths: MeshPaths) -> None:
    """Make this mesh the default of commands without --mesh."""
    find_mesh_home().mkdir(parents=True, exist_ok=True)
    write_json(find_mesh_home() / "current.json", {"root": str(mesh_paths.root.resolve())})


def find_mesh(path: Path | None) -> MeshPaths:
    """Return the mesh at `path` (a run directory, its mesh directory or settings file), or the last
    one.

    Raises NotFound with how to start one.
    """
    if path is None:
        pointer = find_mesh_home() / "current.json"
        if not pointer.is_file():
            raise NotFound(
                "no mesh has been started from this directory",
                fix="Start one with `meshrl up` or `meshrl run JOB`, or name one with --mesh PATH",
            )
        require_own_file(pointer)
        try:
            path = Path(read_json(pointer)["root"])
        except (CorruptData, KeyError) as error:
            raise NotFound(
                f"{pointer}, which names the last started mesh, is corrupt: {error}",
                fix="Name the run or the mesh; the next start rewrites the file",
            ) from error
    for root in (path, path.parent, path.parent.parent):
        place = MeshPaths(root)
        if place.settings.is_file():
            require_own_file(place.directory)
            require_own_file(place.settings)
            return place
    raise NotFound(f"there is no mesh at {path}", fix="Start one with `meshrl up`")


def find_head(path: Path | None) -> MeshPaths:
    """Return the mesh, as `find_mesh` does.

    Raises Refused on a joined host: records of hosts and tokens are at the head.
    """
    place = find_mesh(path)
    place.require_head()
    return place


def choose_run_directory(config: JobConfig, force: bool) -> Path:
    """Return the path of a new run: `out`, or `runs/<name>`, `runs/<name>-2`, ...; create nothing.

    Raises Refused if `out` is occupied, because the user named that very path, unless `force` is to
    replace it.
    """
    named = config.out_directory
    target = Path(named).expanduser() if named else Path("runs") / config.name
    if force or not is_occupied(target):
        return target.absolute()
    if named:
        raise Refused(
            f"{target} is not empty",
            fix=f"Run `meshrl resume {target}` to continue it, use --force to start over, or "
            "set another `out`",
        )
    number = 2
    while is_occupied(target.with_name(f"{config.name}-{number}")):
        number += 1
    return target.with_name(f"{config.name}-{number}").absolute()


def require_run(directory: Path) -> Path:
    """Return the absolute path of a run's directory. Raises NotFound when no run is there."""
    if not (directory / "job.json").is_file():
        if (directory / "bundle").is_dir() and (directory / "events.jsonl").is_file():
            raise CorruptData(
                f"the job.json of the run in {directory} is missing",
                fix=(
                    f"Run `meshrl resume {format_path(directory)}`, which rewrites it if the "
                    "run's Redis has a copy"
                ),
            )
        raise NotFound(
            f"there is no run in {directory}: it has no job.json",
            fix="Name a directory under runs/",
        )
    return directory.absolute()


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a document. Raises CorruptData when it is not as written."""
    if path.exists() and not path.is_file():  # a pipe would be waited for without end
        raise CorruptData("it is not a regular file", where=str(path))
    return documents.decode(path.read_bytes(), str(path))


def read_json_or_empty(path: Path) -> dict[str, Any]:
    """Return a document's content; empty if it is corrupt or missing, as others repeat it."""
    try:
        return read_json(path)
    except (CorruptData, FileNotFoundError):
        return {}


def write_json(path: Path, content: dict[str, Any], *, durable: bool = True) -> None:
    """Write a file atomically: no reader sees half a file. Raises StorageFull."""
    documents.write(path, content, durable=durable)


def is_occupied(directory: Path) -> bool:
    """Return True if the path has anything but an empty directory."""
    if not os.path.lexists(directory):
        return False
    return not directory.is_dir() or any(directory.iterdir())


def format_path(path: Path) -> str:
    """Return a path as a user would type it: relative to the working directory if it is below."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def find_root_pid(mesh_paths: MeshPaths) -> int:
    """Return the pid of the process that runs the mesh; 0 when none does."""
    marker = read_json_or_empty(mesh_paths.root_marker)
    pid = int(marker.get("pid", 0))
    if not pid:
        return 0
    return pid if read_start_time(pid) == marker["start_time"] != 0 else 0
