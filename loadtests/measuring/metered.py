"""A run of `meshrl run` with a meter on it: CPU of all its processes at every step commit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from loadtests.measuring.meshed import opened
from loadtests.measuring.processes import environment
from meshrl.common.state import events, jobs
from meshrl.common.state.redis.client import StateClient
from meshrl.view.recording.run_record import read_events

LOOK_S = 0.02  # how soon a commit is seen; a step takes half a second or more
START_S = 120.0  # until Redis is there; native code may have to be compiled before
RUN_S = 900.0
STOP_S = 60.0
FORK_SERVER = "fork-server"
MOST_CORES = 1.6  # of two; above, processes wait for a core, and paces are not kept
_BUSY = (0, 1, 2, 5, 6)  # user, nice, system, irq, softirq: columns of /proc/stat
_STEAL = 7


class HostMeter:
    """Cores that were busy, and that the hypervisor gave to others, since it was made."""

    def __init__(self) -> None:
        self._began, self._ticks = time.monotonic(), _ticks()

    def reading(self) -> dict[str, float]:
        """Return `host_cores`, `steal_cores` (means) and `load` (of the last minute)."""
        wall_s = max(1e-6, time.monotonic() - self._began)
        hertz = os.sysconf("SC_CLK_TCK")
        spent = [(now - then) / hertz for now, then in zip(_ticks(), self._ticks, strict=True)]
        return {
            "host_cores": round(sum(spent[i] for i in _BUSY) / wall_s, 3),
            "steal_cores": round(spent[_STEAL] / wall_s, 3),
            "load": round(os.getloadavg()[0], 2),
        }

    def get_validity(self, paced: bool = False) -> dict[str, Any]:
        """Return the reading, and `valid`: 0 where it was too busy for the pace of an arm."""
        reading = self.reading()
        return reading | {"valid": int(not paced or reading["host_cores"] <= MOST_CORES)}


def _ticks() -> list[int]:
    columns = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    return [int(column) for column in columns]


class Meter:
    """CPU time of the launcher and all that descends from it, by kind of process."""

    def __init__(self, launcher: int) -> None:
        self.launcher = launcher
        self._known: dict[tuple[int, float], tuple[str, float]] = {}

    def record_usage(self) -> None:
        """Record the CPU time of every process; an exited one retains its last reading."""
        for process in family(self.launcher):
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    key = (process.pid, process.create_time())
                    kind = self._known[key][0] if key in self._known else FORK_SERVER
                    if kind == FORK_SERVER:  # or its newest fork
                        kind = kind_of(process)
                self._known[key] = (kind, times.user + times.system)
            except psutil.Error:
                continue

    def reading(self, roles: bool) -> dict[str, float]:
        """Return CPU-seconds by kind; without the role processes if `roles` is False."""
        self.record_usage()
        used: dict[str, float] = {}
        for kind, seconds in self._known.values():
            if roles or kind not in ("engine", "trainer"):
                used[kind] = used.get(kind, 0.0) + seconds
        return used


def family(launcher: int) -> list[psutil.Process]:
    """Return the launcher and all that descends from it; none when it has ended."""
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(launcher)
        return [root, *root.children(recursive=True)]
    return []


def kind_of(process: psutil.Process) -> str:
    """Return the kind of a process by its command: engine, trainer, rollout, environment, ..."""
    line = " ".join(process.cmdline())
    for mark, kind in (
        ("meshrl.common.mesh.process.forking.fork_server", FORK_SERVER),
        ("meshrl.services.engine", "engine"),
        ("meshrl.services.trainer", "trainer"),
        ("meshrl.services.environment", "environment"),
        ("environment/verifiers_environment/boot.py", "environment"),
        ("meshrl.services.rollout", "rollout"),
        ("meshrl.services.sandbox", "sandbox"),
        ("meshrl.services.planner", "planner"),
        ("meshrl.services.weights", "weights"),
        ("meshrl.services.node", "node"),
        ("redis", "redis"),
        ("valkey", "redis"),
    ):
        if mark in line:
            return kind
    return "launcher"


@dataclass
class Measured:
    """Finished run: CPU time of all processes at each commit, by kind, and metrics."""

    readings: dict[int, dict[str, float]] = field(default_factory=dict)  # by step
    rows: list[dict[str, Any]] = field(default_factory=list)

    def per_step(self, first: int, last: int) -> dict[str, float]:
        """Return CPU-seconds of a step by kind of process, from commit `first` to commit `last`."""
        before, after = self.readings[first], self.readings[last]
        steps = last - first
        return {kind: (used - before.get(kind, 0.0)) / steps for kind, used in after.items()}


@contextlib.asynccontextmanager
async def started(job: Path, out: Path, *changes: str) -> AsyncIterator[tuple[StateClient, Meter]]:
    """Run the job until the end of the block; yield its Redis and a meter of all its processes."""
    command = [sys.executable, "-m", "meshrl", "run", str(job)]
    for change in changes:
        command += ["--set", change]
    log = out.with_suffix(".log")
    own = {k: v for k, v in environment().items() if k != "MESHRL_REDIS_URL"}  # and Redis is, too
    with log.open("wb") as stream:
        run = await asyncio.create_subprocess_exec(*command, stdout=stream, stderr=stream, env=own)
    try:
        settings = out / "mesh" / "settings.json"
        async with asyncio.timeout(START_S):
            while not settings.exists():
                if run.returncode is not None:
                    raise RuntimeError(f"the run ended with {run.returncode}")
                await asyncio.sleep(LOOK_S)
        async with opened(json.loads(settings.read_text())["redis_url"], 20.0) as state:
            yield state, Meter(run.pid)
    except BaseException:
        print(log.read_text()[-4000:], file=sys.stderr)
        raise
    finally:
        if run.returncode is None:
            run.send_signal(signal.SIGINT)
        async with asyncio.timeout(STOP_S):
            await run.wait()


async def run_job(job: Path, out: Path, until: int, *changes: str) -> Measured:
    """Run the job until step `until` is committed, then stop it."""
    measured = Measured()
    async with started(job, out, *changes) as (state, meter), asyncio.timeout(RUN_S):
        version = -1
        while version < until:
            row = next(iter(await jobs.read_jobs(state)), None)
            if row is not None and row.version > version:
                version = row.version
                measured.readings[version] = meter.reading(roles=True)
            if row is not None and row.phase == jobs.Phase.FAILED:
                raise RuntimeError(f"the job failed: {row.error}")
            await asyncio.sleep(LOOK_S)
        measured.rows = await steps_of(state, out)
    return measured


async def all_events(state: StateClient, run_dir: Path) -> list[events.Event]:
    recorded = read_events(run_dir)
    return recorded + await events.read_all(state, recorded[-1].id if recorded else "0")


async def steps_of(state: StateClient, run_dir: Path) -> list[dict[str, Any]]:
    found = await all_events(state, run_dir)
    return [e.fields["metrics"] for e in found if e.kind == "step"]
