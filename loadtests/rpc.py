"""Calls per second between two processes, beside stock zmq.asyncio with the same MessagePack body.

Both run on uvloop, 64 calls of 100 bytes in flight. Ours has everything on: authentication,
deadlines, credits, typed messages, incarnations, trace ids. `open_` is ours without authentication,
`ratio_open` calls per CPU-second with it over those without. Rounds alternate; medians are
reported. `python -m loadtests.rpc`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import msgpack
import numpy as np
import psutil
import uvloop
import zmq
import zmq.asyncio

from common.runtime.actor import Actor, call
from common.runtime.interface import Call, Interface
from common.runtime.mesh import Mesh, Ref
from common.secret import SECRET_BYTES
from common.wire.frames import Array, encode, message
from loadtests.measuring.unrenewed import FOREVER_S, knows, unrenewed

IN_FLIGHT = 64
BODY_BYTES = 100
BLOCK_BYTES = 1 << 20  # of a large message, of which few are in flight
BLOCKS_IN_FLIGHT = 4


@message
class Ping:
    job: str
    sequence: int
    payload: bytes


@message
class Block:
    block: Array


@message
class Size:
    size: int


class Echo(Interface):
    inline = Call(Ping, Ping)
    block = Call(Block, Size)
    suspending = Call(Ping, Ping)


class EchoActor(Actor):
    interface = Echo

    @call(Echo.inline)
    def inline(self, m: Ping) -> Ping:
        return m

    @call(Echo.block)
    def block(self, m: Block) -> Size:
        return Size(m.block.nbytes)

    @call(Echo.suspending)
    async def suspending(self, m: Ping) -> Ping:
        await asyncio.sleep(0)
        return m


PING = Ping("load-test", 123_456, b"x" * (BODY_BYTES - 18))


async def serve_mesh(secret: str) -> None:
    mesh = unrenewed("echo", secret)
    await mesh.join(EchoActor())
    print(mesh.transport.address, mesh.incarnation, flush=True)
    await asyncio.sleep(FOREVER_S)


async def serve_peer() -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind("tcp://127.0.0.1:*")
        print(socket.getsockopt(zmq.LAST_ENDPOINT).decode(), "-", flush=True)
        while True:
            peer, call_id, body = await socket.recv_multipart()
            reply = msgpack.packb(msgpack.unpackb(body))
            await socket.send_multipart([peer, call_id, reply])


class StockClient:
    """What one writes with zmq.asyncio: a DEALER, a receiving task, a table of futures."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(address)
        self._calls: dict[bytes, asyncio.Future[bytes]] = {}
        self._last_id = 0
        self._receiver = asyncio.create_task(self._receive())

    async def _receive(self) -> None:
        while True:
            call_id, body = await self._socket.recv_multipart()
            self._calls.pop(call_id).set_result(body)

    async def call(self) -> None:
        self._last_id += 1
        call_id = self._last_id.to_bytes(8, "little")
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        body = msgpack.packb((PING.job, PING.sequence, PING.payload))
        await self._socket.send_multipart([call_id, body])
        msgpack.unpackb(await future)

    def close(self) -> None:
        self._receiver.cancel()
        self._context.destroy(0)


def cpu_s(process: subprocess.Popen[str]) -> float:
    """CPU seconds of this process and of the one that serves it."""
    usage = psutil.Process(process.pid).cpu_times()
    return time.process_time() + float(usage.user + usage.system)


async def measure(
    one: Callable[[], Awaitable[object]],
    seconds: float,
    server: subprocess.Popen[str],
    in_flight: int = IN_FLIGHT,
) -> tuple[float, float]:
    """(calls per second, CPU microseconds per call in both processes) with so many workers."""
    done = 0
    cpu = cpu_s(server)
    start = time.perf_counter()
    end = start + seconds

    async def worker() -> None:
        nonlocal done
        while time.perf_counter() < end:
            await one()
            done += 1

    await asyncio.gather(*(worker() for _ in range(in_flight)))
    return done / (time.perf_counter() - start), 1e6 * (cpu_s(server) - cpu) / done


