"""Memory of all processes of a jail together, where no control group bounds it.

One process is bounded by its address space. So what is looked for is more than one: several that
each stay below the limit, and what they share, which is counted once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

LOOK_S = 0.05  # between two looks; a core fills some 100 MB meanwhile
LOOK_SHARE = 50  # times what a look took: looking costs 2 % of a core at most
PAGE = os.sysconf("SC_PAGE_SIZE")
OVERHEAD_BYTES = 16 << 20  # as of control groups: what a fork has beside what the program asks for


class Watched:
    """`members` names the processes, `newest` the number that was given last to a process or
    thread of theirs: while that is `only`, there is one process. `due` is when to look next.
    """

    def __init__(
        self,
        limit: int,
        members: Callable[[], list[int]],
        newest: Callable[[], int],
        only: int,
    ) -> None:
        self._limit = limit + OVERHEAD_BYTES
        self._members, self._newest, self._only = members, newest, only
        self.due = time.monotonic() + LOOK_S

    def over(self) -> bool:
        """Whether they are over the limit now."""
        begun = time.monotonic()
        found = self._newest() != self._only and self._is_over()
        now = time.monotonic()
        self.due = now + max(LOOK_S, LOOK_SHARE * (now - begun))
        return found

    def _is_over(self) -> bool:
        members = self._members()
        resident = {pid: _resident(pid) for pid in members}
        if sum(resident.values()) <= self._limit:
            return False
        # Pages that several have count for each above, and by their share here.
        return sum(_share(pid, resident[pid]) for pid in members) > self._limit


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE
    except OSError:  # it has ended
        return 0


def _share(pid: int, most: int) -> int:
    """Its pages, those that it shares by its part of them; `most` where it keeps that from us."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) << 10
    except OSError:
        return most
    return most
