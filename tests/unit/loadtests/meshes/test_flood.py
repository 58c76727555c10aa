"""Malformed frames at every port of a process, which must change neither service nor memory."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from loadtests.hosts.flood.frame_sender import FloodResult, FrameFlood, send_flood
from loadtests.hosts.flood.growth import between, read
from meshrl.common.api.weights import STORE_NAME
from meshrl.common.base.host.settings import SETTINGS_ENV, MeshSettings
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import registry
from meshrl.common.state.redis import embedded_server
from meshrl.common.state.registry import RegistryEntry
from meshrl.common.weights.bulk.port import BulkClient
from tests.contract.state.state_bench import running_server
from tests.load import scaled
from tests.meshes import SECRET

FIRST, FRAMES = 2_000, 8_000  # warm-up frames that fill caches, then counted frames
UP_S = 60.0
GROWN_MIB = 4.0  # a thread's stack, arenas of the allocator
CHUNK = os.urandom(100_000)


@pytest.fixture
async def settings(tmp_path: Path) -> AsyncIterator[MeshSettings]:
    """Return the settings of a mesh with Redis and a weight store, a process with every kind of
    port.
    """
    with running_server(embedded_server.find_server()) as server:
        found = MeshSettings(server.url, str(tmp_path), host="here", secret=SECRET)
        found.to_file(tmp_path / "settings.json")
        store = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "meshrl.services.weights"),
            env=os.environ | {SETTINGS_ENV: str(tmp_path / "settings.json")},
        )
        try:
            yield found
            assert store.returncode is None
        finally:
            store.kill()
            await store.wait()


async def await_weight_store(mesh: Mesh) -> RegistryEntry:
    """Wait for the weight store's entry."""
    async with asyncio.timeout(scaled(UP_S)):
        while True:
            for entry in await registry.list_entries(mesh.state):
                if entry.name == STORE_NAME and entry.alive:
                    return entry
            await asyncio.sleep(0.05)


@pytest.mark.deep
async def test_malformed_frames_at_every_port_change_nothing(settings: MeshSettings) -> None:
    mesh = await Mesh.open("trainer/test", "trainer", settings)
    mesh.start()
    try:
        entry = await await_weight_store(mesh)
        places = [entry.address, entry.bulk.partition("#")[0], entry.metrics]
        ports = [(str(urlsplit(one).hostname), urlsplit(one).port or 0) for one in places]
        process, client = psutil.Process(entry.pid), BulkClient(mesh)
        digest = await client.put_chunk(entry, CHUNK)
        early = await asyncio.to_thread(send_flood, FrameFlood(ports, FIRST))
        before = read([process])
        late = await asyncio.to_thread(send_flood, FrameFlood(ports, FRAMES, seed=1))
        assert await client.fetch_chunk(entry, digest) == CHUNK
        assert was_served(early) and was_served(late)
        held = late.held // len(ports)
        grew = between(before, read([process]))
        async with asyncio.timeout(scaled(UP_S)):  # until the rejected connections are closed
            while grew.descriptors > held or grew.threads > 0:
                await asyncio.sleep(0.1)
                grew = between(before, read([process]))
        assert not grew.gone
        assert grew.rss_mib < GROWN_MIB and grew.threads <= 0
        assert grew.descriptors <= held, "at most handshakes that are not over"
    finally:
        await mesh.leave()


def was_served(wave: FloodResult) -> bool:
    """Return True if all frames were read and their connections closed in time."""
    return wave.unconnected == 0 and wave.unheard <= wave.frames // 100
