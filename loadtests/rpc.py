"""Calls per second between two processes, beside stock zmq.asyncio with the same MessagePack body.

Both run on uvloop, 64 calls of 100 bytes in flight. Ours has everything on: deadlines, credits,
typed messages, incarnations, trace ids. Rounds alternate; medians are reported. `python -m
loadtests.rpc`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import msgpack
import psutil
import uvloop
import zmq
import zmq.asyncio

from common.runtime.actor import Actor, call
from common.runtime.interface import Call, Interface
from common.wire.frames import encode, message
from loadtests.measuring.unrenewed import FOREVER_S, knows, unrenewed

IN_FLIGHT = 64
BODY_BYTES = 100


@message
class Ping:
    job: str
    sequence: int
    payload: bytes


class Echo(Interface):
    inline = Call(Ping, Ping)
    suspending = Call(Ping, Ping)


class EchoActor(Actor):
    interface = Echo

    @call(Echo.inline)
    def inline(self, m: Ping) -> Ping:
        return m

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
    one: Callable[[], Awaitable[object]], seconds: float, server: subprocess.Popen[str]
) -> tuple[float, float]:
    """(calls per second, CPU microseconds per call in both processes) with IN_FLIGHT workers."""
    done = 0
    cpu = cpu_s(server)
    start = time.perf_counter()
    end = start + seconds

    async def worker() -> None:
        nonlocal done
        while time.perf_counter() < end:
            await one()
            done += 1

    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    return done / (time.perf_counter() - start), 1e6 * (cpu_s(server) - cpu) / done


def _serve(which: str) -> tuple[subprocess.Popen[str], str, str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "loadtests.rpc", "--serve", which], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    address, incarnation = process.stdout.readline().split()
    return process, address, incarnation


async def compare(rounds: int, seconds: float) -> dict[str, float]:
    echo, echo_address, incarnation = _serve("mesh")
    stock, stock_address, _ = _serve("peer")
    mesh = unrenewed("load")
    mesh.start()
    await knows(mesh, "echo", echo_address, incarnation)
    ref = mesh.ref("echo")
    client = StockClient(stock_address)
    ways: dict[str, tuple[Callable[[], Awaitable[object]], subprocess.Popen[str]]] = {
        "": (lambda: ref.call(Echo.inline, PING), echo),
        "peer_": (client.call, stock),
        "task_": (lambda: ref.call(Echo.suspending, PING), echo),
    }
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    try:
        for one, server in ways.values():
            await measure(one, 0.3, server)  # warm
        for _ in range(rounds):
            for name, (one, server) in ways.items():
                figures[name].append(await measure(one, seconds, server))
    finally:
        client.close()
        await mesh.leave()
        for process in (echo, stock):
            process.kill()
            process.wait()
    rates = {name: [rate for rate, _ in rows] for name, rows in figures.items()}
    costs = {name: statistics.median(cost for _, cost in rows) for name, rows in figures.items()}
    ratios = [ours / theirs for ours, theirs in zip(rates[""], rates["peer_"], strict=True)]
    return {
        **{f"{name}calls_per_s": round(statistics.median(rows)) for name, rows in rates.items()},
        **{f"{name}cpu_us_per_call": round(cost, 1) for name, cost in costs.items()},
        "ratio_cpu": round(costs["peer_"] / costs[""], 2),
        "ratio_zmq_asyncio": round(statistics.median(ratios), 2),
        "ratio_lowest_round": round(min(ratios), 2),
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
