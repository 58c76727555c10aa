"""Processes that are the ranks of a gang."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable


def fork(run: Callable[[int], None], rank: int) -> int:
    """Fork a process that runs a rank; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        run(rank)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def fork_all(run: Callable[[int], None], ranks: int) -> int:
    """Run all ranks, and end the others when one of them fails; return the exit status."""
    running = {fork(run, rank) for rank in range(ranks)}
    failed = 0
    while running:
        pid, status = os.wait()
        running.discard(pid)
        failed = failed or status
        for other in running if failed else ():
            os.kill(other, signal.SIGKILL)
    return int(failed != 0)
