"""What a test sees of jails from outside."""

from __future__ import annotations

import asyncio
import contextlib

import psutil

from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from tests.load import scaled

SOON_S = 60.0  # for a jail to begin on a busy host
ZYGOTE = 1  # Python process of a launcher without jails
JAIL = 2  # Python processes of a jail: its keeper and its guest


def programs_below(pid: int) -> list[str]:
    """What runs in the processes that a process has started, and in theirs."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended between the two looks
            found.append(process.name())
    return found


def pythons(launcher: JailLauncher) -> list[str]:
    """The Python processes inside of its outer jail: those of jails, and the zygote."""
    return [name for name in programs_below(launcher.pid) if name.startswith("python")]


async def guests_run(launcher: JailLauncher, jails: int = 1) -> None:
    """Returns once the programs of so many jails have been started."""
    async with asyncio.timeout(scaled(SOON_S)):
        while len(pythons(launcher)) < ZYGOTE + jails * JAIL:
            await asyncio.sleep(0.005)
