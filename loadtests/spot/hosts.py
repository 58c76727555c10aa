"""Spot hosts of a mesh on this machine, which join as a user's do and are killed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from loadtests.measuring.commands import meshrl
from loadtests.measuring.entry import print_progress
from loadtests.measuring.metered import family
from meshrl.common.base.host.settings import MeshSettings
from meshrl.directory.directory_paths import MeshPaths, find_root_pid
from meshrl.sim.cluster.model.availability import Availability

NOTICE_S = 6.0  # a host looks for notices every two seconds
POLL_S = 0.1


@dataclass
class SpotHost:
    """Host of one spot worker, from its join to its kill; times are of the wall clock."""

    root: Path
    notice: Path  # its preemption notice, while the file exists
    requested_s: float  # its command began
    joined_s: float = 0.0
    name: str = ""  # in the mesh; empty: it has not joined yet
    is_leaving: bool = False
    killed_s: float = 0.0  # 0: it was not killed

    def kill(self) -> None:
        """Kill all processes of this host, the parents first."""
        self.killed_s = time.time()
        for process in family(find_root_pid(MeshPaths(self.root))):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)

    def announce_end(self, after_s: float) -> None:
        """Write its notice of an end after so many seconds."""
        self.notice.write_text(datetime.fromtimestamp(time.time() + after_s, UTC).isoformat())

    def withdraw_notice(self) -> None:
        self.notice.unlink(missing_ok=True)


class SpotHosts:
    """Spot hosts of one worker each. A host that was killed never returns; the next is another."""

    def __init__(self, folder: Path, head: Path, price: float, seed: int) -> None:
        self._folder, self._head, self._price = folder, head, price
        self._token, self._creating = folder / "host.token", asyncio.Lock()
        self.random = random.Random(seed)
        self.hosts: list[SpotHost] = []  # all so far
        self.noticed = 0  # kills with a notice

    @property
    def present(self) -> list[SpotHost]:
        """Hosts that have joined, or are joining, and are not to leave."""
        return [host for host in self.hosts if not host.is_leaving]

    @property
    def running(self) -> list[SpotHost]:
        """Hosts that have joined and are not to leave."""
        return [host for host in self.present if host.name]

    async def join(self, count: int) -> None:
        """Let further hosts join, and return once they have."""
        async with self._creating:
            if not self._token.exists():
                words = ("--host", "--uses", "0", "--out", str(self._token))
                await meshrl("token", "create", *words, "--mesh", str(self._head))
        await asyncio.gather(*(self._join_one() for _ in range(count)))

    async def _join_one(self) -> None:
        number = len(self.hosts)
        root, notice = self._folder / f"s{number}", self._folder / f"s{number}.notice"
        host = SpotHost(root, notice, time.time())
        self.hosts.append(host)
        words = [
            str(self._token),
            "--root",
            str(root),
            "--workers",
            "1",
            "--market",
            "spot",
            "--services",
            "none",
        ]
        words += ["--price", str(self._price), "--notice", f"file:{notice}"]
        await meshrl("join", *words, "--no-standby", "--ephemeral")
        host.joined_s = time.time()
        host.name = MeshSettings.from_file(MeshPaths(root).settings).host

    async def vanish(self, host: SpotHost, has_notice: bool) -> None:
        """Kill a host, with a notice before or without any."""
        host.is_leaving = True
        if has_notice:
            self.noticed += 1
            host.announce_end(NOTICE_S)
            await asyncio.sleep(NOTICE_S)
        print_progress(f"kill {host.name}{' after a notice' if has_notice else ''}")
        host.kill()

    async def follow(self, trace: Availability) -> None:
        """Let hosts join and vanish by a trace, half of them with a notice."""
        started_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for at_s, count in trace:
                await asyncio.sleep(max(0.0, started_s + at_s - time.monotonic()))
                excess = len(self.present) - count
                print_progress(f"{at_s:.0f} s: {count} spot workers")
                if excess < 0:
                    tasks.create_task(self.join(-excess))
                for _ in range(excess):
                    while not self.running:  # all of them are still joining
                        await asyncio.sleep(POLL_S)
                    victim = self.random.choice(self.running)
                    victim.is_leaving = True
                    tasks.create_task(self.vanish(victim, self.random.random() < 0.5))

    def end(self) -> None:
        """Kill all hosts and remove their files."""
        for host in self.hosts:
            host.is_leaving = True
            host.kill()
            shutil.rmtree(host.root, ignore_errors=True)


@contextlib.asynccontextmanager
async def spot_hosts(folder: Path, head: Path, price: float, seed: int) -> AsyncIterator[SpotHosts]:
    """Yield the spot hosts of a mesh, which end with the block."""
    found = SpotHosts(folder, head, price, seed)
    try:
        yield found
    finally:
        found.end()
