"""Directory of a new run: created once the start can be expected to succeed, else removed again.

A run that --force replaces is moved to another path until then.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import shutil
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshrl.common.base.errors import CorruptData, NotFound, Refused, StateUnavailable, StorageFull
from meshrl.common.base.files.remote_directory import RemoteDirectory
from meshrl.common.job.config import JobConfig
from meshrl.common.state import jobs
from meshrl.common.state.jobs import TERMINAL_PHASES
from meshrl.directory import directory_paths, job_file
from meshrl.directory.directory_paths import MeshPaths, find_root_pid, read_json_or_empty
from meshrl.directory.mesh_query import ANSWER_TIMEOUT_S, query_mesh

CLAIM_FILE = ".starting"  # a file in a directory that a start has taken
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class RunClaim:
    """New run's directory, which is empty."""

    directory: Path
    created_directories: list[Path]  # directories that were not there, innermost first
    replaced_run: Path | None = None  # path of the run that it replaces
    is_marked: bool = False
    is_committed: bool = False

    def commit(self) -> None:
        """Retain the directory: the run has begun, or its state is unknown."""
        self.is_committed = True
        (self.directory / CLAIM_FILE).unlink(missing_ok=True)

    def delete_replaced_run(self) -> None:
        """Delete the replaced run, as the new one has started."""
        if self.replaced_run is not None:
            message = "of the replaced run cannot be deleted"
            shutil.rmtree(
                self.replaced_run,
                onerror=lambda _, path, why: print(f"{path} {message}: {why[1]}", file=sys.stderr),
            )
            self.replaced_run = None

    def create_marker(self) -> None:
        """Claim the directory: it is not empty from here on."""
        with (self.directory / CLAIM_FILE).open("x") as mark:
            self.is_marked = True
            mark.write("a run is starting here\n")

    def roll_back(self) -> None:
        """Restore everything as it was before."""
        if self.is_marked:
            for path in self.directory.iterdir():
                folder = path.is_dir() and not path.is_symlink()
                shutil.rmtree(path, ignore_errors=True) if folder else path.unlink()
        with contextlib.suppress(OSError):  # another process has put something there
            for path in self.created_directories:
                path.rmdir()
        if self.replaced_run is None:
            return
        try:
            self.replaced_run.rename(self.directory)
        except OSError as error:
            self.report_replaced_run(str(error))

    def report_replaced_run(self, reason: str) -> None:
        """Print the path of a replaced run that is neither deleted nor put back."""
        message = f"the run that --force replaces is preserved in {self.replaced_run} ({reason})"
        print(
            f"{message}. Move it to another name, then run `meshrl resume` to continue it",
            file=sys.stderr,
        )


@contextlib.contextmanager
def claim_run_directory(config: JobConfig, force: bool) -> Iterator[RunClaim]:
    """Yield the directory of a new run, which stays if it is committed within the context.

    Raises Refused when it cannot be written, and when `force` would delete a directory that is no
    run, or a run in progress.
    """
    if config.out_url and not force:
        there = RemoteDirectory(config.out_url, "out", "the URL")
        with contextlib.suppress(NotFound):
            there.read_file("job.json")
            raise Refused(
                f"{there.public_url} already contains a run",
                fix=f"Run `meshrl resume {there.public_url}` to continue it, use --force to "
                "start over, or set another `out`",
            )
    with contextlib.ExitStack() as stack:
        with translate_write_errors(Path(config.out_directory or "runs")):
            target = directory_paths.choose_run_directory(config, force)
            occupied = directory_paths.is_occupied(target)
        replaced_run = None
        if occupied:
            stack.enter_context(_lock_replaceable_run(target))
            replaced_run = target.with_name(f".{target.name}.replaced-{uuid.uuid4().hex[:8]}")
            with translate_write_errors(target):
                target.rename(replaced_run)
        claim = RunClaim(target, [], replaced_run)
        try:
            _create(claim, config)
            yield claim
        finally:
            if not claim.is_committed:
                claim.roll_back()
            elif claim.replaced_run is not None:
                claim.report_replaced_run(f"the new run in {target} did not start")


@contextlib.contextmanager
def translate_write_errors(directory: Path) -> Iterator[None]:
    """Translate the system's error of a failed write into one line."""
    try:
        yield
    except OSError as error:
        path = error.filename or directory
        kind = StorageFull if error.errno in DISK_FULL_ERRNOS else Refused
        fix = "Free disk space" if kind is StorageFull else "Set another `out`"
        raise kind(
            f"the run directory {directory} is not writable: {path}: {error.strerror}", fix=fix
        ) from error


