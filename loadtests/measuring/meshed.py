"""A Redis of its own and engines as processes beside it, for load tests that need a mesh."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from common.base.host.secret import SECRET_BYTES
from common.base.host.settings import SETTINGS_ENV
from common.mesh.runtime.calls.actor import Actor
from common.mesh.runtime.mesh import Mesh, MeshSettings
from common.state import registry
from common.state.redis.embedded import command

START_S = 120.0  # native code may have to be compiled


class EngineProcesses:
    """Engines by name; `loadtests.measuring.engine_member` says what their options are."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory  # of their logs, and of the mesh's settings
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *options: str) -> None:
        log = (self._directory / f"{name.replace('/', '-')}.log").open("ab")
        argv = [sys.executable, "-m", "loadtests.measuring.engine_member", "--name", name]
        env = {**os.environ, SETTINGS_ENV: str(self._directory / "settings.json")}
        self.running[name] = subprocess.Popen([*argv, *options], stdout=log, stderr=log, env=env)
        log.close()

    async def ready(self, mesh: Mesh) -> None:
        """All engines are registered, or RuntimeError with the end of one's log."""
        deadline = time.monotonic() + START_S
        while True:
            alive = {e.name for e in await registry.entries(mesh.state, "engine") if e.alive}
            if alive >= self.running.keys():
                return
            dead = [name for name, process in self.running.items() if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                name = (dead or sorted(self.running.keys() - alive))[0]
                log = (self._directory / f"{name.replace('/', '-')}.log").read_text()
                raise RuntimeError(f"{name} does not start: {log[-2000:]}")
            await asyncio.sleep(0.1)

    def kill(self, name: str) -> None:
        """SIGKILL."""
        process = self.running.pop(name)
        process.kill()
        process.wait()


@contextlib.asynccontextmanager
async def meshed(
    name: str, actor: Callable[[Mesh], Actor] | None = None
) -> AsyncIterator[tuple[Mesh, EngineProcesses, Path]]:
    """This process as the mesh member `name`, on a Redis that ends with it; a scratch directory."""
    with tempfile.TemporaryDirectory(prefix="meshrl-") as scratch:
        directory = Path(scratch)
        server = command(directory / "redis")
        redis = subprocess.Popen(server.argv, stdout=subprocess.DEVNULL)
        settings = MeshSettings(
            redis_url=server.url,
            run_root=scratch,
            host="one",
            secret=secrets.token_hex(SECRET_BYTES),
        )
        settings.to_file(directory / "settings.json")
        engines = EngineProcesses(directory)
        mesh = None
        try:
            async with asyncio.timeout(START_S):
                while not (directory / "redis" / "redis.sock").exists():
                    await asyncio.sleep(0.02)
            mesh = await Mesh.open(name, name.partition("/")[0], settings)
            await mesh.join(actor(mesh) if actor is not None else None)
            yield mesh, engines, directory
        finally:
            if mesh is not None:
                await mesh.leave()
            for engine in list(engines.running):
                engines.kill(engine)
            redis.kill()
            redis.wait()
