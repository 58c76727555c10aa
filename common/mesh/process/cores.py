"""How many processors the processes of this host share, and how much of their time was used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from common.mesh.process.ends import limits

TICKS = os.sysconf("SC_CLK_TCK")  # that /proc/stat counts in a second
IDLE = (3, 4, 8, 9)  # columns of /proc/stat that are idle, or counted elsewhere (guests')


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
