"""Finder and killer of processes that a mesh left behind.

The path of its settings in their environment marks them. A stop ends with it, and a start begins
with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Collection
from pathlib import Path

from meshrl.common.base.host.settings import compute_mesh_tag
from meshrl.common.mesh.process import mesh_processes

POLL_S = 0.05


def find_leftovers(settings_path: Path) -> list[int]:
    """Return pids of other running processes that were started with these settings."""
    return mesh_processes.find_mesh_processes(compute_mesh_tag(settings_path))


async def kill_leftovers(
    settings_path: Path, deadline_s: float, excluded_pids: Collection[int] = ()
) -> list[int]:
    """SIGKILL leftover processes, except `excluded_pids`, until none is left.

    Returns the pids that were found. They have ended on return.
    """
    found: set[int] = set()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            while (
                pids := sorted({*find_leftovers(settings_path)} - {*excluded_pids})
            ) or mesh_processes.is_exec_in_progress():
                found.update(pids)
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(POLL_S)
    return sorted(found)
