"""What `/proc` shows of a process; nothing once it has ended."""

from __future__ import annotations

import os

PAGE = os.sysconf("SC_PAGE_SIZE")


def read_stat(pid: int) -> list[bytes]:
    """Fields of /proc/PID/stat from the third (the state) on; names need not be text."""
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def read_schedstat_s(process_path: str) -> tuple[float, float]:
    """Seconds that a process, or a thread of it, has run, and has waited for a core."""
    found = _read(f"/proc/{process_path}/schedstat").split()
    return (int(found[0]) / 1e9, int(found[1]) / 1e9) if len(found) > 1 else (0.0, 0.0)


def read_rss_bytes(pid: int) -> int:
    """Its pages in memory, also those that it shares."""
    found = _read(f"/proc/{pid}/statm").split()
    return int(found[1]) * PAGE if found else 0


def read_pss_bytes(pid: int) -> int:
    """Its pages, those that it shares by its part of them; all where the kernel does not say."""
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