def _create(claim: RunClaim, config: JobConfig) -> None:
    """Create the claim's directory, or the next one if another process was faster."""
    while True:
        missing = [p for p in (claim.directory, *claim.directory.parents) if not p.exists()]
        try:
            with translate_write_errors(claim.directory):
                for path in reversed(missing):
                    path.mkdir()
                    claim.created_directories.insert(0, path)
                claim.create_marker()
            return
        except Refused as error:
            numbered = not config.out_directory and claim.replaced_run is None
            if not (numbered and isinstance(error.__cause__, FileExistsError)):
                raise
        claim.roll_back()
        claim.directory, claim.created_directories = (
            directory_paths.choose_run_directory(config, False),
            [],
        )


@contextlib.contextmanager
def _lock_replaceable_run(directory: Path) -> Iterator[None]:
    """Lock a run for replacement: no process can resume it in the block.

    Raises Refused unless the directory has a run of ours that no process works on.
    """
    if directory.is_symlink():
        raise Refused(
            f"{directory} is a symbolic link to {directory.readlink()}: --force does not follow it",
            fix="Name the directory itself in `out`, or remove the link",
        )
    for name, protected in (("working", Path.cwd()), ("home", Path.home())):
        if protected.resolve().is_relative_to(directory.resolve()):
            raise Refused(
                f"{directory} is or contains the {name} directory, which --force does not delete",
                fix="Set another `out`",
            )
    job, mesh = _read_run(directory)
    if mesh is not None:
        _require_finished(MeshPaths(mesh), directory, job)
        yield
        return
    with lock_mesh(MeshPaths(directory), directory):
        yield


def _read_run(directory: Path) -> tuple[str, Path | None]:
    """Return (the run's job, the mesh that it was submitted to). Raises Refused when there is no
    run.
    """
    try:
        content = job_file.read_job_file(directory / job_file.JOB_FILE_NAME)
    except (OSError, CorruptData) as error:
        raise Refused(
            f"{directory} is not a run: --force deletes only directories with a run's job.json",
            fix="Set another `out`, or delete it yourself",
        ) from error
    return content["job"], Path(content["mesh"]) if "mesh" in content else None


@contextlib.contextmanager
def lock_mesh(mesh_paths: MeshPaths, run_dir: Path) -> Iterator[None]:
    """Hold the lock of a mesh, if there is one. Raises Refused while the mesh runs."""
    with contextlib.ExitStack() as stack:
        if mesh_paths.lock.is_file():
            lock = stack.enter_context(mesh_paths.lock.open("r"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                pid = find_root_pid(mesh_paths)
                raise Refused(
                    f"the run in {run_dir} is running" + (f", in process {pid}" if pid else ""),
                    fix=f"Run `meshrl watch {run_dir}` to see it, or `meshrl down --mesh "
                    f"{mesh_paths.root}` to stop it",
                ) from error
        yield


def is_mesh_running(mesh_paths: MeshPaths) -> bool:
    """Return True if a launcher holds the mesh's lock."""
    try:
        with lock_mesh(mesh_paths, mesh_paths.root):
            return False
    except Refused:
        return True


def _require_finished(mesh_paths: MeshPaths, directory: Path, job: str) -> None:
    """Raise Refused unless the mesh that a job was submitted to has finished it."""
    if not mesh_paths.settings.is_file():
        return  # there is no such mesh any more
    fix = f"Run `meshrl cancel {directory}` to end it, or set another `out`"
    summary = directory / "summary.json"
    written = read_json_or_empty(summary).get("phase")
    if not is_mesh_running(mesh_paths):
        if written not in TERMINAL_PHASES:
            raise Refused(
                f"the run in {directory} has not ended: it waits for its mesh in {mesh_paths.root}",
                fix=f"Run `meshrl resume {directory}` to continue it, or set another `out`",
            )
        return
    try:
        row = query_mesh(mesh_paths, lambda state: jobs.read_job(state, job), ANSWER_TIMEOUT_S)
    except NotFound:
        return
    except StateUnavailable as error:
        raise Refused(
            f"the state of the run in {directory} is unknown: {error.message}",
            fix=f"Run `meshrl down --mesh {mesh_paths.root}` to stop its mesh, or set another "
            "`out`",
        ) from error
    if row.run_dir != str(directory):
        return
    if not row.is_terminal:
        raise Refused(
            f"the run in {directory} is running on the mesh in {mesh_paths.root}", fix=fix
        )
    if written != row.phase:  # the summary is the last file of a run: its recorder still writes
        raise Refused(
            f"the run in {directory} has ended, but its files are still being written",
            fix=f"Run `meshrl wait {directory}` to wait for that, or set another `out`",
        )
