"""Sandbox process on a Redis of its own, for load tests, with a check for leftover resources."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from loadtests.measuring.meshed import START_S, meshed
from meshrl.common.api.sandbox import JailSettings, LoadJob, RewardPart, RunTools, Sandbox, ToolCall
from meshrl.common.mesh.runtime.actor_ref import ActorRef
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.workers.process_names import sandbox_name

JOB = "load"  # that the sandbox serves
NAME = sandbox_name(JOB, 0)
CALL_S = 300.0
TOOLS = {
    "python": "python",
    "session": "python_session",
    "shell": "shell",
    "calculator": "calculator",
}
TEMPORARY = "meshrl-jail-"
JAIL = JailSettings(sessions=64)
PROGRAM = "print(sum(i * i for i in range(1000)))"
SAID = str(sum(i * i for i in range(1000)))
One = Callable[[], Awaitable[None]]


@dataclass
class Leavings:
    """Resources that a sandbox has created, beyond its own files."""

    processes: int
    descriptors: int
    groups: int
    mounts: int
    files: int

    def beyond(self, earlier: Leavings) -> int:
        """Return the number of resources created since `earlier`, summed over all kinds."""
        before = asdict(earlier)
        return sum(max(0, now - before[kind]) for kind, now in asdict(self).items())


@dataclass
class Place:
    mesh: Mesh
    sandbox: ActorRef
    process: psutil.Process
    directory: Path

    async def load(
        self, job: str, rewards: Sequence[RewardPart] = (), jail: JailSettings = JAIL
    ) -> None:
        request = LoadJob(job, str(self.directory), TOOLS, list(rewards), jail=jail)
        await self.sandbox.call(Sandbox.load_job, request, deadline_s=START_S)

    async def run(
        self, job: str, tool: str, value: object, session: str = "", deadline_s: float = 10.0
    ) -> tuple[str, object]:
        asked = RunTools([ToolCall(0, job, tool, value, deadline_s, session)])
        outcome = (await self.sandbox.call(Sandbox.run_tools, asked, deadline_s=CALL_S)).outcomes[0]
        return outcome.status, outcome.value

    def leavings(self) -> Leavings:
        children = self.process.children(recursive=True)
        mounts = Path(f"/proc/{self.process.pid}/mountinfo").read_text().count("\n")
        own = f"{TEMPORARY}{self.process.pid}-"
        # Unlike a glob, `os.walk` ignores groups of other processes that vanish.
        walked = os.walk("/sys/fs/cgroup")
        found = (Path(place, name) for place, names, _ in walked for name in names)
        groups = len({one.resolve() for one in found if one.name.startswith(own)})
        files = len(list(Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*")))
        descriptors = len(os.listdir(f"/proc/{self.process.pid}/fd"))
        return Leavings(len(children), descriptors, groups, mounts, files)

    def memory(self) -> int:
        total = 0
        for process in [self.process, *self.process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total


@contextlib.asynccontextmanager
async def sandboxed(*options: str) -> AsyncIterator[Place]:
    """Start a sandbox as its own process; it ends with the block."""
    async with meshed("loadtest/0", kind="rollout") as (mesh, members):
        process = members.start(NAME, "meshrl.services.sandbox", "--name", NAME, *options)
        await members.ready(mesh, "sandbox")
        yield Place(mesh, mesh.ref(NAME), psutil.Process(process.pid), members.directory)


async def jailed(place: Place) -> None:
    status, value = await place.run("load", "python", PROGRAM)
    if status != "ok" or value != {"status": "ok", "output": f"{SAID}\n"}:
        raise RuntimeError(f"the sandbox said {status}: {value}")


async def sustained(one: One, concurrency: int, seconds: float) -> tuple[float, list[float]]:
    """Return calls per second and latencies of `concurrency` callers without pauses."""
    latencies: list[float] = []
    until = time.perf_counter() + seconds

    async def caller() -> None:
        while time.perf_counter() < until:
            begun = time.perf_counter()
            await one()
            latencies.append(time.perf_counter() - begun)

    begun = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(concurrency)))
    return len(latencies) / (time.perf_counter() - begun), latencies
