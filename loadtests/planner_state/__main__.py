"""Benchmark of the planner's cost in Redis: a snapshot and a write of a large pool, and an idle
mesh.

Usage:

    python -m loadtests.planner_state

`snapshot_ms` and `write_ms` are CPU-milliseconds of the server for one script, during which it
answers no client: of a snapshot of `--gangs` gangs with an engine each, `--jobs` jobs and whole
registry rows; of a full chunk of decisions (`write_ms`), and of one decision with its memory
(`write_one_ms`). Snapshots and writes alternate; medians.

An idle mesh has so many workers with real leases and the workers' own polls, an agent for each
eight, and two planners. `commands_per_s_WORKERS` is what clients send; `commands_growth` its ratio
from the least to the most workers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
import redis.asyncio

from loadtests.measuring.entry import options, report
from loadtests.measuring.meshed import redis as served
from loadtests.measuring.rounds import turns
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.random import Random
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.dependencies import MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import jobs, leader, registry
from meshrl.common.state.pool.scheduling.decisions import (
    Decision,
    FormGang,
    PlaceInstance,
    Rationale,
)
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.rows import (
    Instance,
    InstancePhase,
    InstanceReport,
    Role,
    Tier,
    WorkerRow,
)
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.common.state.redis.client import StateClient
from meshrl.services.node.job_services import POLL_S as AGENT_LOOK_S
from meshrl.services.node.worker import POLL_S
from meshrl.services.planner.planner import Planner
from meshrl.sim.virtual_network import MemoryNetwork, MemoryTransport

LEASE_MS = 3_600_000
WORKERS_OF_HOST = 8
SETTLE_S = 8.0
# Makes all leases as short as those of processes are: to fill the pool takes longer than that.
RENEW = """
local time = redis.call('TIME')
local at = (tonumber(time[1]) + 6) * 1000
for _, name in ipairs(redis.call('ZRANGE', '{mesh}:entries', 0, -1)) do
  redis.call('ZADD', '{mesh}:entries', at, name)
