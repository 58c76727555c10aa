"""Test of a thousand starts and ends through one fork server: exit statuses and orphans."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import psutil

from loadtests.start.fork_server import fork_server, left, starting
from meshrl.common.mesh.process.child_handle import SystemChild
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.spawning import SpawnOptions

AT_ONCE = 8
END_S = 60.0  # for a process to end, on a machine that others use
SETTLE_S = 1.0
WARM = 20  # starts before descriptors are counted
KINDS = ("exit", "killed", "terminated", "echo", "leave")


class Churn:
    """Children of all kinds, whose exits are compared with the required ones."""

    def __init__(self, host: SystemHost, mark: str, logs: Path) -> None:
        self._host, self._logs = host, logs
        self._environment = {"MESHRL_TRIAL": mark}
        self._random = random.Random(1)
        self.wrong: list[str] = []
        self.done = 0

    async def run(self, starts: int) -> None:
        numbers = iter(range(starts))

        async def work() -> None:
            for _ in numbers:
                kind = self._random.choice(KINDS)
                expected, found = await self._one(kind)
                self.done += 1
                if found != expected:
                    self.wrong.append(f"{kind}: {found}, not {expected}")

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))

    async def _one(self, kind: str) -> tuple[int, int | None]:
        """Return the required and the actual exit status."""
        status = self._random.randrange(256)
        if kind in ("killed", "terminated"):
            child = self._spawn("wait")
            await asyncio.sleep(self._random.uniform(0.0, 0.05))
            if kind == "killed":
                child.kill()
                return -signal.SIGKILL, await child.wait(END_S)
            child.terminate()
            return -signal.SIGTERM, await child.wait(END_S)
        child = self._spawn(kind, str(status), pipe=kind == "echo")
        if kind == "echo":
            await child.send(b"x" * status)
            if await child.recv(END_S) != b"x" * status:
                self.wrong.append("echo: another frame")
            child.close()
        return status, await child.wait(END_S)

    def _spawn(self, *words: str, pipe: bool = False) -> SystemChild:
        argv = [sys.executable, "-m", "loadtests.start.brief", *words]
        log = self._logs / "brief.log"
        return self._host.spawn(
            argv,
            name="brief",
            env=self._environment,
            log=log,
            options=SpawnOptions(has_channel=pipe),
        )


def descriptors(*pids: int) -> int:
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)


async def churned(folder: Path, starts: int) -> dict[str, Any]:
    host, mark = SystemHost(), uuid.uuid4().hex
    churn = Churn(host, mark, folder)
    async with fork_server(host, folder) as (socket, process):
        with starting(socket):
            await churn.run(WARM)
            await asyncio.sleep(SETTLE_S)
            before = descriptors(os.getpid(), process.pid)
            began, churn.done = time.perf_counter(), 0
            await churn.run(starts)
            took = time.perf_counter() - began
        remain = await left(mark, SETTLE_S)
        await asyncio.sleep(SETTLE_S)  # the fork server reports an exit, then closes its descriptor
        after = descriptors(os.getpid(), process.pid)
        children = len(psutil.Process(process.pid).children())  # zombies among them
    return {
        "starts_per_s": starts / took,
        "starts_wrong": len(churn.wrong),
        "starts_wrong_first": churn.wrong[:3],
        "leaked": max(0, after - before) + children + len(remain),
    }
