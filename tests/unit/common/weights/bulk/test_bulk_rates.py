"""What a host sends and receives at its bulk ports is no more than it should be, whichever of its
processes does it.
"""

from __future__ import annotations

import asyncio
import os
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.state.registry import Entry
from meshrl.common.weights.bulk.channel import BURST_S, LEAST_BYTES, LONGEST_S, PIECE_S, Rate, Rates
from meshrl.common.weights.bulk.doors import InterpreterDoor
from meshrl.common.weights.bulk.port import BulkClient, BulkServer, ChunkStore
from meshrl.common.weights.chunks.partial import Partial
from tests.unit.common.mesh.runtime.talking import Join

SECRET = "5e" * 32
CONTENT = os.urandom(600_000)
RATE = 2_000_000
SPARED_S = BURST_S + 2 * PIECE_S  # the last piece is paid for by who comes next
LEAST_S = len(CONTENT) / RATE - SPARED_S  # that the content takes at this rate, however it is cut


def settings(root: Path, **more: Any) -> MeshSettings:
    return MeshSettings("memory://", str(root), host="", secret=SECRET, **more)


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Callable[..., BulkServer]]:
    made: list[BulkServer] = []

    def start(**more: int) -> BulkServer:
        own = settings(tmp_path / "server", **more)
        chunks, door = ChunkStore(tmp_path / "chunks"), InterpreterDoor()
        host, where = SystemHost(), "tcp://127.0.0.1:*"
        made.append(BulkServer(chunks, host, where, door=door, rates=Rates.of(own)))
        return made[-1]

    yield start
    for server in made:
        server.close()


def entry(server: BulkServer) -> Entry:
    return Entry("store", "test", bulk=server.address, host="another host")


def test_several_that_move_bytes_wait_as_long_as_one_that_moves_all(tmp_path: Path) -> None:
    rates = [Rate(tmp_path / "up", 1_000_000) for _ in range(4)]
    began = time.monotonic()
    waits = [rates[n % 4].moved(10_000) for n in range(100)]
    lasted_s = time.monotonic() - began
    assert 1.0 - BURST_S - lasted_s <= waits[-1] <= 1.0
    assert waits == sorted(waits) or lasted_s > 0.01  # each waits behind the one before
    assert rates[0].piece_bytes == LEAST_BYTES


def test_threads_of_one_process_wait_for_each_other_too(tmp_path: Path) -> None:
    rate = Rate(tmp_path / "up", 10_000_000)

    def move() -> None:
        for _ in range(500):
            rate.moved(10_000)

    began = time.monotonic()
    threads = [threading.Thread(target=move) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rate.moved(0) >= 2.0 - BURST_S - (time.monotonic() - began)


def test_what_an_earlier_boot_has_written_keeps_nobody_waiting(tmp_path: Path) -> None:
    rate = Rate(tmp_path / "up", 1000)
    rate._free[:] = struct.pack("<d", time.monotonic() + 2 * LONGEST_S)
    assert rate.moved(10) < 1.0


@pytest.mark.parametrize("way", ["up", "down"])
async def test_getting_and_putting_take_as_long_as_the_rates_of_both_ends_say(
    serve: Callable[..., BulkServer], join: Join, tmp_path: Path, way: str
) -> None:
    server = serve(rate_up=RATE if way == "up" else 0, rate_down=RATE if way == "down" else 0)
    free = BulkClient(await join("free", settings=settings(tmp_path / "free")))
    began = time.monotonic()
    digest = await free.put(entry(server), CONTENT)
    assert way == "up" or time.monotonic() - began >= LEAST_S
    began = time.monotonic()
    assert await free.get(entry(server), digest) == CONTENT
    assert way == "down" or time.monotonic() - began >= LEAST_S
    open_server = serve()
    own = settings(tmp_path / "bound", **{f"rate_{way}": RATE})
    bound = BulkClient(await join("bound", settings=own))
    began = time.monotonic()
    if way == "up":
        await bound.put(entry(open_server), CONTENT[1:])
    else:
        assert await bound.get(entry(open_server), digest) == CONTENT
    assert time.monotonic() - began >= LEAST_S


async def test_clients_of_one_host_share_its_rate(
    serve: Callable[..., BulkServer], join: Join, tmp_path: Path
) -> None:
    server, own = serve(), settings(tmp_path / "bound", rate_down=RATE)
    digest = await BulkClient(await join("free", settings=settings(tmp_path))).put(
        entry(server), CONTENT
    )
    clients = [BulkClient(await join(f"c{n}", settings=own)) for n in range(3)]
    began = time.monotonic()
    found = await asyncio.gather(*(client.get(entry(server), digest) for client in clients))
    assert time.monotonic() - began >= 3 * len(CONTENT) / RATE - SPARED_S
    assert found == [CONTENT] * 3 and server.sent == 3 * len(CONTENT)


async def test_who_has_paused_is_served_to_the_end_and_may_go(
    serve: Callable[..., BulkServer], join: Join, tmp_path: Path
) -> None:
    server = serve(rate_up=500_000)
    free = BulkClient(await join("free", settings=settings(tmp_path)))
    digest = await free.put(entry(server), CONTENT)
    partial = Partial.of_file(tmp_path / "one", digest)
    leaving = asyncio.create_task(free.receive(entry(server), partial))
    while server.sent == 0:
        await asyncio.sleep(0.01)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    partial.discard()
    while server.connections:
        await asyncio.sleep(0.01)
    assert await free.get(entry(server), digest) == CONTENT
