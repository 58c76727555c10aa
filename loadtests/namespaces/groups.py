"""Control groups of hosts: each host has one in every writable hierarchy.

The groups that a host creates there do not affect other hosts.
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
    """Return a name prefix that identifies the owner: pid and start time of its process."""
    me = psutil.Process()
    return f"{PREFIX}{me.pid}-{int(me.create_time())}-"


def owned(name: str) -> bool:
    """Return True if the process that owns this name is still running."""
    pid, _, began = name.removeprefix(PREFIX).partition("-")
    try:
        return int(psutil.Process(int(pid)).create_time()) == int(began.partition("-")[0])
    except (psutil.NoSuchProcess, ValueError):
        return False


def sweep() -> list[str]:
    """Remove groups whose owners have exited; return their names."""
    places = [Path(tempfile.gettempdir()), *homes()]
    names = {path.name for place in places for path in place.glob(f"{PREFIX}*")}
    gone = sorted(name for name in names if not owned(name))
    for name in gone:
        removed(name)
        shutil.rmtree(places[0] / name, ignore_errors=True)
    return gone


def homes() -> list[Path]:
    """List the groups of this process in which others can be created."""
    found: dict[Path, None] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(",") if controllers else ("unified", ""):
            place = ROOT / name if name else ROOT
            if name in NAMED and (place / "cgroup.procs").exists():
                found[(place.resolve() / path.lstrip("/"))] = None
    return [place for place in found if place.is_dir() and os.access(place, os.W_OK)]


def create(name: str) -> list[Path]:
    """Create a group of this name in each hierarchy; return their paths."""
    found = []
    for home in homes():
        with contextlib.suppress(OSError):  # this hierarchy is not ours to change
            (home / name).mkdir(exist_ok=True)
            found.append(home / name)
    return found


def entered(places: list[Path]) -> tuple[str, ...]:
    """Return the files into which a process writes itself to enter the groups."""
    return tuple(str(place / "cgroup.procs") for place in places)


def removed(name: str) -> None:
    """Remove the groups of this name and all below them; they must have no processes."""
    for home in homes():
        for folder, _, _ in os.walk(home / name, topdown=False):
            with contextlib.suppress(OSError):  # a process of it is not buried yet: the next sweep
                os.rmdir(folder)
