"""A small real mesh: a Redis, one agent, its workers, and stand-ins for their role processes."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import StateUnavailable
from common.process.handle import SystemChild, start_time
from common.process.host import SystemHost
from common.settings import SETTINGS_ENV, MeshSettings
from common.state import events, gangs, leader, registry
from common.state.client import State
from common.state.embedded import command
from common.state.gangs import Gang
from common.state.keys import PLANNER
from tests.meshes import SECRET

LOOK_S = 0.01  # between two looks
SOON_S = 60.0  # for whatever should happen, on a busy host

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


class SmallMesh:
    """What a test may do to the processes, and see of them in Redis."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.host = SystemHost()
        server = command(directory / "r")
        self.redis = self.host.spawn(server.argv, name="redis", log=directory / "redis.log")
        self.settings = MeshSettings(server.url, str(directory), host="here", secret=SECRET)
        self.settings.to_file(directory / "settings.json")
        self.state: State
        self.leader_token = 0
        self._decisions = 0

    async def open(self) -> None:
        async with asyncio.timeout(SOON_S):
            while True:
                try:
                    self.state = await State.open(self.settings.redis_url, connect_s=1)
                    break
                except StateUnavailable:
                    await asyncio.sleep(LOOK_S)
        self.leader_token = await leader.campaign(self.state, PLANNER, "test", 120_000)

    def start_agent(self, *options: str, workers: int = 1) -> SystemChild:
        roles = []
        for role, kind in (("rollout", "engine"), ("training", "hybrid")):
            program = shlex.join([sys.executable, "-m", "standin_role", "--kind", kind])
            roles += ["--role-command", f"{role}={program}"]
        module = [sys.executable, "-m", "services.node", "--workers", str(workers)]
        return self.host.spawn(
            [*module, *roles, *options],
            name="node/here",
            env={
                SETTINGS_ENV: str(self.directory / "settings.json"),
                "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}",
            },
            log=self.directory / "agent.log",
        )

    async def decide(self, role: str, job: str = "j", core: bool = False, gang: str = "g0") -> int:
        self._decisions += 1
        return await gangs.set_desired(
            self.state, self.leader_token, gang, role, job, core, "test", f"d{self._decisions}"
        )

    async def until(
        self, what: str, holds: Callable[[Gang], bool], gang: str = "g0", within_s: float = SOON_S
    ) -> Gang:
        found = None
        for _ in range(int(within_s / LOOK_S)):
            found = await gangs.gang(self.state, gang)
            if found is not None and holds(found):
                return found
            await asyncio.sleep(LOOK_S)
        raise AssertionError(f"not {what} after {within_s:g} s: {found}\n{self.logs()}")

    async def until_ready(self, epoch: int, gang: str = "g0") -> Gang:
        return await self.until("ready", lambda g: g.settled and g.epoch == epoch, gang)

    async def pid_of(self, name: str, other_than: int = 0) -> int:
        """The pid of the live process with that name."""
        for _ in range(int(SOON_S / LOOK_S)):
            entry = await registry.lookup(self.state, name)
            if entry is not None and entry.alive and entry.pid != other_than:
                return entry.pid
            await asyncio.sleep(LOOK_S)
        raise AssertionError(f"no {name} but {other_than}\n{self.logs()}")

    async def told(self, kind: str, count: int) -> list[dict[str, Any]]:
        """The first `count` events of a kind."""
        for _ in range(int(SOON_S / LOOK_S)):
            found = [e.fields for e in await events.read(self.state) if e.kind == kind]
            if len(found) >= count:
                return found[:count]
            await asyncio.sleep(LOOK_S)
        raise AssertionError(f"not {count} times {kind}: {found}\n{self.logs()}")

    def processes(self) -> list[int]:
        """All running processes that were started with this mesh's settings."""
        wanted = f"{SETTINGS_ENV}={self.directory / 'settings.json'}".encode()
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                environ = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if wanted in environ and start_time(int(name)):
                found.append(int(name))
        return found

    def logs(self) -> str:
        files = [self.directory / "agent.log", *self.directory.glob("mesh/logs/*")]
        return "\n".join(f"--- {f.name}\n{f.read_text()[-2000:]}" for f in files if f.exists())


async def gone(pid: int) -> bool:
    for _ in range(int(SOON_S / LOOK_S)):
        if not start_time(pid):
            return True
        await asyncio.sleep(LOOK_S)
    return False
