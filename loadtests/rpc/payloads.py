"""Calls that carry 1 MiB and 64 MiB to another process, which answers with their size: ours, with
everything on, beside `grpc.aio` and stock `zmq.asyncio`, which have no authentication.

The peers' processes are `python -m loadtests.rpc.payloads grpc|zmq`; they print where they
are, and whoever asks them does so by `GrpcClient` and `ZmqClient`.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Awaitable, Callable, Mapping

import grpc
import grpc.aio
import uvloop
import zmq
import zmq.asyncio

SIZES = {"1mib": 1 << 20, "64mib": 64 << 20}
IN_FLIGHT = {"1mib": 4, "64mib": 2}
PEERS = ("grpc", "zmq")
METHOD = "/load.Test/size"
LIMITS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
Measured = tuple[float, float]  # calls a second, CPU-microseconds a call
Way = Callable[[str], Awaitable[object]]  # one call of a size


def _as_it_is(content: bytes) -> bytes:
    return content


async def _size(request: bytes, context: object) -> bytes:
    return len(request).to_bytes(8, "little")


async def serve_grpc() -> None:
    """Until it is killed."""
    server = grpc.aio.server(options=LIMITS)
    handler = grpc.unary_unary_rpc_method_handler(_size, _as_it_is, _as_it_is)
    service = grpc.method_handlers_generic_handler("load.Test", {"size": handler})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


async def serve_zmq() -> None:
    """Until it is killed."""
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind("tcp://127.0.0.1:*")
        print(socket.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
        while True:
            peer, call_id, body = await socket.recv_multipart(copy=False)
            size = len(body.buffer).to_bytes(8, "little")
            await socket.send_multipart([peer.bytes, call_id.bytes, size])


class GrpcClient:
    """Asks `serve_grpc`."""

    def __init__(self, address: str, payloads: Mapping[str, bytes]) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=LIMITS)
        self._call = self._channel.unary_unary(METHOD, _as_it_is, _as_it_is)
        self._payloads = payloads

    async def call(self, size: str) -> None:
        """Once; AssertionError when the answer is wrong."""
        answer = await self._call(self._payloads[size])
        assert int.from_bytes(answer, "little") == SIZES[size]

    async def close(self) -> None:
        """The end of its connection."""
        await self._channel.close()


class ZmqClient:
    """Asks `serve_zmq`: a DEALER, a receiving task, a table of futures."""

    def __init__(self, address: str, payloads: Mapping[str, bytes]) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(address)
        self._calls: dict[bytes, asyncio.Future[bytes]] = {}
        self._last_id = 0
        self._payloads = payloads
        self._receiver = asyncio.create_task(self._receive())

    async def _receive(self) -> None:
        while True:
            call_id, answer = await self._socket.recv_multipart()
            self._calls.pop(call_id).set_result(answer)

    async def call(self, size: str) -> None:
        """Once; AssertionError when the answer is wrong."""
        self._last_id += 1
        call_id = self._last_id.to_bytes(8, "little")
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        await self._socket.send_multipart([call_id, self._payloads[size]], copy=False)
        assert int.from_bytes(await future, "little") == SIZES[size]

    async def close(self) -> None:
        """The end of its connection."""
        self._receiver.cancel()
        self._context.destroy(0)


def figures(found: Mapping[tuple[str, str], list[Measured]]) -> dict[str, float]:
    """By (way, size), of rounds: `*_mb_per_s`, `*_cpu_s_per_gb`, and ours over each peer's, pair by
    pair: `ratio_*` of bytes per CPU-second with quartiles, `ratio_*_rate` of bytes per second.
    """
    told: dict[str, float] = {}
    for (way, size), rows in found.items():
        name = f"{way}_{size}" if way else size
        rate, cost = (statistics.median(row[i] for row in rows) for i in range(2))
        told[f"{name}_mb_per_s"] = round(rate * SIZES[size] / 1e6)
        told[f"{name}_cpu_s_per_gb"] = round(cost * 1e-6 / (SIZES[size] / 1e9), 3)
    for size in SIZES:
        for ours, mark in (("", ""), ("open", "open_")):
            for peer in PEERS:
                told |= _ratio(f"{mark}ratio_{peer}_{size}", found[ours, size], found[peer, size])
    return told


def _ratio(name: str, ours: list[Measured], theirs: list[Measured]) -> dict[str, float]:
    costs = [their[1] / mine[1] for mine, their in zip(ours, theirs, strict=True)]
    rates = [mine[0] / their[0] for mine, their in zip(ours, theirs, strict=True)]
    found = {name: statistics.median(costs), f"{name}_rate": statistics.median(rates)}
    if len(costs) > 1:
        low, _, high = statistics.quantiles(costs, n=4, method="inclusive")
        found |= {f"{name}_low": low, f"{name}_high": high}
    return {key: round(value, 3) for key, value in found.items()}


if __name__ == "__main__":
    uvloop.run({"grpc": serve_grpc, "zmq": serve_zmq}[sys.argv[1]]())
