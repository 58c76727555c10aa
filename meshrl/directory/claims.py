"""The directory of a new run: made once the start can be expected to succeed, and taken back if it
does not. A run that --force replaces lies aside until then.
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

from meshrl.common.base.errors import Damaged, NotFound, Refused, StateUnavailable, StorageFull
from meshrl.common.base.files.at_url import AtUrl
from meshrl.common.job.config import JobConfig
from meshrl.common.state import jobs
from meshrl.common.state.jobs import ENDED
from meshrl.directory import job_file, places
from meshrl.directory.asking import ANSWER_S, ask
from meshrl.directory.places import MeshPlace, read_if_whole, running_launcher

TAKEN = ".starting"  # a file in a directory that a start has taken
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class Claim:
    """A new run's directory, which is empty."""

    directory: Path
    made: list[Path]  # directories that were not there, innermost first
    aside: Path | None = None  # where the run that it replaces lies
    taken: bool = False
    kept: bool = False

    def keep(self) -> None:
        """The run has begun, or nobody knows: its directory stays."""
        self.kept = True
        (self.directory / TAKEN).unlink(missing_ok=True)

    def replace(self) -> None:
        """The run goes on: what it replaces goes."""
        if self.aside is not None:
            told = "of the run that was replaced cannot be deleted"
            shutil.rmtree(
                self.aside,
                onerror=lambda _, path, why: print(f"{path} {told}: {why[1]}", file=sys.stderr),
            )
            self.aside = None

    def mark(self) -> None:
        """Takes the directory: it is not empty from here on."""
        with (self.directory / TAKEN).open("x") as mark:
            self.taken = True
            mark.write("a run is being started here\n")

    def give_back(self) -> None:
        """Leaves everything as it was before."""
        if self.taken:
            for path in self.directory.iterdir():
                folder = path.is_dir() and not path.is_symlink()
                shutil.rmtree(path, ignore_errors=True) if folder else path.unlink()
        with contextlib.suppress(OSError):  # somebody else has put something there
            for path in self.made:
                path.rmdir()
        if self.aside is None:
            return
        try:
            self.aside.rename(self.directory)
        except OSError as error:
            self.tell_of_replaced(str(error))

    def tell_of_replaced(self, why: str) -> None:
        """Where the run lies that was to be replaced, and is neither deleted nor put back."""
        told = f"the run that --force replaces is whole in {self.aside} ({why})"
        print(f"{told}; `mv` it to a name of its own, and `meshrl resume` goes on", file=sys.stderr)


@contextlib.contextmanager
def claimed(config: JobConfig, force: bool) -> Iterator[Claim]:
    """The directory of a new run, which stays if it is kept within the context.

    Refused when it cannot be written, and when `force` would delete what is no run, or one that
    goes on.
    """
    if config.out_url and not force:
        there = AtUrl(config.out_url, "out", "the URL")
        with contextlib.suppress(NotFound):
            there.content("job.json")
            raise Refused(
                f"a run lies at {there.shown} already",
                fix=f"`meshrl resume {there.shown}` continues it, --force starts over; or set "
                "another `out`",
            )
    with contextlib.ExitStack() as stack:
        with writing(Path(config.out_directory or "runs")):
            target = places.run_directory(config, force)
            occupied = places.occupied(target)
        aside = None
        if occupied:
            stack.enter_context(_may_go(target))
            aside = target.with_name(f".{target.name}.replaced-{uuid.uuid4().hex[:8]}")
            with writing(target):
                target.rename(aside)
        claim = Claim(target, [], aside)
        try:
            _make(claim, config)
            yield claim
        finally:
            if not claim.kept:
                claim.give_back()
            elif claim.aside is not None:
                claim.tell_of_replaced(f"the one in {target} did not come up")


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """What the system says when something cannot be written there, as one line."""
    try:
        yield
    except OSError as error:
        path = error.filename or directory
        kind = StorageFull if error.errno in FULL else Refused
        fix = "Free some space" if kind is StorageFull else "Set another `out`"
        raise kind(
            f"the run directory {directory} cannot be written: {path}: {error.strerror}", fix=fix
        ) from error


