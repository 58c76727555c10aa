"""Memory and CPU time that this process uses."""

from __future__ import annotations

import os
import time

CHILDREN = "cpu_children_s"
USAGE = ("rss_mb", "cpu_s", CHILDREN, "loop_lag_ms")  # a monitor sees them in its own units
_PAGE = os.sysconf("SC_PAGE_SIZE")


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
