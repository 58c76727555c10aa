"""What a runner's processes use, seen from this host: a kernel inside of a container may lie."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass

from services.sandbox.jail.metering import proc

TICKS = os.sysconf("SC_CLK_TCK")


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
        if name.isdigit() and (fields := proc.fields(int(name))):
            children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    waiting = children.get(root, [])
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, [])
    return found


def runs(pid: int) -> bool:
    """Whether it is there, and not only for its parent to ask how it ended."""
    fields = proc.fields(pid)
    return bool(fields) and fields[0] not in (b"Z", b"X")


def of(pids: list[int], memory: bool) -> Use:
    """Their use together; memory is looked at on demand, as it costs most."""
    ticks, queued_s, size, runnable = 0, 0.0, 0, False
    for pid in pids:
        if fields := proc.fields(pid):
            ticks += sum(map(int, fields[11:15]))
            with contextlib.suppress(OSError):
                threads = os.listdir(f"/proc/{pid}/task")
                queued_s += sum(proc.scheduled(f"{pid}/task/{thread}")[1] for thread in threads)
            runnable = runnable or fields[0] == b"R"
            size += proc.share_bytes(pid) if memory else 0
    return Use(ticks / TICKS, queued_s, size, runnable)


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or is not ours to end
            os.kill(pid, signal.SIGKILL)