def _serve(which: str, secret: str = "") -> tuple[subprocess.Popen[str], str, str]:
    argv = [sys.executable, "-m", "loadtests.rpc", "--serve", which, "--secret", secret]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address, incarnation = process.stdout.readline().split()
    return process, address, incarnation


async def _ours(name: str, secret: str) -> tuple[subprocess.Popen[str], Mesh, Ref]:
    """A process that answers Echo, and a mesh of this one that asks it."""
    process, address, incarnation = _serve("mesh", secret)
    mesh = unrenewed(name, secret)
    mesh.start()
    await knows(mesh, "echo", address, incarnation)
    return process, mesh, mesh.ref("echo")


async def compare(rounds: int, seconds: float) -> dict[str, float]:
    secret = secrets.token_hex(SECRET_BYTES)
    echo, mesh, ref = await _ours("load", secret)
    plain, open_mesh, open_ref = await _ours("open", "")
    stock, stock_address, _ = _serve("peer")
    client = StockClient(stock_address)
    block = Block(np.zeros(BLOCK_BYTES, np.uint8))
    ways: dict[str, tuple[Callable[[], Awaitable[object]], subprocess.Popen[str], int]] = {
        "": (lambda: ref.call(Echo.inline, PING), echo, IN_FLIGHT),
        "open_": (lambda: open_ref.call(Echo.inline, PING), plain, IN_FLIGHT),
        "peer_": (client.call, stock, IN_FLIGHT),
        "task_": (lambda: ref.call(Echo.suspending, PING), echo, IN_FLIGHT),
        "block_": (lambda: ref.call(Echo.block, block), echo, BLOCKS_IN_FLIGHT),
        "open_block_": (lambda: open_ref.call(Echo.block, block), plain, BLOCKS_IN_FLIGHT),
    }
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    try:
        for one, server, in_flight in ways.values():
            await measure(one, 0.3, server, in_flight)  # warm
        for _ in range(rounds):
            for name, (one, server, in_flight) in ways.items():
                figures[name].append(await measure(one, seconds, server, in_flight))
    finally:
        client.close()
        await mesh.leave()
        await open_mesh.leave()
        for process in (echo, plain, stock):
            process.kill()
            process.wait()
    rates = {name: [rate for rate, _ in rows] for name, rows in figures.items()}
    costs = {name: statistics.median(cost for _, cost in rows) for name, rows in figures.items()}
    ratios = [ours / theirs for ours, theirs in zip(rates[""], rates["peer_"], strict=True)]
    small = [name for name in ways if "block" not in name]
    opened = [
        without / with_it
        for (_, with_it), (_, without) in zip(figures[""], figures["open_"], strict=True)
    ]
    return {
        **{f"{name}calls_per_s": round(statistics.median(rates[name])) for name in small},
        **{f"{name}cpu_us_per_call": round(costs[name], 1) for name in small},
        "ratio_cpu": round(costs["peer_"] / costs[""], 2),
        "ratio_zmq_asyncio": round(statistics.median(ratios), 2),
        "ratio_lowest_round": round(min(ratios), 2),
        "ratio_open": round(statistics.median(opened), 2),
        "block_mb_per_s": round(statistics.median(rates["block_"]) * BLOCK_BYTES / 1e6),
        "open_block_mb_per_s": round(statistics.median(rates["open_block_"]) * BLOCK_BYTES / 1e6),
        "block_mb_per_cpu_s": round(BLOCK_BYTES / costs["block_"]),
        "open_block_mb_per_cpu_s": round(BLOCK_BYTES / costs["open_block_"]),
        "body_bytes": len(encode(PING)[0]),
        "in_flight": IN_FLIGHT,
        "rounds": rounds,
        "cores": os.cpu_count() or 0,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--seconds", type=float, default=1.0)
    options.add_argument("--serve", choices=["mesh", "peer"], help=argparse.SUPPRESS)
    options.add_argument("--secret", default="", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.serve:
        uvloop.run(serve_mesh(chosen.secret) if chosen.serve == "mesh" else serve_peer())
    else:
        print(json.dumps(uvloop.run(compare(chosen.rounds, chosen.seconds))))


if __name__ == "__main__":
    main()
