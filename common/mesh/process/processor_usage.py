"""Processors that the processes of this host share, and their use; memory and CPU time of this
process.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from meshrl.common.mesh.process.diagnosis import host_limits

TICKS_PER_S = os.sysconf("SC_CLK_TCK")  # ticks of /proc/stat per second
IDLE_COLUMNS = (3, 4, 8, 9)  # columns of /proc/stat that are idle, or counted in others (guests)
CHILDREN_CPU = "cpu_children_s"
USAGE_KEYS = ("rss_mb", "cpu_s", CHILDREN_CPU, "loop_lag_ms")  # monitors have these in other units
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProcessorUsage(NamedTuple):
    """Number of processors, and the seconds that they were busy in total since some fixed time."""

    core_count: float  # 0: unknown
    busy_s: float


def measure_processors() -> ProcessorUsage:
    """Measure the nearest control group that limits CPU time, including its other processes.

    Without one, measure the processors that this process may run on, used by any process.
    """
    for place in host_limits.list_control_groups("cpu"):
        share, used_s = host_limits.read_group_cores(place), _read_group_cpu_s(place)
        if share is not None and used_s is not None:
            return ProcessorUsage(min(share, len(os.sched_getaffinity(0))), used_s)
    return parse_proc_stat(Path("/proc/stat").read_text(), os.sched_getaffinity(0))


def parse_proc_stat(text: str, allowed: set[int]) -> ProcessorUsage:
    """Parse the lines of some processors in a text like /proc/stat's.

    Time that the hypervisor took counts as busy, because no process here can use it.
    """
    number, ticks = 0, 0
    for line in text.splitlines():
        name, *columns = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in allowed:
            number += 1
            ticks += sum(int(n) for i, n in enumerate(columns) if i not in IDLE_COLUMNS)
    return ProcessorUsage(number, ticks / TICKS_PER_S)


def _read_group_cpu_s(place: Path) -> float | None:
    """Return the CPU seconds of a control group's processes; None if they are not counted."""
    used = host_limits.read_counter(place / "cpu.stat", "usage_usec")
    if used is not None:
        return used / 1e6
    try:
        return int((place / "cpuacct.usage").read_text()) / 1e9
    except (OSError, ValueError):
        return None


def measure_process_usage() -> dict[str, float]:
    """Return resident memory, and CPU seconds of this process (all threads) and of its reaped
    children.
    """
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    times = os.times()
    return {
        "rss_mb": round(pages * _PAGE_BYTES / 1e6, 1),
        "cpu_s": round(time.process_time(), 3),
        CHILDREN_CPU: round(times.children_user + times.children_system, 3),
    }