def _make(claim: Claim, config: JobConfig) -> None:
    """Makes the claim's directory, or the next one when somebody else was faster."""
    while True:
        missing = [p for p in (claim.directory, *claim.directory.parents) if not p.exists()]
        try:
            with writing(claim.directory):
                for path in reversed(missing):
                    path.mkdir()
                    claim.made.insert(0, path)
                claim.mark()
            return
        except Refused as error:
            numbered = not config.out_directory and claim.aside is None
            if not (numbered and isinstance(error.__cause__, FileExistsError)):
                raise
        claim.give_back()
        claim.directory, claim.made = places.run_directory(config, False), []


@contextlib.contextmanager
def _may_go(directory: Path) -> Iterator[None]:
    """Refused unless a run of ours lies there that nobody works on; nobody begins to meanwhile."""
    if directory.is_symlink():
        raise Refused(
            f"{directory} is a symbolic link to {directory.readlink()}: --force does not follow it",
            fix="Name the directory itself in `out`, or remove the link",
        )
    for name, protected in (("working", Path.cwd()), ("home", Path.home())):
        if protected.resolve().is_relative_to(directory.resolve()):
            raise Refused(
                f"{directory} is or holds the {name} directory, which --force does not delete",
                fix="Set another `out`",
            )
    job, mesh = _run_in(directory)
    if mesh is not None:
        _done_on(MeshPlace(mesh), directory, job)
        yield
        return
    with locked(MeshPlace(directory), directory):
        yield


def _run_in(directory: Path) -> tuple[str, Path | None]:
    """(the run's job, the mesh that it was submitted to); Refused when there is no run."""
    try:
        held = job_file.read(directory / job_file.NAME)
    except (OSError, Damaged) as error:
        raise Refused(
            f"{directory} is no run: --force deletes nothing that has no job.json of a run",
            fix="Set another `out`, or delete it yourself",
        ) from error
    return held["job"], Path(held["mesh"]) if "mesh" in held else None


@contextlib.contextmanager
def locked(place: MeshPlace, run_dir: Path) -> Iterator[None]:
    """Holds the lock of a mesh, if there is one; Refused while the mesh runs."""
    with contextlib.ExitStack() as stack:
        if place.lock.is_file():
            lock = stack.enter_context(place.lock.open("r"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                pid = running_launcher(place)
                raise Refused(
                    f"the run in {run_dir} goes on" + (f", in process {pid}" if pid else ""),
                    fix=f"`meshrl watch {run_dir}` shows it; `meshrl down --mesh {place.root}` "
                    "stops it",
                ) from error
        yield


def runs(place: MeshPlace) -> bool:
    """Whether a launcher holds the mesh's lock."""
    try:
        with locked(place, place.root):
            return False
    except Refused:
        return True


def _done_on(place: MeshPlace, directory: Path, job: str) -> None:
    """Refused unless the mesh that a job was submitted to has done with it."""
    if not place.settings.is_file():
        return  # there is no such mesh any more
    fix = f"`meshrl cancel {directory}` ends it; or set another `out`"
    summary = directory / "summary.json"
    written = read_if_whole(summary).get("phase")
    if not runs(place):
        if written not in ENDED:
            raise Refused(
                f"the run in {directory} has not ended: it waits for its mesh in {place.root}",
                fix=f"`meshrl resume {directory}` goes on; or set another `out`",
            )
        return
    try:
        row = ask(place, lambda state: jobs.job(state, job), ANSWER_S)
    except NotFound:
        return
    except StateUnavailable as error:
        raise Refused(
            f"whether the run in {directory} goes on cannot be seen: {error.message}",
            fix=f"`meshrl down --mesh {place.root}` stops its mesh; or set another `out`",
        ) from error
    if row.run_dir != str(directory):
        return
    if not row.ended:
        raise Refused(f"the run in {directory} goes on, on the mesh in {place.root}", fix=fix)
    if written != row.phase:  # the summary is the last file of a run: its recorder still writes
        raise Refused(
            f"the run in {directory} is over and is being written down",
            fix=f"`meshrl wait {directory}` returns when it is; or set another `out`",
        )