end
return 'renewed'
"""
WHY = Rationale("default", "job0", {"share": 0.5})
# Published values of an engine: its work, its memory, its loop and its traffic.
STATS = {
    "tokens": 123456789,
    "decode_curve": [1, 0.01234, 0.0001234, 1.234e-07, 6123.0, 123456],
    **{f"counter_of_something_{n}": 12345.678 + n for n in range(40)},
}


@dataclass
class Counted:
    """Redis client that counts its commands, and the length of the answers."""

    client: Any
    commands: int = 0
    longest: int = 0


class QueryCounter(Counted):
    async def execute_command(self, *words: Any) -> Any:
        self.commands += 1
        reply = await self.client.execute_command(*words)
        if isinstance(reply, str):
            self.longest = max(self.longest, len(reply))
        return reply

    async def aclose(self) -> None:
        await self.client.aclose()


class Renewing(Counted):
    def execute_command(self, *words: Any) -> Any:
        self.commands += 1
        return self.client.execute_command(*words)

    def close(self) -> None:
        self.client.close()


@contextlib.asynccontextmanager
async def on_redis() -> AsyncIterator[tuple[StateClient, QueryCounter, Renewing]]:
    """Provide a State on its own temporary Redis, and a counter of its commands."""
    with tempfile.TemporaryDirectory(prefix="meshrl-") as scratch, served(Path(scratch)) as url:
        common: dict[str, Any] = {"decode_responses": True, "protocol": 2}
        few = redis.asyncio.BlockingConnectionPool.from_url(url, max_connections=16, **common)
        many = redis.ConnectionPool.from_url(url, max_connections=2000, **common)
        asking = QueryCounter(redis.asyncio.Redis.from_pool(few))
        renewing = Renewing(redis.Redis.from_pool(many))
        state = StateClient(url, asking, renewing)
        try:
            await state.run_command("PING")
            yield state, asking, renewing
        finally:
            await state.close()


# -- one snapshot and one write ------------------------------------------------------------------


@dataclass
class Timer:
    """CPU time of the server by script: a loaded machine would make wall time longer."""

    state: StateClient
    server_ms: dict[str, list[float]] = field(default_factory=dict)

    async def time(self, what: str, work: Coroutine[Any, Any, Any]) -> Any:
        before = await self._spent_ms()
        answer = await work
        self.server_ms.setdefault(what, []).append(await self._spent_ms() - before)
        return answer

    async def _spent_ms(self) -> float:
        found = await self.state.run_command("INFO", "cpu")
        used = found["used_cpu_user_main_thread"] + found["used_cpu_sys_main_thread"]
        return float(1000 * used)


async def filled(state: StateClient, timer: Timer, gangs: int, count: int) -> int:
    """Fill a pool in which every gang of one worker has a ready engine; return its leader's
    token.
    """
    token = await leader.campaign(state, "planner", "loadtest", LEASE_MS)
    await pool.write_settings(state, PoolSettings())
    document = JobConfig().to_document()
    for n in range(count):
        await jobs.submit(state, f"job{n}", {**document, "seed": n}, "/runs", f"submit{n}")
    hosts = {f"host{n // WORKERS_OF_HOST}" for n in range(gangs)}
    for host in hosts:
        await registry.register(state, registry.RegistryEntry(f"node/{host}", "node"), LEASE_MS)
    tokens = []
    for n in range(gangs):
        host = f"host{n // WORKERS_OF_HOST}"
        stats = {"gang": f"g{n}", "instance": f"g{n}.0", "job": f"job{n % count}", **STATS}
        for name, kind in ((f"worker/w{n}", "worker"), (f"engine/g{n}.0", "engine")):
            entry = registry.RegistryEntry(
                name,
                kind,
                "tcp://127.0.0.1:40000",
                host=host,
                incarnation=uuid.uuid4().hex[:16],
                stats=stats,
                run_root="/runs/mesh",
            )
            held = await registry.register(state, entry, LEASE_MS)
            if kind == "worker":
                tokens.append(held)
        await pool.join_worker(state, WorkerRow(f"w{n}", host, "cpu:0", tokens[n]))
    decisions: list[Decision] = []
    for n in range(gangs):
        decisions.append(FormGang(f"g{n}", (f"w{n}",), WHY))
        decisions.append(
            PlaceInstance(f"g{n}", Instance(f"g{n}.0", f"job{n % count}", Role.ROLLOUT), WHY)
        )
    for n in range(0, len(decisions), pool.DECISIONS_PER_SCRIPT):
        chunk = decisions[n : n + pool.DECISIONS_PER_SCRIPT]
        await timer.time("write", pool.write_decisions(state, token, f"fill{n}", chunk, None))
    for n in range(gangs):
        report = InstanceReport(0, 1, 1, tokens[n], InstancePhase.READY, Tier.ACCELERATOR)
        assert await pool.report_instance(state, f"w{n}", f"g{n}", f"g{n}.0", report)
    return token


async def large_pool(gangs: int, count: int, repeats: int) -> dict[str, Any]:
    async with on_redis() as (state, asking, _):
        timer = Timer(state)
        token = await filled(state, timer, gangs, count)
        memory = {"missing_since": {f"w{n}": n for n in range(gangs // 16)}}
        await pool.read_snapshot(
            state, token
        )  # the documents of the jobs come with the first snapshot
        asking.longest = 0
        epoch = 1
        for n in range(repeats):
            await state.run_command("EVAL", RENEW, 0)
            found = await timer.time("snapshot", pool.read_snapshot(state, token))
            assert len(found.snapshot.gangs) == len(found.snapshot.workers) == gangs
            epoch += 1
            wish = Instance(f"g{n % gangs}.0", "job0", Role.ROLLOUT, epoch=epoch)
            one: list[Decision] = [PlaceInstance(f"g{n % gangs}", wish, WHY)]
            work = pool.write_decisions(state, token, f"op{n}", one, memory, found.revision)
            assert await timer.time("write_one", work) == []
        used = (await state.run_command("INFO", "memory"))["used_memory"]
        spent = {f"{what}_ms": statistics.median(ms) for what, ms in timer.server_ms.items()}
        figures = {what: round(ms, 2) for what, ms in spent.items()}
        return {"answer_bytes": asking.longest, "redis_bytes": used, **figures}


# -- a mesh that does nothing --------------------------------------------------------------------


class Idle:
    def __init__(self, state: StateClient) -> None:
        self.state, self.clock, self.random = state, SystemClock(), Random.from_os_entropy()
        self.network = MemoryNetwork(self.clock, self.random.child("network"))
        self.members: list[Mesh] = []
        self.tasks: list[asyncio.Task[None]] = []

    def member(self, name: str) -> Mesh:
        mesh = Mesh(
            name,
            name.partition("/")[0],
            MeshDependencies(
                state=self.state,
                transport=MemoryTransport(self.network, f"mem://{name}"),
                clock=self.clock,
                random=self.random.child(name),
                host=SystemHost(),
            ),
        )
        self.members.append(mesh)
        return mesh

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.create_task(work))

    async def worker(self, n: int) -> None:
        mesh = self.member(f"worker/w{n}")
        await mesh.join(None)
        host = f"host{n // WORKERS_OF_HOST}"
        await pool.join_worker(self.state, WorkerRow(f"w{n}", host, "cpu:0", mesh.token))
        self.run(self._every(POLL_S, lambda: pool.read_worker(self.state, f"w{n}")))

    async def agent(self, host: str) -> None:
        await self.member(f"node/{host}").join(None)
        self.run(self._every(AGENT_LOOK_S, lambda: pool.read_host_services(self.state, host)))

    async def planner(self, n: int) -> None:
        mesh = self.member(f"planner/{n}")
        planner = Planner(mesh)
        await mesh.join(planner)
        self.run(planner.serve())

    async def _every(self, seconds: float, ask: Callable[[], Coroutine[Any, Any, object]]) -> None:
        await self.clock.sleep(seconds * self.random.random())
        while True:
            await ask()
            await self.clock.sleep(seconds)

    async def leave(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for mesh in self.members:
            await mesh.leave()


async def idle_mesh(workers: int, seconds: float) -> float:
    """Return the commands a second of a mesh without jobs."""
    async with on_redis() as (state, asking, renewing):
        mesh = Idle(state)
        await pool.write_settings(state, PoolSettings())
        try:
            for n in range(workers):
                await mesh.worker(n)
            for n in range(-(-workers // WORKERS_OF_HOST)):
                await mesh.agent(f"host{n}")
            for n in range(2):
                await mesh.planner(n)
            await asyncio.sleep(SETTLE_S)
            before, at = asking.commands + renewing.commands, time.monotonic()
            await asyncio.sleep(seconds)
            took = time.monotonic() - at
            sent = asking.commands + renewing.commands - before
            ended = [task for task in mesh.tasks if task.done()]
            assert not ended, ended[0].exception()
            return round(sent / took, 1)
        finally:
            await mesh.leave()


async def measured(a: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"load": os.getloadavg()[0]}
    result |= await large_pool(a.gangs, a.jobs, a.repeats)
    found: dict[int, list[float]] = {workers: [] for workers in sorted(a.workers)}
    for workers in turns([*found], a.rounds):
        found[workers].append(await idle_mesh(workers, a.seconds))
    rates = {workers: statistics.median(rates) for workers, rates in found.items()}
    result |= {f"commands_per_s_{workers}": rate for workers, rate in rates.items()}
    return result | {"commands_growth": round(rates[max(rates)] / rates[min(rates)], 2)}


def main() -> None:
    parser = options(
        __doc__,
        gangs=1024,
        jobs=64,
        repeats=21,
        workers=[64, 256],
        seconds=20.0,
        rounds=2,
    )
    a = parser.parse_args()
    report(asyncio.run(measured(a)))


if __name__ == "__main__":
    main()
