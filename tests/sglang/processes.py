"""Processes of a session, from /proc."""

from __future__ import annotations

import os
from pathlib import Path


def pids_of_session(session: int) -> list[int]:
    """Return the processes of a session, without exited ones that wait for their parent."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(entry.name))
    return found


def title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def scheduler_of(session: int) -> int:
    """Return the process of a server that computes."""
    found = [pid for pid in pids_of_session(session) if "scheduler" in title_of(pid)]
    assert len(found) == 1
    return found[0]


def environment_of(pid: int) -> dict[str, str]:
    rows = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(row.decode().split("=", 1) for row in rows if b"=" in row)


def directory_of(pid: int) -> Path:
    return Path(os.readlink(f"/proc/{pid}/cwd"))
