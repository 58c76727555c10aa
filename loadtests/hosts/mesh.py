"""A mesh over hosts, made by the commands that a person types: `up --listen`, `token`, `join`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from loadtests.hosts.eye import HostsSnapshot
from loadtests.jobs.mesh import Paces, late_share
from loadtests.measuring.metered import HostMeter
from loadtests.measuring.processes import beside
from loadtests.measuring.rounds import Arm
from loadtests.namespaces.host import Host
from loadtests.namespaces.hosts import Hosts
from loadtests.namespaces.init import HOME
from meshrl.common.state.jobs import TERMINAL_PHASES

ROOT = f"{HOME}/m"  # of the mesh, on each host
TOKEN = f"{HOME}/join.token"
PORTS = "7100-7299"  # of each host, beside those that it chooses
UP_S = 180.0
JOB_S = 3600.0
RECORD_S = 120.0  # until the summary of a job that is over is written
T = TypeVar("T")
BOOKS = ("lost", "trained_twice", "typed_drops", "host_lost", "hosts_lost")


@dataclass(frozen=True)
class Plan:
    job: Path
    steps: int  # of a paced job
    problems: int  # held-out ones of its evaluations
    cut_s: float  # how long each host is cut off
    rate: str
    delay_s: float
    frames: int  # of a flood
    paces: Paces = field(default_factory=Paces)

    def hosts(self, count: int = 3) -> Hosts:
        return Hosts(count, rate=self.rate, delay_s=self.delay_s)

    def paced(self, steps: int = 0) -> list[str]:
        """Return the overrides for an emulated job of this many steps."""
        return [
            f"budget.steps={steps or self.steps}",
            f"evaluation.problems={self.problems}",
            *self.paces.overrides(),
        ]


def books(summary: dict[str, Any]) -> Arm:
    """Return the losses and repetitions that a summary reports."""
    return {key: int(summary[key]) for key in BOOKS}


class HostsMesh:
    """Mesh whose head is host 0. `seen`: all snapshots of its observer."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.seen: list[HostsSnapshot] = []
        self.names: dict[int, str] = {}  # of hosts in the mesh, by number
        self._paced: dict[str, dict[str, Any]] = {}  # last stats of role processes
        self._more = asyncio.Event()

    @property
    def head(self) -> Host:
        return self.hosts[0]

    async def meshrl(self, *words: str, on: Host | None = None, check: bool = True) -> str:
        """Return the output of a `meshrl` command, run at the head unless `on` names a host."""
        ran = await (on or self.head).run("meshrl", *words, check=check, timeout_s=UP_S)
        return ran.out

    async def join(self, number: int, workers: int, standby: bool = True) -> float:
        """Let a host join with this many workers; return the wall clock at the start of its
        command.
        """
        host = self.hosts[number]
        await self.meshrl("token", "create", "--host", "--out", TOKEN, "--mesh", ROOT)
        carried = host.path(TOKEN)
        shutil.copyfile(self.head.path(TOKEN), carried)
        carried.chmod(0o600)
        self.head.path(TOKEN).unlink()
        known = set((await self.rows()).keys())
        started_s = time.time()
        words = ["--root", ROOT, "--workers", str(workers)]
        words += ["--listen", f"{host.address}:{PORTS}", *([] if standby else ["--no-standby"])]
        await self.meshrl("join", TOKEN, *words, on=host)
        (self.names[number],) = set((await self.rows()).keys()) - known
        return started_s

    async def rows(self) -> dict[str, dict[str, Any]]:
        found = json.loads(await self.meshrl("hosts", "--json", "--mesh", ROOT))
        return {row["host"]: row for row in found}

    async def submit(self, job: Path, name: str, *changes: str) -> None:
        """Submit a job under a name; its run is below the head's home directory."""
        words = [f"name={name}", f"out={HOME}/{name}", *changes]
        sets = [word for change in words for word in ("--set", change)]
        await self.meshrl("submit", str(job), "--mesh", ROOT, *sets)

    async def finished(self, name: str) -> dict[str, Any]:
        await self.until(
            lambda snapshot: job_of(snapshot, name).get("phase") in TERMINAL_PHASES, JOB_S
        )
        path = self.head.path(f"{HOME}/{name}/summary.json")
        async with asyncio.timeout(RECORD_S):
            while not path.exists():
                await asyncio.sleep(0.2)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    async def until(
        self, holds: Callable[[HostsSnapshot], T], timeout_s: float
    ) -> tuple[HostsSnapshot, T]:
        """Return the first snapshot from now on for which `holds` is true, and its result;
        TimeoutError.
        """
        number = len(self.seen)
        async with asyncio.timeout(timeout_s):
            while True:
                while number < len(self.seen):
                    if found := holds(self.seen[number]):
                        return self.seen[number], found
                    number += 1
                self._more.clear()
                await self._more.wait()

    async def step(self, name: str, least: int, timeout_s: float = JOB_S) -> HostsSnapshot:
        snapshot, _ = await self.until(lambda snapshot: step_of(snapshot, name) >= least, timeout_s)
        return snapshot

    async def watch(self) -> None:
        words = ("python", "-m", "loadtests.hosts.eye", ROOT)
        async with self.head.started(*words, pipes=True) as eye:
            assert eye.stdout is not None
            while line := await eye.stdout.readline():
                snapshot = HostsSnapshot(**json.loads(line))
                self.seen.append(snapshot)
                for process in snapshot.processes:
                    if "paced" in process["stats"]:
                        self._paced[process["incarnation"]] = process["stats"]
                self._more.set()
            _, said = await eye.communicate()
            raise RuntimeError(f"the eye has ended: {said.decode()[-2000:]}")

    @property
    def late_share(self) -> float | None:
        """Return the late share of all paced steps; None if there were none."""
        return late_share(self._paced.values())

    def leaders(self) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        for snapshot in self.seen:
            if snapshot.leader:
                found.setdefault(snapshot.token, set()).add(snapshot.leader)
        return found


def job_of(snapshot: HostsSnapshot, name: str) -> dict[str, Any]:
    return next((job for job in snapshot.jobs if job["name"] == name), {})


def step_of(snapshot: HostsSnapshot, name: str) -> int:
    return int(job_of(snapshot, name).get("step", -1))


@contextlib.asynccontextmanager
async def mesh_over(hosts: Hosts, workers: Iterable[int]) -> AsyncIterator[HostsMesh]:
    """Yield a mesh with so many workers on each host, the head first, until the block ends."""
    first, *others = workers
    mesh = HostsMesh(hosts)
    listen = f"{mesh.head.address}:{PORTS}"
    await mesh.meshrl("up", "--root", ROOT, "--workers", str(first), "--listen", listen)
    try:
        (mesh.names[0],) = await mesh.rows()
        async with beside(mesh.watch()):
            for number, count in enumerate(others, 1):
                await mesh.join(number, count)
            yield mesh
    finally:
        await mesh.meshrl("down", "--mesh", ROOT, check=False)


class Honest:
    """Validity of an arm's figures."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts, self._meter = hosts, HostMeter()
        self._router, self._began = hosts.router_cpu_s(), time.monotonic()

    def get_validity(self, mesh: HostsMesh) -> dict[str, Any]:
        """Return the validity figures of an arm: machine load, router load and late steps."""
        cores = (self._hosts.router_cpu_s() - self._router) / (time.monotonic() - self._began)
        about = {"router_cores": round(cores, 3), "late_share": mesh.late_share}
        return self._meter.get_validity(paced=True) | about
