"""What tests that were killed have left: directories and control groups, by the pid in their names.

Namespaces, links, routes and processes leave nothing: they end with the first process of a host,
which ends with the test.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import psutil

from loadtests.namespaces import groups

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
    places = [Path(tempfile.gettempdir()), *groups.homes()]
    names = {path.name for place in places for path in place.glob(f"{PREFIX}*")}
    gone = sorted(name for name in names if not owned(name))
    for name in gone:
        groups.removed(name)
        shutil.rmtree(places[0] / name, ignore_errors=True)
    return gone
