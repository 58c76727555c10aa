"""A gateway on real sockets, with a state and a directory of its own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.access import gateway_identity, token_registry
from meshrl.common.mesh.access.access_records import RECORDS_FILE
from meshrl.common.mesh.access.access_token import AccessToken, read_token
from meshrl.common.mesh.access.gateway_connection import GatewayConnection
from meshrl.common.state.redis.client import StateClient
from meshrl.job_template.job_creation import create_job
from meshrl.services.gateway.__main__ import serve
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.load import scaled
from tests.meshes import on_sockets

DAY_S = 86_400.0


@dataclass
class House:
    """A mesh's directory, its state, and whom it gives tokens."""

    root: Path
    state: StateClient
    joinable: bool = False

    @property
    def file(self) -> Path:
        return self.root / "mesh" / RECORDS_FILE

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    def token(self, name: str = "alice", lasts_s: float = DAY_S, priority: int = 0) -> str:
        door = gateway_identity.read_identity(self.root / "mesh")
        now = time.time()
        at = door.address, door.public
        token, ticket = token_registry.create_token(name, lasts_s, now, *at, priority)
        token_registry.add_token(self.file, token)
        return ticket.encoded

    def revoke(self, name: str) -> None:
        token_registry.revoke_tokens(self.file, name, time.time())

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """The gateway's life."""
        self._task = await self._begun()
        try:
            yield
        finally:
            await self._end()

    async def start_again(self) -> None:
        """Another process of the gateway, which remembers nothing."""
        await self._end()
        self._task = await self._begun()

    async def _begun(self) -> asyncio.Task[None]:
        root = str(self.root)
        settings = MeshSettings(redis_url="", run_root=root, host="here", joinable=self.joinable)
        mesh = on_sockets("gateway", self.state, SystemClock(), kind="gateway", settings=settings)
        task = asyncio.create_task(serve(mesh, "tcp://127.0.0.1:*"))
        async with asyncio.timeout(scaled(30)):
            while mesh.ready is None and not task.done():
                await asyncio.sleep(0.01)
        return task

    async def _end(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


@asynccontextmanager
async def line_to(token: str | AccessToken) -> AsyncIterator[GatewayConnection]:
    """A line to the gateway of a token."""
    line = GatewayConnection(token if isinstance(token, AccessToken) else read_token(token))
    line.open()
    try:
        yield line
    finally:
        await line.close()


class Forwarded:
    """A port that carries all bytes to an address and back."""

    def __init__(self, address: str, ended: int) -> None:
        """`ended`: the first connections, which end at once."""
        self._behind, self._ended = urlsplit(address), ended
        self._ends: list[asyncio.StreamWriter] = []
        self.address, self.came = "", 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.came += 1
        if self.came <= self._ended:
            writer.close()
            return
        host, port = self._behind.hostname, self._behind.port
        there, back = await asyncio.open_connection(host, port)
        carried = self._carry(reader, back), self._carry(there, writer)
        await asyncio.gather(*carried, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ends.append(writer)
        while content := await reader.read(1 << 16):
            writer.write(content)
            await writer.drain()
        writer.close()

    def cut(self) -> None:
        """End all connections, so that neither end is told."""
        for end in self._ends:
            end.transport.abort()


@asynccontextmanager
async def forwarded(address: str, ended: int = 0) -> AsyncIterator[Forwarded]:
    found = Forwarded(address, ended)
    async with await asyncio.start_server(found.connected, "127.0.0.1", 0) as server:
        found.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield found
        finally:
            found.cut()


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    root = tmp_path / "root"
    (root / "mesh/logs").mkdir(parents=True)
    found = House(root, open_simulated_state(SystemClock()))
    async with found.open():
        yield found


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A whole job, far from the mesh's directory, and without code: to try that takes seconds, and
    an interpreter, which another user may not have.
    """
    game = tmp_path / "elsewhere/game"
    create_job(game)
    told = (game / "job.toml").read_text()
    told = told.replace('"game:game"', '""').replace('"game:reward"', '"exact"')
    (game / "job.toml").write_text(told)
    for file in game.glob("*.jsonl"):
        rows = [json.loads(line) | {"answer": "a"} for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return game / "job.toml"
