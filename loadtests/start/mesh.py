"""Whole idle mesh, forked and executed in turn: its memory, role process restarts, and move times.

Three workers: a core and two engines, paced so that the job's first step takes longer than this.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from loadtests.measuring.metered import LOOK_S, started
from loadtests.trainer import digits
from meshrl.common.mesh.process.forking.fork_client import FORK_SERVER_ENV, FORK_SERVER_OFF
from meshrl.common.state import registry
from meshrl.common.state.pool.scheduling.snapshot import PoolRequest
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.rows import Instance, Role
from meshrl.common.state.redis.client import StateClient

LENGTH = 1200  # tokens: over 20 s at that pace
WORKERS = 3
WITHIN_S = 120.0
AT_REST_S = 1.0  # after the last role process is ready
CHANGES = (
    "planner.imbalance=1000000.0",  # the planner leaves every worker where it is
    "rollout.emulate=a100-14b",
    "rollout.slots=8",
)


def mesh(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    task = digits.write(folder / "task", (LENGTH,))
    found: dict[str, list[dict[str, float]]] = {"": [], "spawned_": []}
    for repeat in range(chosen.repeats):
        for mark, runs in found.items():
            out = folder / f"{mark}{repeat}"
            job = task.job_file(out, steps=10, workers=WORKERS)
            runs.append(asyncio.run(one(job, out, spawned=bool(mark))))
    return {
        name.replace("_", f"_{mark}", 1): median(run[name] for run in runs)
        for mark, runs in found.items()
        for name in runs[0]
    }


async def one(job: Path, out: Path, spawned: bool) -> dict[str, float]:
    os.environ.pop(FORK_SERVER_ENV, None)
    if spawned:
        os.environ[FORK_SERVER_ENV] = FORK_SERVER_OFF
    try:
        async with started(job, out, *CHANGES) as (state, meter), asyncio.timeout(WITHIN_S):
            await until(lambda: all_settled(state))
            await asyncio.sleep(AT_REST_S)
            figures = {"pss_mb": pss_mb(meter.launcher)}
            figures["restart_s"] = await restarted(state)
            figures["move_decided_s"], figures["move_s"] = await moved(state)
            return figures
    finally:
        os.environ.pop(FORK_SERVER_ENV, None)


async def until(what: Callable[[], Awaitable[bool]]) -> float:
    began = time.perf_counter()
    while not await what():
        await asyncio.sleep(LOOK_S)
    return time.perf_counter() - began


async def all_settled(state: StateClient) -> bool:
    found = await residents(state)
    return len(found) == WORKERS and all(one.is_reconciled for one in found.values())


async def residents(state: StateClient) -> dict[str, Instance]:
    return {
        gang.workers[rank]: resident
        for gang in await pool.read_gangs(state)
        for resident in gang.instances
        for rank in resident.ranks
    }


async def an_engine(state: StateClient) -> registry.RegistryEntry:
    return next(e for e in await registry.list_entries(state, "engine") if e.alive)


async def restarted(state: StateClient) -> float:
    engine = await an_engine(state)
    os.kill(engine.pid, signal.SIGKILL)

    async def back() -> bool:
        entry = await registry.lookup(state, engine.name)
        assert entry is not None
        return entry.alive and entry.pid != engine.pid and entry.stats.get("ready") is True

    took = await until(back)
    await until(lambda: all_settled(state))
    return took


async def moved(state: StateClient) -> tuple[float, float]:
    """Return seconds from a request to move an engine's worker to the decision, and on to ready."""
    engine = await an_engine(state)
    there = await residents(state)
    worker = next(w for w, one in there.items() if engine.name == f"engine/{one.id}")
    await pool.submit_request(
        state, PoolRequest(uuid.uuid4().hex, "move", worker=worker, role=Role.TRAINING)
    )

    async def decided() -> bool:
        now = (await residents(state)).get(worker)
        return now is not None and now.role == Role.TRAINING

    return await until(decided), await until(lambda: all_settled(state))


def pss_mb(launcher: int) -> float:
    """Sum the proportional set sizes of the launcher's descendants: shared pages count once."""
    total_kb = 0
    for process in psutil.Process(launcher).children(recursive=True):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            total_kb += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total_kb / 1024
