"""Finds the processes of a trial: those whose environment or command line holds its mark."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from meshrl.common.mesh.process.handle import start_time

LOOK_S = 0.1


def processes_of(mark: str) -> list[int]:
    """The running ones, this process and zombies not among them."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            place = Path("/proc") / name
            about = (place / "environ").read_bytes() + (place / "cmdline").read_bytes()
        except OSError:
            continue
        if mark.encode() in about and int(name) != os.getpid() and start_time(int(name)):
            found.append(int(name))
    return found


async def left(mark: str, within_s: float, but: frozenset[int] = frozenset()) -> list[int]:
    """What is still there of a trial after so long; returns as soon as nothing is."""
    until = time.monotonic() + within_s
    while found := [pid for pid in processes_of(mark) if pid not in but]:
        if time.monotonic() > until:
            break
        await asyncio.sleep(LOOK_S)
    return found
