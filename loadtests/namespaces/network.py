"""The network between hosts: a link of each to the router, its rate, losses and cuts.

All names are within namespaces: this machine's own network sees nothing of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from loadtests.namespaces.router import DEVICE

COMMAND_S = 30.0
BURST = "256kb"  # of a link, above the longest segment: those that are longer would be cut
QUEUED = "50ms"  # that a link holds before it drops
TABLE = "77"  # routing table of packets from a link


class NetworkError(RuntimeError):
    """A command of the network has failed."""


def address(number: int) -> str:
    return f"10.77.{number}.2"


async def commanded(*words: str, feed: str = "") -> str:
    """Return the output of a command; NetworkError if it fails."""
    command = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(COMMAND_S):
            out, error = await command.communicate(feed.encode())
    finally:
        if command.returncode is None:
            command.kill()
            await command.wait()
    if command.returncode:
        raise NetworkError(f"{' '.join(words)}: {error.decode().strip()} {feed}")
    return out.decode()


def within(pid: int) -> list[str]:
    """Return the command prefix that enters the network namespace of a process."""
    return ["nsenter", f"--target={pid}", "--net"]


class Network:
    def __init__(self, router: int, rate: str, delayed: bool) -> None:
        """`rate`: as of `tc`, of each link and direction; empty: as fast as it goes."""
        self._router, self._rate, self._delayed = router, rate, delayed

    async def begin(self) -> None:
        """Route packets from links through the delay."""
        if self._delayed:
            await self._ip(f"route add default dev {DEVICE} table {TABLE}")

    async def link(self, number: int, pid: int) -> None:
        ours, theirs, gate = f"h{number}", address(number), f"10.77.{number}.1"
        await commanded(
            *("ip", "link", "add", ours, "netns", str(self._router)),
            *("type", "veth", "peer", "name", "eth0", "netns", str(pid)),
        )
        lines = [f"addr add {gate}/24 dev {ours}", f"link set {ours} up"]
        # Without it a router would report a killed host as unreachable.
        lines.append(f"route replace blackhole 10.77.{number}.0/24 metric 9999")
        if self._delayed:
            lines.append(f"rule add iif {ours} lookup {TABLE}")
        await asyncio.gather(
            self._ip(*lines),
            self._batch(pid, f"addr add {theirs}/24 dev eth0", "link set eth0 up"),
        )
        await self._batch(pid, f"route add default via {gate}")
        if self._rate:
            await asyncio.gather(
                *(self._limit(*end) for end in ((self._router, ours), (pid, "eth0")))
            )
        if "-N H" not in await self._tables("-S", f"H{number}", missing=True):
            await self._tables("-N", f"H{number}")
            for way in ("-i", "-o"):
                await self._tables("-A", "FORWARD", way, ours, "-j", f"H{number}")

    async def unlink(self, number: int) -> None:
        """Remove the remains of a killed host."""
        if self._delayed:
            await self._ip(f"rule del iif h{number} lookup {TABLE}")

    async def rules(self, number: int, rules: Iterable[str]) -> None:
        """Replace the rules for packets from and to a host."""
        await self._tables("-F", f"H{number}")
        for rule in rules:
            await self._tables("-A", f"H{number}", *rule.split(), "-j", "DROP")

    async def _limit(self, pid: int, device: str) -> None:
        shape = ["tbf", "rate", self._rate, "burst", BURST, "latency", QUEUED]
        await commanded(*within(pid), "tc", "qdisc", "add", "dev", device, "root", *shape)

    async def _ip(self, *lines: str) -> None:
        await self._batch(self._router, *lines)

    async def _batch(self, pid: int, *lines: str) -> None:
        await commanded(*within(pid), "ip", "-batch", "-", feed="\n".join([*lines, ""]))

    async def _tables(self, *words: str, missing: bool = False) -> str:
        try:
            return await commanded(*within(self._router), "iptables", "-w", *words)
        except NetworkError:
            if missing:
                return ""
            raise
