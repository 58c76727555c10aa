"""Open descriptors of this process.

Other threads close theirs at any time, so that a count of all descriptors is unreliable.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

from tests.load import scaled


def find_equal_descriptors(descriptor: int) -> set[int]:
    """Return all descriptors of this process that show the file, pipe or socket of this one."""
    file, found = os.fstat(descriptor), set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since it was listed
            other = os.fstat(int(name))
            if (other.st_dev, other.st_ino) == (file.st_dev, file.st_ino):
                found.add(int(name))
    return found


def list_descriptors() -> dict[int, str]:
    """Return the target of each descriptor of this process: a path, or a pipe or socket by
    number.
    """
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since it was listed, as the listing's own descriptor is
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


async def await_closed(before: dict[int, str]) -> None:
    """Return once no descriptor is open that was not open before; AssertionError if one stays."""
    loop = asyncio.get_running_loop()
    until = loop.time() + scaled(10.0)
    while left := list_descriptors().items() - before.items():
        assert loop.time() < until, left
        await asyncio.sleep(0.01)
