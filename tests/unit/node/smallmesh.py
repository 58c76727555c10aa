"""Small real mesh: a Redis, one agent, its workers, and stand-ins for their role processes."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import StateUnavailable
from meshrl.common.base.host.settings import SETTINGS_ENV, MeshSettings
from meshrl.common.mesh.process.child_handle import SystemChild, read_start_time
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.state import events, leader, registry
from meshrl.common.state.pool.scheduling.decisions import (
    Decision,
    FormGang,
    PlaceInstance,
    Rationale,
    RemoveInstance,
)
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.rows import Instance, Role
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.embedded_server import prepare_server
from meshrl.common.state.redis.keys import PLANNER_ELECTION
from tests.load import scaled
from tests.meshes import SECRET

POLL_S = 0.1  # between two polls, each of which runs a script
SOON_S = 60.0  # limit for any expected change on a busy host
WHY = Rationale("test")

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


class SmallMesh:
    """Small mesh with operations on its processes and views of their records in Redis."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.host = SystemHost()
        server = prepare_server(directory / "r")
        self.redis = self.host.spawn(server.argv, name="redis", log=directory / "redis.log")
        self.settings = MeshSettings(server.url, str(directory), host="here", secret=SECRET)
        self.settings.to_file(directory / "settings.json")
        self.state: StateClient
        self.leader_token = 0
        self._decisions = 0

    async def open(self) -> None:
        async with asyncio.timeout(scaled(SOON_S)):
            while True:
                try:
                    self.state = await StateClient.open(
                        self.settings.redis_url, connect_timeout_s=scaled(1)
                    )
                    break
                except StateUnavailable:
                    await asyncio.sleep(POLL_S)
        # Longer than any test: nothing renews it.
        self.leader_token = await leader.campaign(self.state, PLANNER_ELECTION, "test", 3_600_000)

    def start_agent(
        self, *options: str, workers: int = 1, env: Mapping[str, str] = {}
    ) -> SystemChild:
        roles = []
        for role, kind in (("rollout", "engine"), ("training", "hybrid")):
            program = shlex.join([sys.executable, "-m", "standin_role", "--kind", kind])
            roles += ["--role-command", f"{role}={program}"]
        module = [sys.executable, "-m", "meshrl.services.node", "--workers", str(workers)]
        return self.host.spawn(
            [*module, *roles, *options],
            name="node/here",
            env={
                **env,
                SETTINGS_ENV: str(self.directory / "settings.json"),
                "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}",
            },
            log=self.directory / "agent.log",
        )

    async def write(self, *decisions: Decision) -> None:
        """Write planner decisions to Redis without a change hint."""
        self._decisions += 1
        op = f"d{self._decisions}"
        refused = await pool.write_decisions(self.state, self.leader_token, op, decisions, None)
        assert not refused, refused

    async def form(self, *workers: str, gang: str = "g0") -> None:
        """Wait for these workers and form a gang of them."""
        for worker in workers:
            await self.await_pid(f"worker/{worker}")
            while await pool.read_worker(self.state, worker) is None:
                await asyncio.sleep(POLL_S)
        await self.write(FormGang(gang, workers, WHY))

    async def place(
        self, id: str, role: Role = Role.ROLLOUT, job: str = "j", **fields: Any
    ) -> Instance:
        """Write an instance with its desired state."""
        instance = Instance(id, job, role, **fields)
        await self.write(PlaceInstance(id.partition(".")[0], instance, WHY))
        return instance

    async def place_and_wait(
        self, id: str, role: Role = Role.ROLLOUT, job: str = "j", **fields: Any
    ) -> Instance:
        """Place an instance and wait until it is reconciled."""
        await self.place(id, role, job, **fields)
        return await self.until_settled(id)

    async def begin(self, *options: str, workers: int = 1) -> SystemChild:
        """Start an agent with its workers and an engine on the first ready worker."""
        agent = self.start_agent(*options, workers=workers)
        for number in range(workers):
            await self.form(f"w{number}", gang=f"g{number}")
        await self.place_and_wait("g0.0")
        return agent

    async def remove(self, id: str) -> None:
        await self.write(RemoveInstance(id.partition(".")[0], id, WHY))

    async def read_instance(self, id: str) -> Instance:
        """Return the instance's record."""
        found = await pool.read_gang(self.state, id.partition(".")[0])
        assert found is not None, self.logs()
        [instance] = [one for one in found.instances if one.id == id]
        return instance

    async def until(self, what: str, id: str, holds: Callable[[Instance], bool]) -> Instance:
        for _ in range(int(scaled(SOON_S) / POLL_S)):
            found = await self.read_instance(id)
            if holds(found):
                return found
            await asyncio.sleep(POLL_S)
        raise AssertionError(f"{id} is not {what}: {found}\n{self.logs()}")

    async def until_settled(self, id: str) -> Instance:
        return await self.until("settled", id, lambda instance: instance.is_reconciled)

    async def await_pid(self, name: str, other_than: int = 0) -> int:
        """Return the pid of the live process with that name."""
        for _ in range(int(scaled(SOON_S) / POLL_S)):
            entry = await registry.lookup(self.state, name)
            if entry is not None and entry.alive and entry.pid != other_than:
                return entry.pid
            await asyncio.sleep(POLL_S)
        raise AssertionError(f"no {name} but {other_than}\n{self.logs()}")

    async def await_stat(self, name: str, key: str, value: object) -> None:
        """Wait until the process of that name publishes this value in its stats."""
        for _ in range(int(scaled(SOON_S) / POLL_S)):
            entry = await registry.lookup(self.state, name)
            if entry is not None and entry.stats.get(key) == value:
                return
            await asyncio.sleep(POLL_S)
        raise AssertionError(f"{name} does not publish {key} = {value}\n{self.logs()}")

    async def await_events(self, kind: str, count: int) -> list[dict[str, Any]]:
        """Return the first `count` events of a kind."""
        for _ in range(int(scaled(SOON_S) / POLL_S)):
            found = [e.fields for e in await events.read_page(self.state) if e.kind == kind]
            if len(found) >= count:
                return found[:count]
            await asyncio.sleep(POLL_S)
        raise AssertionError(f"not {count} times {kind}: {found}\n{self.logs()}")

    def processes(self) -> list[int]:
        """List all running processes that were started with this mesh's settings."""
        wanted = f"{SETTINGS_ENV}={self.directory / 'settings.json'}".encode()
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                environ = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if wanted in environ and read_start_time(int(name)):
                found.append(int(name))
        return found

    def logs(self) -> str:
        files = [self.directory / "agent.log", *self.directory.glob("mesh/logs/*")]
        return "\n".join(f"--- {f.name}\n{f.read_text()[-2000:]}" for f in files if f.exists())


async def has_exited(pid: int) -> bool:
    for _ in range(int(scaled(SOON_S) / POLL_S)):
        if not read_start_time(pid):
            return True
        await asyncio.sleep(POLL_S)
    return False


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(int(scaled(SOON_S) / POLL_S)):
        if holds():
            return
        await asyncio.sleep(POLL_S)
    raise AssertionError("it does not come about")
