"""Calls per second between two processes, beside stock zmq.asyncio with the same MessagePack body.

Both run on uvloop, 64 calls of 100 bytes in flight. Ours has everything on: authentication,
deadlines, credits, typed messages, incarnations, trace ids. `open_` is ours without authentication,
`ratio_open` calls per CPU-second with it over those without. Rounds alternate; medians are
reported. `python -m loadtests.rpc`

Then calls that carry 1 MiB and 64 MiB, beside `grpc.aio` and stock `zmq.asyncio`, in rotating
order: see `loadtests.rpc.payloads`; `--payloads` measures nothing else. `ratio_grpc_64mib` is
ours with CURVE over a peer that has nothing of the kind, `open_ratio_grpc_64mib` ours without it.

`--curve` measures what CURVE costs where each process has a key of its own: `ratio_plain` is calls
per CPU-second of both processes over those of the same runtime without keys, the median over rounds
whose order rotates, with the interval that holds half of them.
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
from functools import partial

import msgpack
import numpy as np
import psutil
import uvloop
import zmq
import zmq.asyncio

from common.base.encoding.messages import encode
from common.mesh.runtime.mesh import Mesh
from common.mesh.runtime.ref import Ref
from common.mesh.transport.keys import ProcessKeys
from loadtests.measuring.host import HostMeter
from loadtests.measuring.unrenewed import FOREVER_S, knows, own_keys, unrenewed
from loadtests.rpc import payloads
from loadtests.rpc.echo import PING, Block, Echo, EchoActor

IN_FLIGHT = 64
BODY_BYTES = 100
BLOCK_BYTES = 1 << 20  # of a large message, of which few are in flight
BLOCKS_IN_FLIGHT = 4
WARM_S = 0.3  # of each arm before rounds begin, at most


async def serve_mesh(client: str) -> None:
    mesh = unrenewed("echo", own_keys([client]) if client else None)
    await mesh.join(EchoActor())
    print(mesh.transport.address, mesh.incarnation, flush=True)
    await asyncio.sleep(FOREVER_S)


async def serve_peer() -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind("tcp://127.0.0.1:*")
        print(socket.getsockopt_string(zmq.LAST_ENDPOINT), "-", flush=True)
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


def _serve(which: str, client: str = "") -> tuple[subprocess.Popen[str], str, str]:
    argv = [sys.executable, "-m", "loadtests.rpc", "--serve", which]
    argv += ["--client", client]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address, incarnation = process.stdout.readline().split()
    return process, address, incarnation


async def _ours(
    name: str, keys: ProcessKeys | None = None
) -> tuple[subprocess.Popen[str], Mesh, Ref]:
    """A process that answers Echo, and a mesh of this one that asks it."""
    process, address, incarnation = _serve("mesh", keys.public if keys else "")
    mesh = unrenewed(name, keys)
    mesh.start()
    await knows(mesh, "echo", address, incarnation)
    return process, mesh, mesh.ref("echo")


async def compare(rounds: int, seconds: float) -> dict[str, float]:
    echo, mesh, ref = await _ours("load", own_keys())
    plain, open_mesh, open_ref = await _ours("open")
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
            await measure(one, min(WARM_S, seconds), server, in_flight)
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


async def compare_payloads(rounds: int, seconds: float) -> dict[str, float]:
    """Large calls of ours, of `grpc.aio` and of stock `zmq.asyncio`."""
    ours, mesh, ref = await _ours("load", own_keys())
    plain, open_mesh, open_ref = await _ours("open")
    served = {name: _peer(name) for name in ("grpc", "zmq")}
    contents = {name: bytes(size) for name, size in payloads.SIZES.items()}
    blocks = {name: Block(np.frombuffer(content, np.uint8)) for name, content in contents.items()}
    by_grpc = payloads.GrpcClient(served["grpc"][1], contents)
    by_zmq = payloads.ZmqClient(served["zmq"][1], contents)
    ways: dict[str, tuple[payloads.Way, subprocess.Popen[str]]] = {
        "": (lambda size: ref.call(Echo.block, blocks[size]), ours),
        "open": (lambda size: open_ref.call(Echo.block, blocks[size]), plain),
        "grpc": (by_grpc.call, served["grpc"][0]),
        "zmq": (by_zmq.call, served["zmq"][0]),
    }
    arms = [(way, size) for size in payloads.SIZES for way in ways]
    found: dict[tuple[str, str], list[payloads.Measured]] = {arm: [] for arm in arms}
    host = HostMeter()
    try:
        for number in range(-1, rounds):  # the first is to warm up
            turn = max(0, number) % len(arms)
            for way, size in [*arms[turn:], *arms[:turn]]:
                call_once, server = ways[way]
                one = partial(call_once, size)
                lasts = seconds if number >= 0 else min(0.1, seconds)
                measured = await measure(one, lasts, server, payloads.IN_FLIGHT[size])
                if number >= 0:
                    found[way, size].append(measured)
    finally:
        await by_grpc.close()
        await by_zmq.close()
        await mesh.leave()
        await open_mesh.leave()
        for process in (ours, plain, *(process for process, _ in served.values())):
            process.kill()
            process.wait()
    return payloads.figures(found) | host.reading()


def _peer(which: str) -> tuple[subprocess.Popen[str], str]:
    argv = [sys.executable, "-m", "loadtests.rpc.payloads", which]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


async def compare_curve(rounds: int, seconds: float) -> dict[str, float]:
    """What CURVE costs, with a key for each process."""
    curve, mesh, ref = await _ours("load", own_keys())
    plain, plain_mesh, plain_ref = await _ours("plain")
    block = Block(np.zeros(BLOCK_BYTES, np.uint8))
    arms = {
        "": (lambda: ref.call(Echo.inline, PING), curve, IN_FLIGHT),
        "plain_": (lambda: plain_ref.call(Echo.inline, PING), plain, IN_FLIGHT),
        "block_": (lambda: ref.call(Echo.block, block), curve, BLOCKS_IN_FLIGHT),
        "plain_block_": (lambda: plain_ref.call(Echo.block, block), plain, BLOCKS_IN_FLIGHT),
    }
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    host = HostMeter()
    try:
        for one, server, in_flight in arms.values():
            await measure(one, min(WARM_S, seconds), server, in_flight)
        for number in range(rounds):
            order = list(arms)[number % len(arms) :] + list(arms)[: number % len(arms)]
            for name in order:
                one, server, in_flight = arms[name]
                figures[name].append(await measure(one, seconds, server, in_flight))
    finally:
        await mesh.leave()
        await plain_mesh.leave()
        for process in (curve, plain):
            process.kill()
            process.wait()
    return {
        **_ratio("ratio_plain", figures["plain_"], figures[""]),
        **_ratio("ratio_plain_block", figures["plain_block_"], figures["block_"]),
        "ratio_plain_rate": round(
            statistics.median(
                ours / theirs
                for (ours, _), (theirs, _) in zip(figures[""], figures["plain_"], strict=True)
            ),
            2,
        ),
        **{
            f"{name}cpu_us_per_call": round(statistics.median(cost for _, cost in rows), 1)
            for name, rows in figures.items()
        },
        **{
            f"{name}calls_per_s": round(statistics.median(rate for rate, _ in rows))
            for name, rows in figures.items()
        },
        "in_flight": IN_FLIGHT,
        "rounds": rounds,
        "cores": os.cpu_count() or 0,
        **host.reading(),
    }


async def both(rounds: int, seconds: float) -> dict[str, float]:
    """Small calls, then large ones."""
    return await compare(rounds, seconds) | await compare_payloads(rounds, seconds)


def _ratio(
    name: str, plain: list[tuple[float, float]], curve: list[tuple[float, float]]
) -> dict[str, float]:
    """Work per CPU-second with CURVE over that without: median, and the quartiles of the rounds."""
    each = [without / with_it for (_, without), (_, with_it) in zip(plain, curve, strict=True)]
    low, middle, high = statistics.quantiles(each, n=4)
    found = {name: middle, f"{name}_low": low, f"{name}_high": high}
    return {key: round(value, 3) for key, value in found.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--seconds", type=float, default=1.0)
    options.add_argument("--curve", action="store_true", help="what CURVE costs, and no more")
    options.add_argument("--payloads", action="store_true", help="large calls, and no more")
    options.add_argument("--calls", action="store_true", help="small calls, and no more")
    options.add_argument("--serve", choices=["mesh", "peer"], help=argparse.SUPPRESS)
    options.add_argument("--client", default="", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.serve:
        meshed = chosen.serve == "mesh"
        uvloop.run(serve_mesh(chosen.client) if meshed else serve_peer())
    elif chosen.curve:
        print(json.dumps(uvloop.run(compare_curve(chosen.rounds, chosen.seconds))))
    elif chosen.calls:
        print(json.dumps(uvloop.run(compare(chosen.rounds, chosen.seconds))))
    elif chosen.payloads:
        print(json.dumps(uvloop.run(compare_payloads(chosen.rounds, chosen.seconds))))
    else:
        print(json.dumps(uvloop.run(both(chosen.rounds, chosen.seconds))))


if __name__ == "__main__":
    main()
