"""Meshes for load tests: a Redis of their own, processes as members of it, and this process too."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from loadtests.measuring.processes import environment
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import MeshError
from meshrl.common.base.host.settings import SECRET_BYTES, SETTINGS_ENV
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.child_handle import SystemChild
from meshrl.common.mesh.process.forking.fork_client import FORK_SERVER_ENV, FORK_SERVER_OFF
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.spawning import DEFAULT_OPTIONS, SpawnOptions
from meshrl.common.mesh.runtime.calls.actor import Actor
from meshrl.common.mesh.runtime.dependencies import LeaseTerms, MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.mesh.transport.keys import ProcessKeys, TransportKeys
from meshrl.common.mesh.transport.zmq_transport import ZmqTransport
from meshrl.common.state import registry
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.embedded_server import prepare_server
from meshrl.sim.redis.simulated_state import open_simulated_state

START_S = 120.0  # native code may have to be compiled
STOP_S = 20.0
ROOT = Path(__file__).parents[2]
FOREVER_S = 3600.0  # lease length
ROLE = "loadtest"


def own_keys(others: Sequence[str] = ()) -> ProcessKeys:
    """Return a key for this process that admits itself and `others`, in hexadecimal digits."""

    def whose(asked: Sequence[str]) -> list[tuple[str, ...]]:
        return [(f"{ROLE}@here",) if key in known else () for key in asked]

    keys = ProcessKeys(whose, SystemClock().monotonic)
    known = frozenset([*others, keys.public_key_text])
    return keys


def unrenewed(name: str, keys: TransportKeys | None = None) -> Mesh:
    """Return a mesh with a Redis of its own in this process.

    `knows` registers other meshes there. Without keys, unauthenticated peers may connect.
    """
    clock = SystemClock()
    return Mesh(
        name,
        ROLE,
        MeshDependencies(
            state=open_simulated_state(clock),
            transport=ZmqTransport(keys=keys),
            clock=clock,
            random=Random.from_os_entropy(),
            host=SystemHost(),
        ),
        terms=LeaseTerms(ttl_s=FOREVER_S, renew_interval_s=FOREVER_S / 2),
    )


async def knows(mesh: Mesh, name: str, address: str, incarnation: str) -> None:
    """Put another process into the mesh's registry."""
    entry = registry.RegistryEntry(name, ROLE, address=address, incarnation=incarnation)
    await registry.register(mesh.state, entry, int(FOREVER_S * 1000))


@contextlib.contextmanager
def redis(directory: Path) -> Iterator[str]:
    """Serve Redis until the end of the block; yield its URL once it listens."""
    server = prepare_server(directory / "redis")
    with subprocess.Popen(server.argv, stdout=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + START_S
            while not _listens(directory / "redis" / "redis.sock"):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("Redis does not start")
                time.sleep(0.02)
            yield server.url
        finally:
            process.kill()


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


@contextlib.asynccontextmanager
async def start_fork_server(
    host: SystemHost,
    folder: Path,
    name: str,
    *modules: str,
    how: SpawnOptions = DEFAULT_OPTIONS,
    **environ: str,
) -> AsyncIterator[tuple[str, SystemChild]]:
    """Start a fork server with imported modules; yield its socket and process."""
    socket = folder / name
    argv = [sys.executable, "-m", "meshrl.common.mesh.process.forking.fork_server", str(socket)]
    environ[FORK_SERVER_ENV] = FORK_SERVER_OFF
    child = host.spawn([*argv, *modules], name="fork-server", env=environ, options=how)
    try:
        async with asyncio.timeout(START_S):
            while not socket.exists():
                await asyncio.sleep(0.01)
        yield str(socket), child
    finally:
        child.kill()
        await child.wait(STOP_S)


class Members:
    """Processes of one host of a mesh; each ends with the mesh, and logs to a file of its name."""

    def __init__(self, directory: Path, url: str, **more: Any) -> None:
        self.directory = directory
        self.settings = MeshSettings(
            redis_url=url,
            run_root=str(directory),
            host="one",
            secret=secrets.token_hex(SECRET_BYTES),
            **more,
        )
        self.settings.to_file(directory / "settings.json")
        self.running: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, module: str, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Start a process that runs a module; `options` are those of Popen."""
        settings = {SETTINGS_ENV: str(self.directory / "settings.json"), "PYTHONPATH": str(ROOT)}
        with self._log(name).open("a") as log:
            options = {"stdout": log, "env": environment(**settings), **options}
            argv = [sys.executable, "-m", module, *words]
            process = subprocess.Popen(argv, stderr=log, text=True, **options)
        self.running[name] = process
        return process

    async def ready(self, mesh: Mesh, kind: str) -> None:
        """Wait until all are registered; RuntimeError with the end of one's log."""
        until = time.monotonic() + START_S
        while True:
            alive = {e.name for e in await registry.list_entries(mesh.state, kind) if e.alive}
            if alive >= self.running.keys():
                return
            dead = [name for name, process in self.running.items() if process.poll() is not None]
            if dead or time.monotonic() > until:
                name = (dead or sorted(self.running.keys() - alive))[0]
                raise RuntimeError(f"{name} does not start: {self._log(name).read_text()[-2000:]}")
            await asyncio.sleep(0.05)

    def logs(self) -> str:
        """Return the end of each process's log."""
        logs = sorted(self.directory.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in logs)

    def stop(self) -> None:
        """End all."""
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _log(self, name: str) -> Path:
        return self.directory / f"{name.replace('/', '-')}.log"


@contextlib.asynccontextmanager
async def opened(url: str, connect_s: float) -> AsyncIterator[StateClient]:
    """Yield the state of a mesh, connected until the end of the block."""
    state = await StateClient.open(url, connect_timeout_s=connect_s)
    try:
        yield state
    finally:
        await state.close()


async def living(url: str, connect_s: float = 5.0) -> list[registry.RegistryEntry]:
    """Return the registered processes with a lease; none while Redis does not answer."""
    with contextlib.suppress(MeshError):
        async with opened(url, connect_s) as state:
            return [entry for entry in await registry.list_entries(state) if entry.alive]
    return []


@contextlib.contextmanager
def hosted(**more: Any) -> Iterator[Members]:
    """Yield the members of a mesh in a scratch directory, with a Redis that ends with it."""
    with tempfile.TemporaryDirectory(prefix="meshrl-") as scratch, redis(Path(scratch)) as url:
        members = Members(Path(scratch), url, **more)
        try:
            yield members
        finally:
            members.stop()


@contextlib.asynccontextmanager
async def meshed(
    name: str, actor: Callable[[Mesh], Actor] | None = None, kind: str = ""
) -> AsyncIterator[tuple[Mesh, Members]]:
    """Yield this process as the mesh member `name`, and the others, of a mesh of its own."""
    with hosted() as members:
        mesh = await Mesh.open(name, kind or name.partition("/")[0], members.settings)
        try:
            await mesh.join(actor(mesh) if actor is not None else None)
            yield mesh, members
        finally:
            await mesh.leave()
