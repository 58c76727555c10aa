"""Memory of all processes of a jail together, where no control group bounds it.

One process is bounded by its address space. So what is looked for is more than one: several that
each stay below the limit, and what they share, which is counted once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from . import proc

LOOK_S = 0.05  # between two looks; a core fills some 100 MB meanwhile
LOOK_SHARE = 50  # times the CPU time that a look took: looking costs 2 % of a core at most
LOOKS = 20  # at processes that come and go, before they are over the limit
OVERHEAD_BYTES = 16 << 20  # as of control groups: what a fork has beside what the program asks for


class Watched:
    """`members` names the processes, `newest` the number that was given last to a process or
    thread of theirs: while that is `only`, there is one process. `due` is when to look next.
    """

    def __init__(
        self, limit: int, members: Callable[[], list[int]], newest: Callable[[], int], only: int
    ) -> None:
        self._limit = limit + OVERHEAD_BYTES
        self._members, self._newest, self._only = members, newest, only
        self.due = time.monotonic() + LOOK_S

    def over(self) -> bool:
        """Whether they are over the limit now."""
        begun = time.thread_time()
        found = self._newest() != self._only and self._is_over()
        self.due = time.monotonic() + max(LOOK_S, LOOK_SHARE * (time.thread_time() - begun))
        return found

    def _is_over(self) -> bool:
        # When one of them ends, its part of what is shared becomes the others': looks at each in
        # turn are believed when nobody came or went meanwhile, or when all of many say the same.
        for _ in range(LOOKS):
            resident = self._resident()
            if sum(resident.values()) <= self._limit:
                return False
            # Pages that several have count for each above, and by their share here.
            if sum(map(proc.share_bytes, resident)) <= self._limit:
                return False
            if self._resident().keys() == resident.keys():
                return True
        return True

    def _resident(self) -> dict[int, int]:
        """Bytes of those that have memory: of one that has ended there may still be a number."""
        found = {pid: proc.resident_bytes(pid) for pid in self._members()}
        return {pid: size for pid, size in found.items() if size}
