"""What the host did while an arm ran: a figure of a paced run is worth nothing on a busy one."""

from __future__ import annotations

import os
import time
from pathlib import Path

MOST_CORES = 1.6  # of two; above, processes wait for a core, and paces are not kept
_BUSY = (0, 1, 2, 5, 6)  # user, nice, system, irq, softirq: columns of /proc/stat
_STEAL = 7


class HostMeter:
    """Cores that were busy, and that the hypervisor gave to others, since it was made."""

    def __init__(self) -> None:
        self._began, self._ticks = time.monotonic(), _ticks()

    def reading(self) -> dict[str, float]:
        """`host_cores`, `steal_cores` (means) and `load` (of the last minute)."""
        wall_s = max(1e-6, time.monotonic() - self._began)
        hertz = os.sysconf("SC_CLK_TCK")
        spent = [(now - then) / hertz for now, then in zip(_ticks(), self._ticks, strict=True)]
        return {
            "host_cores": round(sum(spent[i] for i in _BUSY) / wall_s, 3),
            "steal_cores": round(spent[_STEAL] / wall_s, 3),
            "load": round(os.getloadavg()[0], 2),
        }


def _ticks() -> list[int]:
    columns = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    return [int(column) for column in columns]
