"""Gateway on real sockets with its own state and mesh directory."""

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
class GatewayBench:
    """Mesh with a directory, a state and a gateway that issues tokens."""

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
        identity = gateway_identity.read_identity(self.root / "mesh")
        now = time.time()
        at = identity.address, identity.public
        token, ticket = token_registry.create_token(name, lasts_s, now, *at, priority)
        token_registry.add_token(self.file, token)
        return ticket.encoded

    def revoke(self, name: str) -> None:
        token_registry.revoke_tokens(self.file, name, time.time())

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Run the gateway in the block."""
        self._task = await self._start_gateway()
        try:
            yield
        finally:
            await self._stop_gateway()

    async def restart_gateway(self) -> None:
        """Replace the gateway by a new process without memory."""
        await self._stop_gateway()
        self._task = await self._start_gateway()

    async def _start_gateway(self) -> asyncio.Task[None]:
        root = str(self.root)
        settings = MeshSettings(redis_url="", run_root=root, host="here", joinable=self.joinable)
        mesh = on_sockets("gateway", self.state, SystemClock(), kind="gateway", settings=settings)
        task = asyncio.create_task(serve(mesh, "tcp://127.0.0.1:*"))
        async with asyncio.timeout(scaled(30)):
            while mesh.ready is None and not task.done():
                await asyncio.sleep(0.01)
        return task

    async def _stop_gateway(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


@asynccontextmanager
async def connect(token: str | AccessToken) -> AsyncIterator[GatewayConnection]:
    """Yield a connection to the gateway of a token."""
    line = GatewayConnection(token if isinstance(token, AccessToken) else read_token(token))
    line.open()
    try:
        yield line
    finally:
        await line.close()


class ForwardingPort:
    """Port that forwards all bytes to an address and back."""

    def __init__(self, address: str, rejected_count: int) -> None:
        """Forward to `address`; close the first `rejected_count` connections at once."""
        self._behind, self._rejected_count = urlsplit(address), rejected_count
        self._ends: list[asyncio.StreamWriter] = []
        self.address, self.connection_count = "", 0

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connection_count += 1
        if self.connection_count <= self._rejected_count:
            writer.close()
            return
        host, port = self._behind.hostname, self._behind.port
        upstream_reader, upstream_writer = await asyncio.open_connection(host, port)
        transfers = self._carry(reader, upstream_writer), self._carry(upstream_reader, writer)
        await asyncio.gather(*transfers, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ends.append(writer)
        while content := await reader.read(1 << 16):
            writer.write(content)
            await writer.drain()
        writer.close()

    def cut(self) -> None:
        """Abort all connections without a close message."""
        for end in self._ends:
            end.transport.abort()


@asynccontextmanager
async def forward_to(address: str, rejected_count: int = 0) -> AsyncIterator[ForwardingPort]:
    forwarder = ForwardingPort(address, rejected_count)
    async with await asyncio.start_server(forwarder.forward, "127.0.0.1", 0) as server:
        forwarder.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield forwarder
        finally:
            forwarder.cut()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[GatewayBench]:
    root = tmp_path / "root"
    (root / "mesh/logs").mkdir(parents=True)
    forwarder = GatewayBench(root, open_simulated_state(SystemClock()))
    async with forwarder.open():
        yield forwarder


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Create a complete job outside the mesh's directory, without code.

    A check of code takes seconds and an interpreter, which another user may not have.
    """
    game = tmp_path / "elsewhere/game"
    create_job(game)
    text = (game / "job.toml").read_text()
    text = text.replace('"game:game"', '""').replace('"game:reward"', '"exact"')
    (game / "job.toml").write_text(text)
    for file in game.glob("*.jsonl"):
        rows = [json.loads(line) | {"answer": "a"} for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return game / "job.toml"
