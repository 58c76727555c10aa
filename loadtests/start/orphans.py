"""Test for orphans after an owner or the fork server is killed at a random moment of a start.

Owners start processes that wait, have stopped themselves, or hold the interpreter's lock. An owner
gets SIGKILL, or SIGSTOP and then SIGKILL; or the fork server does, and the owner, which is this
process, must see how each of its processes ended; or both get SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from loadtests.measuring.meshed import start_fork_server
from loadtests.start.fork_server import LOOK_S, fork_server, left, starting
from loadtests.start.owner import IN_THE_WAY
from meshrl.common.mesh.process.child_handle import UNKNOWN_EXIT_STATUS, SystemChild
from meshrl.common.mesh.process.forking.fork_client import ANSWER_TIMEOUT_S, FORK_SERVER_ENV
from meshrl.common.mesh.process.host import SystemHost

CHILDREN = 4  # of an owner
AT_ONCE = 4  # trials
MOMENTS_S = 0.4  # until the fault, at most: starts take about as long
STOPPED_S = 0.3  # of an owner, before it is killed
WITHIN_S = 10.0  # for nothing to be left
BEGIN_S = 60.0
LITTLE = "meshrl.common.mesh.process.host"  # imported by a small fork server
HOWS = ("kill", "stop", "fork-server", "both")


@dataclass
class OrphanResult:
    trials: int = 0
    orphans: int = 0
    hung: int = 0
    told: list[str] = field(default_factory=list)


class Trials:
    """Concurrent trials; those that kill a fork server have a small one of their own."""

    def __init__(self, host: SystemHost, folder: Path, fork_server: str) -> None:
        self._host, self._folder, self._fork_server = host, folder, fork_server
        self.found = OrphanResult()

    async def one(self, how: str, seed: int) -> None:
        chance, mark = random.Random(f"{how}{seed}"), uuid.uuid4().hex
        if how in ("kill", "stop"):
            await self._owner(self._fork_server, mark, seed, chance, how, 0)
        else:
            # The mark is the socket's name, so that the fork server belongs to its trial.
            async with start_fork_server(self._host, self._folder, mark, LITTLE) as (socket, small):
                if how == "both":
                    await self._owner(socket, mark, seed, chance, how, small.pid)
                else:
                    await self._kill_fork_server(socket, mark, chance, small.pid)
        remain = await left(mark, WITHIN_S)
        self.found.trials += 1
        self.found.orphans += len(remain)
        if remain:
            self.found.told.append(f"{how} {seed}: {len(remain)} left")
        for pid in remain:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def _owner(
        self, fork_server: str, mark: str, seed: int, chance: random.Random, how: str, pid: int
    ) -> None:
        """Start an owner in another process, which dies at a random moment."""
        owner = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "loadtests.start.owner", str(CHILDREN), str(seed)),
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {FORK_SERVER_ENV: fork_server, "MESHRL_TRIAL": mark},
        )
        assert owner.stdout is not None
        async with asyncio.timeout(BEGIN_S):
            await owner.stdout.readline()
        await asyncio.sleep(chance.uniform(0.0, MOMENTS_S))
        if how == "stop":
            owner.send_signal(signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
        victims = [owner.pid, *([pid] if pid else [])]
        chance.shuffle(victims)
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        # Not its output: its processes have that too.
        async with asyncio.timeout(WITHIN_S):
            while owner.returncode is None:
                await asyncio.sleep(0.02)

    async def _kill_fork_server(
        self, fork_server: str, mark: str, chance: random.Random, pid: int
    ) -> None:
        """Kill the fork server at a random moment; every process of ours must end and report its
        exit.
        """
        fault = threading.Timer(chance.uniform(0.0, MOMENTS_S), os.kill, (pid, signal.SIGKILL))
        fault.start()
        children: list[SystemChild] = []
        with starting(fork_server):
            for _ in range(CHILDREN):
                began = time.perf_counter()
                how = chance.choice(IN_THE_WAY)
                argv = [sys.executable, "-m", "loadtests.start.brief", how]
                child = self._host.spawn(argv, name=how, env={"MESHRL_TRIAL": mark})
                children.append(child)
                self.found.hung += time.perf_counter() - began > 2 * ANSWER_TIMEOUT_S
        fault.join()
        for child in children:
            child.kill()
        for child in children:
            code = await child.wait(WITHIN_S)
            self.found.hung += code is None
            if code not in (
                -signal.SIGKILL,
                UNKNOWN_EXIT_STATUS,
            ):  # the fork server had exited before its report
                self.found.told.append(f"{child.name} ended with {code}")


async def orphans(folder: Path, trials: int) -> dict[str, Any]:
    """Return `orphans` after ten seconds, of `orphan_trials`; `hung`: processes without an exit
    report.
    """
    host = SystemHost()
    async with fork_server(host, folder) as (socket, process):
        found = Trials(host, folder, socket)
        numbers = iter(range(trials))

        async def work() -> None:
            for number in numbers:
                await found.one(HOWS[number % len(HOWS)], number)

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        # Forks that have not started look like the fork server, and have no mark of a trial.
        until = time.monotonic() + WITHIN_S
        while remain := len(psutil.Process(process.pid).children()):
            if time.monotonic() > until:
                break
            await asyncio.sleep(LOOK_S)
    total = found.found
    return {
        "orphans": total.orphans + remain,
        "orphan_trials": total.trials,
        "hung": total.hung,
        "orphans_told": total.told[:5],
    }
