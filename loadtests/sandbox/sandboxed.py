"""A sandbox process on a Redis of its own, for load tests, and what it must not leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from common.api.sandbox import JailSettings, LoadJob, RewardPart, RunTools, Sandbox, ToolCall
from common.base.host.secret import SECRET_BYTES
from common.base.host.settings import SETTINGS_ENV
from common.mesh.runtime.mesh import Mesh, MeshSettings
from common.mesh.runtime.ref import Ref
from common.state import registry
from common.state.pool.workers.names import sandbox
from common.state.redis.embedded import command

JOB = "load"  # that the sandbox serves
NAME = sandbox(JOB, 0)
START_S = 120.0
CALL_S = 300.0
ROOT = Path(__file__).parents[2]
TOOLS = {
    "python": "python",
    "session": "python_session",
    "shell": "shell",
    "calculator": "calculator",
}
TEMPORARY = ("meshrl-jail-",)


@dataclass
class Leavings:
    """What exists because of a sandbox, beyond the files that it is made of."""

    processes: int
    descriptors: int
    groups: int
    mounts: int
    files: int

    def beyond(self, earlier: Leavings) -> int:
        """What has come to be since, summed over all kinds."""
        before = asdict(earlier)
        return sum(max(0, now - before[kind]) for kind, now in asdict(self).items())


@dataclass
class Place:
    """A running sandbox, and how to reach it."""

    mesh: Mesh
    sandbox: Ref
    process: psutil.Process
    directory: Path

    async def load(self, job: str, rewards: list[RewardPart] | None = None) -> None:
        jail = JailSettings(sessions=64)
        request = LoadJob(job, str(self.directory), TOOLS, rewards or [], jail=jail)
        await self.sandbox.call(Sandbox.load, request, deadline_s=START_S)

    async def run(
        self, job: str, tool: str, value: object, session: str = "", deadline_s: float = 10.0
    ) -> tuple[str, object]:
        """(status, value) of one call."""
        asked = RunTools([ToolCall(0, job, tool, value, deadline_s, session)])
        outcome = (await self.sandbox.call(Sandbox.run, asked, deadline_s=CALL_S)).outcomes[0]
        return outcome.status, outcome.value

    def leavings(self) -> Leavings:
        children = self.process.children(recursive=True)
        mounts = Path(f"/proc/{self.process.pid}/mountinfo").read_text().count("\n")
        found = Path("/sys/fs/cgroup").glob(f"**/meshrl-jail-{self.process.pid}-*")
        groups = len({place.resolve() for place in found})
        folder = Path(tempfile.gettempdir())
        files = sum(1 for mark in TEMPORARY for _ in folder.glob(f"{mark}*"))
        descriptors = len(os.listdir(f"/proc/{self.process.pid}/fd"))
        return Leavings(len(children), descriptors, groups, mounts, files)

    def memory(self) -> int:
        """Bytes resident of the sandbox and all its processes, shared pages counted once."""
        total = 0
        for process in [self.process, *self.process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total


@contextlib.asynccontextmanager
async def sandboxed(*options: str) -> AsyncIterator[Place]:
    """A sandbox as its own process; it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="meshrl-") as scratch:
        directory = Path(scratch)
        server = command(directory / "redis")
        redis = subprocess.Popen(server.argv, stdout=subprocess.DEVNULL)
        process: subprocess.Popen[bytes] | None = None
        mesh: Mesh | None = None
        try:
            until = time.monotonic() + START_S
            while not (directory / "redis" / "redis.sock").exists():
                if time.monotonic() > until:
                    raise RuntimeError("redis does not start")
                await asyncio.sleep(0.02)
            settings = MeshSettings(
                redis_url=server.url,
                run_root=scratch,
                host="one",
                secret=secrets.token_hex(SECRET_BYTES),
            )
            settings.to_file(directory / "settings.json")
            environment = {SETTINGS_ENV: str(directory / "settings.json"), "PYTHONPATH": str(ROOT)}
            with (directory / "sandbox.log").open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "services.sandbox", "--name", NAME, *options],
                    env={**os.environ, **environment},
                    stdout=log,
                    stderr=log,
                )
            mesh = await Mesh.open("loadtest/0", "rollout", settings)
            await mesh.join(None)
            while not any(e.alive for e in await registry.entries(mesh.state, "sandbox")):
                if process.poll() is not None or time.monotonic() > until:
                    text = (directory / "sandbox.log").read_text()
                    raise RuntimeError(f"the sandbox does not start: {text[-2000:]}")
                await asyncio.sleep(0.05)
            yield Place(mesh, mesh.ref(NAME), psutil.Process(process.pid), directory)
        finally:
            if mesh is not None:
                await mesh.leave()
            for child in (process, redis):
                if child is not None:
                    child.terminate()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(20)
                    child.kill()
                    child.wait()
