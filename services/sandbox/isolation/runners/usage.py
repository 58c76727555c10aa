"""What a runner's processes use, seen from this host: a kernel inside of a container may lie."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Use:
    cpu_s: float  # of all of them, and of those that they have waited for
    queued_s: float  # that their threads have waited for a core
    memory_bytes: int  # what is shared counts once
    runnable: bool = False  # one of them runs or waits for a core


def tree(root: int) -> list[int]:
    """The processes below `root`, itself left out, which adopts those whose parents end."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))):
            children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    waiting = children.get(root, [])
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, [])
    return found


def ended(pid: int) -> bool:
    """Whether it is gone, but for its parent's asking how."""
    fields = _stat(pid)
    return not fields or fields[0] in (b"Z", b"X")


def of(pids: list[int], memory: bool) -> Use:
    """Their use together; memory is looked at on demand, as it costs most."""
    ticks, queued_ns, size, runnable = 0, 0, 0, False
    for pid in pids:
        if fields := _stat(pid):
            ticks += sum(map(int, fields[11:15]))
            queued_ns += _queued(pid)
            runnable = runnable or fields[0] == b"R"
            size += _memory(pid) if memory else 0
    return Use(ticks / TICKS, queued_ns / 1e9, size, runnable)


def _stat(pid: int) -> list[bytes]:
    """Fields of /proc/PID/stat from the third (the state) on; empty once it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def _queued(pid: int) -> int:
    total = 0
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as file:
                total += int(file.read().split()[1])
    except (OSError, IndexError):
        return total
    return total


def _memory(pid: int) -> int:
    """Its share of what it has in memory; all of that where the kernel does not say."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE
    except OSError:
        return 0


def kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:  # it has ended, or was started by a program that is not ours to end
            continue
