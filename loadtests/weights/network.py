"""Network namespaces with links that are capped in each direction, without other host isolation.

Their processes are forks of one fork server and share its files.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from loadtests.namespaces.network import Network, address

CLONE_NEWNET = 0x40000000
END_S = 10.0
HELD = "ip link set lo up && echo ready && exec cat"  # ends with its standard input


def enter(pid: int) -> None:
    """Enter another process's network namespace with this single-threaded process."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{pid}/ns/net").open("rb") as space:
        if libc.setns(space.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")


class Links:
    """Some namespaces, numbered from 0, and a router between them."""

    def __init__(self, rates: Iterable[str]) -> None:
        """`rates`: of each link, as of `tc`: "20mbps" are 20 million bytes a second."""
        self._rates = list(rates)
        self._held: list[asyncio.subprocess.Process] = []
        self.pids: list[int] = []  # of a process in each

    def __len__(self) -> int:
        return len(self._rates)

    def bind(self, number: int) -> str:
        """Return the address at which a process in the namespace listens."""
        return f"tcp://{address(number)}:*"

    async def __aenter__(self) -> Links:
        try:
            router = await self._holder(sys.executable, "-m", "loadtests.namespaces.router", "0")
            holders = [self._holder("sh", "-c", HELD) for _ in self._rates]
            self.pids = list(await asyncio.gather(*holders))
            for number, (pid, rate) in enumerate(zip(self.pids, self._rates, strict=True)):
                await Network(router, rate, False).link(number, pid)
        except BaseException:
            await self._clear()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._clear()

    def sent(self, number: int) -> int:
        """Return the bytes sent since its creation, with headers."""
        lines = Path(f"/proc/{self.pids[number]}/net/dev").read_text().splitlines()
        (device,) = [line for line in lines if line.strip().startswith("eth0:")]
        return int(device.partition(":")[2].split()[8])

    async def _holder(self, *words: str) -> int:
        held = await asyncio.create_subprocess_exec(
            *("unshare", "--net", *words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        self._held.append(held)
        async with asyncio.timeout(30.0):
            output = await held.stdout.readline() if held.stdout else b""
        if output != b"ready\n":
            raise RuntimeError(f"{words[0]} has not begun in a network of its own")
        return held.pid

    async def _clear(self) -> None:
        for held in self._held:
            with contextlib.suppress(ProcessLookupError):
                held.kill()
        for held in self._held:
            async with asyncio.timeout(END_S):
                await held.wait()
        self._held.clear()
