"""Ends the process that runs a mesh, or a host's part of one, from another process."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from meshrl.directory.places import MeshPlace, read_if_whole, running_launcher
from meshrl.launch import leftovers

STOP_S = 60.0  # in which all processes of a host end in order
POLL_S = 0.1


def end(place: MeshPlace, leaves: bool = False) -> tuple[int, list[int]]:
    """Its pid, 0 when none ran; and those of what was left behind. It has the time that it says
    its end may take, and is killed then. With `leaves` a host leaves the mesh by itself once it has
    ended: in a container whoever asked for that ends together with it.
    """
    pid = running_launcher(place)
    if pid:
        if leaves:
            place.leaving.touch(mode=0o600)
        told_s = float(read_if_whole(place.launcher).get("end_s", STOP_S))
        os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + told_s
        while running_launcher(place) == pid and time.monotonic() < until:
            time.sleep(POLL_S)
        if running_launcher(place) == pid:
            os.kill(pid, signal.SIGKILL)
    return pid, asyncio.run(leftovers.end_all(place.settings.resolve(), STOP_S))
