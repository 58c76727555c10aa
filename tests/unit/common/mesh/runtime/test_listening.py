"""Where a process listens: a port of a range, over IPv4 or IPv6, and what others are told."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.telemetry.endpoint import MetricsEndpoint, health
from meshrl.common.mesh.transport.address import endpoint_of, key_of
from meshrl.common.mesh.transport.keys import ProcessKeys
from meshrl.common.mesh.transport.zmq import ZmqTransport
from meshrl.common.state.registry import Entry
from meshrl.common.weights.bulk.doors import InterpreterDoor
from meshrl.common.weights.bulk.port import BulkClient, BulkServer, ChunkStore
from tests.load import scaled
from tests.unit.common.mesh.runtime.talking import Join

SOON_S = 20.0
WIDE = 40  # ports of a range, some of which others of this host may have


async def test_each_process_takes_the_first_free_port_of_a_range() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        low = int(taken.getsockname()[1])
        bind = f"tcp://127.0.0.1:{low}-{low + WIDE}"
        async with AsyncExitStack() as opened:
            found = []
            for _ in range(3):
                transport = ZmqTransport(bind)
                opened.push_async_callback(transport.close)
                found.append(int(transport.address.rpartition(":")[2]))
        assert low < found[0] < found[1] < found[2] <= low + WIDE


async def test_a_range_without_a_free_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"cannot listen on {bind}.*range.*each process"):
            ZmqTransport(bind)


@pytest.mark.parametrize(
    "bind", ["tcp://127.0.0.1:70000", "tcp://127.0.0.1:9-8", "tcp://127.0.0.1"]
)
async def test_what_is_no_place_to_listen_at_is_refused(bind: str) -> None:
    with pytest.raises(ConfigError, match="LOW-HIGH"):
        ZmqTransport(bind)


async def test_a_host_of_ipv6_stands_in_brackets() -> None:
    """With a key behind it, and messages over it."""
    whose: dict[str, tuple[str, ...]] = {}

    def keys() -> ProcessKeys:
        made = ProcessKeys(lambda asked: [whose.get(key, ()) for key in asked], lambda: 0.0)
        whose[made.public] = ("engine@here",)
        return made

    try:
        answering = ZmqTransport("tcp://[::1]:*", keys=keys())
    except ConfigError:
        pytest.skip("this host has no IPv6")
    asking = ZmqTransport("tcp://[::1]:*", keys=keys())
    heard: asyncio.Queue[tuple[list[object], str]] = asyncio.Queue()
    answering.start(
        lambda peer, frames, role: heard.put_nowait(([bytes(f) for f in frames], role)),
        lambda *_: None,
        lambda *_: None,
    )
    asking.start(lambda *_: None, lambda *_: None, lambda *_: None)
    assert endpoint_of(answering.address).startswith("tcp://[::1]:")
    assert len(key_of(answering.address)) == 40
    asking.send(answering.address, [b"header", b"body"])
    async with asyncio.timeout(scaled(SOON_S)):
        assert await heard.get() == ([b"header", b"body"], "engine")
    await asking.close()
    await answering.close()


async def test_bulk_bytes_and_metrics_go_over_ipv6_too(join: Join, tmp_path: Path) -> None:
    settings = MeshSettings("memory://", "", host="", secret="5e" * 32)
    try:
        server = BulkServer(
            ChunkStore(tmp_path), SystemHost(), "tcp://[::1]:*", door=InterpreterDoor()
        )
    except ConfigError:
        pytest.skip("this host has no IPv6")
    assert server.address.startswith("tcp://[::1]:")
    client = BulkClient(await join("client", settings=settings))
    entry = Entry("store", "test", bulk=server.address, host="another")
    digest = await client.put(entry, b"chunk")
    assert await client.get(entry, digest) == b"chunk"
    server.close()
    metrics = MetricsEndpoint("[::1]:*", "", SystemHost(), {"/livez": health(lambda: "")})
    place = urlsplit(metrics.address)
    assert place.hostname == "::1"
    reader, writer = await asyncio.open_connection("::1", place.port)
    writer.write(b"GET /livez HTTP/1.0\r\n\r\n")
    assert (await reader.read()).endswith(b"\r\n\r\nok\n")
    writer.close()
    metrics.close()
