"""Figures of a process in `/proc`; empty once it has ended."""

from __future__ import annotations

import os

PAGE = os.sysconf("SC_PAGE_SIZE")


def read_stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the third (the state) on; names need not be text."""
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def read_schedstat_s(process_path: str) -> tuple[float, float]:
    """Return the seconds that a process, or a thread, has run, and has waited for a core."""
    found = _read(f"/proc/{process_path}/schedstat").split()
    return (int(found[0]) / 1e9, int(found[1]) / 1e9) if len(found) > 1 else (0.0, 0.0)


def read_rss_bytes(pid: int) -> int:
    """Return the bytes of its pages in memory, shared ones included."""
    found = _read(f"/proc/{pid}/statm").split()
    return int(found[1]) * PAGE if found else 0


def read_pss_bytes(pid: int) -> int:
    """Return the bytes of its pages, shared ones in proportion; all if that is unknown."""
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) << 10
    return read_rss_bytes(pid)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
