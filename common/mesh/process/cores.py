"""Processors that the processes of this host share, and their use; memory and CPU time of this
process.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from meshrl.common.mesh.process.ends import limits

TICKS = os.sysconf("SC_CLK_TCK")  # that /proc/stat counts in a second
IDLE = (3, 4, 8, 9)  # columns of /proc/stat that are idle, or counted elsewhere (guests')
CHILDREN = "cpu_children_s"
USAGE = ("rss_mb", "cpu_s", CHILDREN, "loop_lag_ms")  # a monitor sees them in its own units
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Cores(NamedTuple):
    """Processors, and the seconds for which they were busy since any fixed time, all together."""

    number: float  # 0: not known
    busy_s: float


def cores() -> Cores:
    """Of the nearest control group that bounds this process' time, with what others of it used;
    else of the processors that it may run on, with what anybody used.
    """
    for place in limits.groups_of("cpu"):
        share, used_s = limits.group_cores(place), _group_used_s(place)
        if share is not None and used_s is not None:
            return Cores(min(share, len(os.sched_getaffinity(0))), used_s)
    return of_stat(Path("/proc/stat").read_text(), os.sched_getaffinity(0))


def of_stat(text: str, allowed: set[int]) -> Cores:
    """What a text like /proc/stat's says of some processors. What a hypervisor took counts as busy:
    nobody here can have it.
    """
    number, ticks = 0, 0
    for line in text.splitlines():
        name, *columns = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in allowed:
            number += 1
            ticks += sum(int(n) for i, n in enumerate(columns) if i not in IDLE)
    return Cores(number, ticks / TICKS)


def _group_used_s(place: Path) -> float | None:
    """Seconds of processors that a control group's processes used; None: nobody counts them."""
    used = limits.counter(place / "cpu.stat", "usage_usec")
    if used is not None:
        return used / 1e6
    try:
        return int((place / "cpuacct.usage").read_text()) / 1e9
    except (OSError, ValueError):
        return None


def usage() -> dict[str, float]:
    """Resident memory, and CPU seconds of this process (all threads) and of the children it has
    reaped.
    """
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    times = os.times()
    return {
        "rss_mb": round(pages * _PAGE / 1e6, 1),
        "cpu_s": round(time.process_time(), 3),
        CHILDREN: round(times.children_user + times.children_system, 3),
    }
