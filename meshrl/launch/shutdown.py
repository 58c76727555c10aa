"""Stop of a mesh's root process, or a host's, from another process."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from meshrl.directory.directory_paths import MeshPaths, find_root_pid, read_json_or_empty
from meshrl.launch import leftover_processes

STOP_TIMEOUT_S = 60.0  # for the orderly end of all processes of a host
POLL_S = 0.1


def stop_root_process(mesh_paths: MeshPaths, leave_mesh: bool = False) -> tuple[int, list[int]]:
    """Stop the root process; return its pid, 0 when none ran, and the pids of leftover processes.

    It has the time that it states for its end, and is killed then. With `leave_mesh` a host leaves
    the mesh by itself once it has ended: in a container the requesting process ends together with
    it.
    """
    pid = find_root_pid(mesh_paths)
    if pid:
        if leave_mesh:
            mesh_paths.leave_marker.touch(mode=0o600)
        told_s = float(read_json_or_empty(mesh_paths.root_marker).get("end_s", STOP_TIMEOUT_S))
        os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + told_s
        while find_root_pid(mesh_paths) == pid and time.monotonic() < until:
            time.sleep(POLL_S)
        if find_root_pid(mesh_paths) == pid:
            os.kill(pid, signal.SIGKILL)
    return pid, asyncio.run(
        leftover_processes.kill_leftovers(mesh_paths.settings.resolve(), STOP_TIMEOUT_S)
    )
