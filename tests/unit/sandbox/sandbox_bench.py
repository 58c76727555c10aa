"""Sandboxes as separate processes with their own Redis, and a caller."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from meshrl.common.api.sandbox import LoadJob, RewardPart
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import StateUnavailable
from meshrl.common.base.host.settings import SETTINGS_ENV
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.child_handle import ChildProcess
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.actor_ref import ActorRef
from meshrl.common.mesh.runtime.dependencies import AccessRules, LeaseTerms, MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.mesh.transport.zmq_transport import ZmqTransport
from meshrl.common.state import registry
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.embedded_server import prepare_server
from tests.load import scaled
from tests.meshes import PATIENT, SECRET, register_process

CALC = "def tool(x):\n    return str(eval(x))\ndef reward(row, turns):\n    return len(turns)\n"
ROOT = Path(__file__).parents[3]


class SandboxBench:
    """Redis, a sandbox process, and a caller."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.host, self.clock = directory, SystemHost(), SystemClock()
        self.children: list[ChildProcess] = []
        server = prepare_server(directory / "r")
        self.redis = self.host.spawn(server.argv, name="redis", log=directory / "redis.log")
        self.settings = MeshSettings(server.url, str(directory), host="here", secret=SECRET)
        self.settings.to_file(directory / "settings.json")
        (directory / "calc.py").write_text(CALC)
        self.start()

    def start(self) -> None:
        self.sandbox = self.spawn_sandbox("sandbox/j/0")

    def spawn_sandbox(
        self, name: str, path: str = os.environ["PATH"], options: Sequence[str] = ()
    ) -> ChildProcess:
        settings = str(self.directory / "settings.json")
        env = {SETTINGS_ENV: settings, "PYTHONPATH": str(ROOT), "PATH": path}
        log = self.directory / "sandbox.log"
        child = self.host.spawn(
            [sys.executable, "-m", "meshrl.services.sandbox", "--name", name, *options],
            name=name,
            env=env,
            log=log,
        )
        self.children.append(child)
        return child

    async def open(self) -> ActorRef:
        while True:
            try:
                state = await StateClient.open(self.settings.redis_url, connect_timeout_s=1)
                break
            except StateUnavailable:
                await self.clock.sleep(0.02)
        process_credentials = await register_process(
            "test", "rollout", self.settings, state, self.clock
        )
        self.caller = Mesh(
            "test",
            "test",
            MeshDependencies(
                state=state,
                transport=ZmqTransport(self.settings.bind, "", keys=process_credentials.keys),
                clock=self.clock,
                random=Random.from_os_entropy(),
                host=self.host,
            ),
            terms=LeaseTerms(**PATIENT),
            access=AccessRules(credentials=process_credentials),
        )
        return self.caller.ref("sandbox/j/0")

    def make_job(self, tool: str = "calc:tool") -> LoadJob:
        return LoadJob("j", str(self.directory), {"calculate": tool}, [RewardPart("calc:reward")])

    async def evict(self, name: str) -> None:
        """Evict a killed sandbox from the registry, as its supervisor does."""
        entry = await registry.lookup(self.caller.state, name)
        assert entry is not None
        await registry.evict(self.caller.state, name, entry.incarnation)

    async def close(self) -> None:
        await self.caller.leave()
        await self.caller.state.close()
        for child in (*self.children, self.redis):
            child.kill()
            await child.wait(scaled(5))
