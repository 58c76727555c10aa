"""Mesh of one arm: started, monitored, stopped, with a record of its events."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests.measuring.commands import meshrl
from loadtests.measuring.meshed import opened
from loadtests.measuring.metered import MOST_CORES, HostMeter, Meter
from loadtests.measuring.processes import beside
from loadtests.measuring.rounds import Arm
from meshrl.client.client import Client, JobHandle
from meshrl.common.base.errors import MeshError
from meshrl.common.state import events, registry
from meshrl.common.state.events import Event
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.rows import Gang
from meshrl.common.state.redis.client import StateClient
from meshrl.directory.directory_paths import MeshPaths, find_root_pid

CONNECT_S = 10.0
LOOK_S = 0.25  # between two polls of the processes' published values
RUN_S = 3600.0  # for one job
RECORD_S = 300.0  # until the record of a job that is over is written; its model is, too
_COUNT = itertools.count()


@dataclass(frozen=True)
class Paces:
    """Speeds of the emulated accelerators."""

    rollout: str = "60/32/4000"
    training: str = "4000/200"

    def overrides(self) -> list[str]:
        """Return overrides as for `--set`; none for a job at full speed."""
        found = {"rollout.emulate": self.rollout, "training.emulate": self.training}
        return [f"{key}={value}" for key, value in found.items() if value]


@dataclass(frozen=True)
class Plan:
    job: Path
    steps: int  # of each job
    problems: int = 256  # held-out ones of an evaluation
    paces: Paces = field(default_factory=Paces)
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    moves: int = 3  # of each kind; and preemptions
    window_s: float = 60.0  # that shares are measured over

    def overrides(self, seed: int, *more: str) -> list[str]:
        """Return the `--set` overrides of a job with this seed."""
        return [
            f"seed={seed}",
            f"budget.steps={self.steps}",
            f"evaluation.problems={self.problems}",
            *self.paces.overrides(),
            *more,
        ]

    @contextlib.asynccontextmanager
    async def mesh(self, arm: str, workers: int) -> AsyncIterator[RunningMesh]:
        """Provide a mesh in a temporary folder; its path is short because socket paths are
        limited.
        """
        with tempfile.TemporaryDirectory(prefix=f"j{next(_COUNT)}-{arm}-") as made:
            async with mesh_up(Path(made), workers) as mesh:
                yield mesh


def accounts(summaries: list[dict[str, Any]]) -> Arm:
    return {
        key: sum(int(summary[key]) for summary in summaries)
        for key in ("lost", "trained_twice", "typed_drops")
    }


def greedy(summary: dict[str, Any]) -> float:
    return float((summary["held_out"].get("after") or {}).get("greedy") or 0.0)


@dataclass(frozen=True)
class WorkSample:
    at: float  # monotonic
    name: str
    job: str
    tokens: float
    pieces: float  # steps and pieces at a pace
    late: float


@dataclass
class Watched:
    last: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)  # by incarnation
    seen: list[WorkSample] = field(default_factory=list)
    held: list[tuple[float, dict[str, float]]] = field(default_factory=list)  # workers by job
    host: dict[str, float] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def honest(self) -> dict[str, Any]:
        """Return the validity figures of this arm."""
        return {
            **self.host,
            "late_share": late_share(self.last.values()),
            "valid": int(self.host.get("host_cores", 0.0) <= MOST_CORES),
        }


def late_share(processes: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the late ones of all steps at a pace, by the last stats of processes; None: none."""
    known = list(processes)
    paced = sum(stats.get("emulated_count", 0) for stats in known)
    return round(sum(stats.get("late_count", 0) for stats in known) / paced, 4) if paced else None


def workers_by_job(gangs: Iterable[Gang]) -> dict[str, float]:
    """Return the number of workers of each job; a shared worker counts in equal parts."""
    held: dict[str, float] = {}
    for gang in gangs:
        for rank in range(len(gang.workers)):
            jobs = sorted({one.job for one in gang.instances if rank in one.ranks})
            for job in jobs:
                held[job] = held.get(job, 0.0) + 1.0 / len(jobs)
    return held


class RunningMesh:
    def __init__(self, root: Path, state: StateClient, client: Client, launcher: int) -> None:
        self.root, self.state, self.client = root, state, client
        self.watched = Watched()
        self._host, self._meter = HostMeter(), Meter(launcher)
        self._began = time.monotonic()
        self._reading = asyncio.Lock()

    async def submit(self, job: Path, name: str, *overrides: str) -> JobHandle:
        out = self.root / name
        return await self.client.submit(job, [f"name={name}", f"out={out}", *overrides])

    def summary(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.root / name / "summary.json").read_text())
        return found

    async def finished(self, handle: JobHandle) -> dict[str, Any]:
        """Return the summary of a job once it is written; RuntimeError when it has not finished."""
        told = await handle.wait(RUN_S)
        path = self.root / handle.name / "summary.json"
        async with asyncio.timeout(RECORD_S):
            while not path.exists():
                await asyncio.sleep(0.2)
        if told.phase != "finished":
            raise RuntimeError(f"{handle.name} is {told.phase}: {told}")
        return self.summary(handle.name)

    async def events(self) -> list[Event]:
        """Return all events so far; a copy is retained because the mesh drops old ones."""
        seen = self.watched.events
        async with self._reading:
            seen += await events.read_all(self.state, seen[-1].id if seen else "0")
        return seen

    async def watch(self) -> None:
        while True:
            with contextlib.suppress(MeshError):  # a failed poll is left out
                now = time.monotonic()
                for entry in await registry.list_entries(self.state):
                    if entry.alive and "job" in entry.stats:
                        stats = entry.stats
                        self.watched.last[entry.name, entry.incarnation] = stats
                        figures = (
                            float(stats.get(key) or 0) for key in ("tokens", "paced", "late")
                        )
                        self.watched.seen.append(
                            WorkSample(now, entry.name, stats["job"], *figures)
                        )
                self.watched.held.append((now, workers_by_job(await pool.read_gangs(self.state))))
                await self.events()
                self._meter.record_usage()
            await asyncio.sleep(LOOK_S)

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU-seconds of all processes so far, by kind."""
        return self._meter.reading(roles=True)

    def close(self) -> None:
        wall_s = time.monotonic() - self._began
        used = sum(self.cpu_s().values())
        cores = {"mesh_cores": round(used / wall_s, 3), "wall_s": round(wall_s, 1)}
        self.watched.host = self._host.reading() | cores


@contextlib.asynccontextmanager
async def mesh_up(
    folder: Path, workers: int, *words: str, **pool_settings: Any
) -> AsyncIterator[RunningMesh]:
    """Provide a mesh of `workers` workers below `folder`, until the end of the block.

    `words`: further arguments of `meshrl up`.
    """
    root = folder / "mesh-root"
    root.mkdir(parents=True)
    lines = [f"{key} = {json.dumps(value)}" for key, value in pool_settings.items()]
    config = folder / "mesh.toml"
    config.write_text("\n".join(["[pool]", *lines, ""]))
    options = ("--root", str(root), "--workers", str(workers), "--config", str(config))
    await meshrl("up", *options, *words)
    place = MeshPaths(root)
    try:
        async with opened(place.redis_url, CONNECT_S) as state, Client(root) as client:
            mesh = RunningMesh(root, state, client, find_root_pid(place))
            try:
                async with beside(mesh.watch()):
                    yield mesh
            finally:
                mesh.close()
    finally:
        await meshrl("down", "--mesh", str(root))
