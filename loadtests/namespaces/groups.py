"""Control groups of hosts: each has one in every hierarchy that can be written to, so that what it
makes in them is in no other's way.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import psutil

ROOT = Path("/sys/fs/cgroup")
NAMED = ("memory", "pids", "cpu", "cpuacct", "freezer", "unified", "")  # hierarchies; "": v2 alone
PREFIX = "meshrl-hosts-"


def mark() -> str:
    """A beginning of names that tells whose something is: pid and when that process began."""
    me = psutil.Process()
    return f"{PREFIX}{me.pid}-{int(me.create_time())}-"


def owned(name: str) -> bool:
    """Whether the process that has made what has this name is still there."""
    pid, _, began = name.removeprefix(PREFIX).partition("-")
    try:
        return int(psutil.Process(int(pid)).create_time()) == int(began.partition("-")[0])
    except (psutil.NoSuchProcess, ValueError):
        return False


def sweep() -> list[str]:
    """Removes what nobody owns any more; the names of it."""
    places = [Path(tempfile.gettempdir()), *homes()]
    names = {path.name for place in places for path in place.glob(f"{PREFIX}*")}
    gone = sorted(name for name in names if not owned(name))
    for name in gone:
        removed(name)
        shutil.rmtree(places[0] / name, ignore_errors=True)
    return gone


def homes() -> list[Path]:
    """Groups of this process in which others can be made."""
    found: dict[Path, None] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(",") if controllers else ("unified", ""):
            place = ROOT / name if name else ROOT
            if name in NAMED and (place / "cgroup.procs").exists():
                found[(place.resolve() / path.lstrip("/"))] = None
    return [place for place in found if place.is_dir() and os.access(place, os.W_OK)]


def made(name: str) -> list[Path]:
    """A group of this name in each."""
    found = []
    for home in homes():
        with contextlib.suppress(OSError):  # this hierarchy is not ours to change
            (home / name).mkdir(exist_ok=True)
            found.append(home / name)
    return found


def entered(places: list[Path]) -> tuple[str, ...]:
    """The files that a process writes itself into."""
    return tuple(str(place / "cgroup.procs") for place in places)


def removed(name: str) -> None:
    """Removes the groups of this name with all below them; nobody is in them any more."""
    for home in homes():
        for folder, _, _ in os.walk(home / name, topdown=False):
            with contextlib.suppress(OSError):  # a process of it is not buried yet: the next sweep
                os.rmdir(folder)
