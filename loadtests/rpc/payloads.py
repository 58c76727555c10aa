"""Benchmark of calls that carry 1 MiB and 64 MiB to another process, which answers with their size.

Ours run with all features, beside `grpc.aio` and stock `zmq.asyncio`, which have no authentication.
The peers' processes are `python -m loadtests.rpc.payloads grpc|size|echo`. They print their
addresses; `GrpcClient` and `DealerClient` call them.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple, TypeVar

import grpc
import grpc.aio
import msgpack
import uvloop
import zmq
import zmq.asyncio

from loadtests.measuring.processes import cpu_s, served
from loadtests.measuring.rounds import ratio, ratios, spread, turns

SIZES = {"1mib": 1 << 20, "64mib": 64 << 20}
IN_FLIGHT = {"1mib": 4, "64mib": 2}
PEERS = ("grpc", "zmq")
METHOD = "/load.Test/size"
LIMITS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
WARM_S = 0.3  # of each way before rounds begin, at most
K = TypeVar("K", bound=Hashable)


class Measured(NamedTuple):
    calls_per_s: float
    cpu_us: float  # CPU-microseconds of a call, in both processes


@dataclass(frozen=True)
class Way:
    """A call, the process that answers it, and how many are in flight."""

    one: Callable[[], Awaitable[object]]
    server: int
    in_flight: int

    async def measure(self, seconds: float) -> Measured:
        """Call for so long."""
        done, pids = 0, (os.getpid(), self.server)
        cpu, start = cpu_s(*pids), time.perf_counter()

        async def work() -> None:
            nonlocal done
            while time.perf_counter() < start + seconds:
                await self.one()
                done += 1

        await asyncio.gather(*(work() for _ in range(self.in_flight)))
        took = time.perf_counter() - start
        return Measured(done / took, 1e6 * (cpu_s(*pids) - cpu) / done)


async def measured(ways: Mapping[K, Way], rounds: int, seconds: float) -> dict[K, list[Measured]]:
    """Return each way's rounds, in rotating order."""
    found: dict[K, list[Measured]] = {name: [] for name in ways}
    for way in ways.values():
        await way.measure(min(WARM_S, seconds))
    for name in turns([*ways], rounds):
        found[name].append(await ways[name].measure(seconds))
    return found


def peer(which: str) -> AbstractContextManager[tuple[int, str]]:
    """Serve a peer until the end of the block; yield its pid and its address."""
    return served("loadtests.rpc.payloads", which)


def _as_it_is(content: bytes) -> bytes:
    return content


async def _size(request: bytes, context: object) -> bytes:
    return len(request).to_bytes(8, "little")


async def serve_grpc() -> None:
    server = grpc.aio.server(options=LIMITS)
    handler = grpc.unary_unary_rpc_method_handler(_size, _as_it_is, _as_it_is)
    service = grpc.method_handlers_generic_handler("load.Test", {"size": handler})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


async def serve_zmq(answer: Callable[[memoryview], bytes]) -> None:
    """Answer by a function until the process is killed."""
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind("tcp://127.0.0.1:*")
        print(socket.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
        while True:
            peer, call_id, body = await socket.recv_multipart(copy=False)
            await socket.send_multipart([peer.bytes, call_id.bytes, answer(body.buffer)])


class GrpcClient:
    """Client of `serve_grpc`."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=LIMITS)
        self._call = self._channel.unary_unary(METHOD, _as_it_is, _as_it_is)

    async def __aenter__(self) -> GrpcClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def size(self, content: bytes) -> None:
        assert int.from_bytes(await self._call(content), "little") == len(content)


class DealerClient:
    """Typical client with zmq.asyncio: a DEALER, a receiving task, a table of futures."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(address)
        self._calls: dict[bytes, asyncio.Future[bytes]] = {}
        self._last_id = 0

    async def __aenter__(self) -> DealerClient:
        self._receiver = asyncio.create_task(self._receive())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._receiver.cancel()
        self._context.destroy(0)

    async def _receive(self) -> None:
        while True:
            call_id, answer = await self._socket.recv_multipart()
            self._calls.pop(call_id).set_result(answer)

    async def ask(self, body: bytes, copy: bool = True) -> bytes:
        self._last_id += 1
        call_id = self._last_id.to_bytes(8, "little")
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        await self._socket.send_multipart([call_id, body], copy=copy)
        answer: bytes = await future
        return answer

    async def size(self, content: bytes) -> None:
        assert int.from_bytes(await self.ask(content, copy=False), "little") == len(content)


def figures(found: Mapping[tuple[str, str], Sequence[Measured]]) -> dict[str, float]:
    """Return `*_mb_per_s`, `*_cpu_s_per_gb`, and ours over each peer's, pair by pair.

    `ratio_*` is of bytes per CPU-second, with quartiles, `ratio_*_rate` of bytes per second.

    Args:
        found: Rounds by way and size.
    """
    told: dict[str, float] = {}
    rates = {arm: [row.calls_per_s for row in rows] for arm, rows in found.items()}
    costs = {arm: [row.cpu_us for row in rows] for arm, rows in found.items()}
    for way, size in found:
        name = f"{way}_{size}" if way else size
        told[f"{name}_mb_per_s"] = round(median(rates[way, size]) * SIZES[size] / 1e6)
        told[f"{name}_cpu_s_per_gb"] = round(median(costs[way, size]) * 1e3 / SIZES[size], 3)
    for size in SIZES:
        for ours, mark in (("", ""), ("open", "open_")):
            for other in PEERS:
                name, mine, its = f"{mark}ratio_{other}_{size}", (ours, size), (other, size)
                told |= spread(name, ratios(costs[its], costs[mine]), 3)
                told[f"{name}_rate"] = ratio(rates[mine], rates[its])
    return told


SERVERS: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
    "grpc": serve_grpc,
    "size": lambda: serve_zmq(lambda body: len(body).to_bytes(8, "little")),
    "echo": lambda: serve_zmq(lambda body: msgpack.packb(msgpack.unpackb(body))),
}


if __name__ == "__main__":
    uvloop.run(SERVERS[sys.argv[1]]())
