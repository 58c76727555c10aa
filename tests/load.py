"""Slowdown factor of this machine against an idle one, for every deadline of a test.

A deadline in a test only detects a hang and never measures speed. It may be long, and it must be
longer where the machine is slow or busy.
"""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path

LOOPS = 200_000
REFERENCE_S = 0.0055  # CPU time of the loops on a quiet core of an AMD EPYC (Zen 3), Python 3.11
LIMIT = 40.0  # beyond this factor, a hang would take hours to detect
PAGE_BYTES, SAMPLED_PAGES = 4096, 256
# Nanoseconds to touch a page that was not touched for seconds. A guest whose host takes its memory
# away needs 1,000 to 90,000. Programs then cost more, which no loop in a cache shows: the same
# daily tests took 519, 835 and 1,418 CPU seconds within two hours, the latter two at 2,500 to 2,900
# nanoseconds. No host that keeps its memory was measured.
COLD_PAGE_LIMIT_NS = 1000.0
COLD_PAGE_FACTOR = 3.0  # by which limits of costs rise on such a host
FACTOR_ENV = "MESHRL_TEST_FACTOR"  # the least factor, if set explicitly


def scaled(timeout_s: float) -> float:
    """Return a deadline for this machine as it is now, from the one for a quiet machine."""
    return timeout_s * factor()


def factor() -> float:
    """Return how many times longer work takes now than on a quiet machine, from 1 to LIMIT."""
    least = float(os.environ.get(FACTOR_ENV, "1"))
    return min(LIMIT, max(1.0, least, slowness() * max(1.0, runnable() / cores())))


@cache
def slowness() -> float:
    """Return the CPU time of a fixed loop relative to the reference core, measured once per
    process.
    """
    return max(1.0, min(timed_loop() for _ in range(3)) / REFERENCE_S)


def timed_loop() -> float:
    """Return the CPU seconds that the calibration loop took."""
    began = time.thread_time()
    total = 0
    for number in range(LOOPS):
        total += number
    return time.thread_time() - began


class ColdPages:
    """Memory that is touched only to measure how long a touch takes after seconds without one."""

    def __init__(self) -> None:
        self._memory = bytearray(b"\1" * (PAGE_BYTES * SAMPLED_PAGES))

    def measure_touch_ns(self) -> float:
        """Return the CPU nanoseconds to touch a page."""
        memory, began = self._memory, time.thread_time_ns()
        for offset in range(0, len(memory), PAGE_BYTES):
            memory[offset]
        return (time.thread_time_ns() - began) / SAMPLED_PAGES


def runnable() -> float:
    """Return the number of processes that need a core: the larger of the last minute's average and
    now.
    """
    average, _, _, now, _ = Path("/proc/loadavg").read_text().split()
    return max(float(average), float(now.partition("/")[0]))


def read_host_cpu_s() -> float:
    """Return the CPU seconds used by the host's processes, and the seconds stolen from it."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal, *_ = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))
