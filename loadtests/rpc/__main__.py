"""Benchmark of calls between two processes, beside stock zmq.asyncio with the same MessagePack
body.

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

from contextlib import AsyncExitStack
from functools import partial
from statistics import median
from typing import Any

import msgpack
import numpy as np
import uvloop

from loadtests.measuring.entry import options, report
from loadtests.measuring.meshed import own_keys
from loadtests.measuring.metered import HostMeter
from loadtests.measuring.rounds import ratio, ratios, spread
from loadtests.rpc import payloads
from loadtests.rpc.echo import PING, Block, Echo, reached
from loadtests.rpc.payloads import DealerClient, GrpcClient, Measured, Way, measured, peer

IN_FLIGHT = 64
BLOCK_BYTES = 1 << 20  # of a large message, of which few are in flight
BLOCKS_IN_FLIGHT = 4
Found = dict[str, list[Measured]]


async def compare(rounds: int, seconds: float) -> dict[str, Any]:
    block = Block(np.zeros(BLOCK_BYTES, np.uint8))
    async with AsyncExitStack() as stack:
        echo, ref = await stack.enter_async_context(reached(own_keys()))
        plain, open_ref = await stack.enter_async_context(reached())
        stock, address = stack.enter_context(peer("echo"))
        client = await stack.enter_async_context(DealerClient(address))

        async def ask_stock() -> None:
            body = msgpack.packb((PING.job, PING.sequence, PING.payload))
            msgpack.unpackb(await client.ask(body))

        ways = {
            "": Way(partial(ref.call, Echo.inline, PING), echo, IN_FLIGHT),
            "open_": Way(partial(open_ref.call, Echo.inline, PING), plain, IN_FLIGHT),
            "peer_": Way(ask_stock, stock, IN_FLIGHT),
            "block_": Way(partial(ref.call, Echo.block, block), echo, BLOCKS_IN_FLIGHT),
            "open_block_": Way(partial(open_ref.call, Echo.block, block), plain, BLOCKS_IN_FLIGHT),
        }
        found = await measured(ways, rounds, seconds)
    small = {name: rows for name, rows in found.items() if "block" not in name}
    blocks = {name: rows for name, rows in found.items() if "block" in name}
    over_stock = ratios(_rates(found[""]), _rates(found["peer_"]))
    return {
        **_summarize(small),
        "ratio_zmq_asyncio": round(median(over_stock), 2),
        "ratio_open": ratio(_costs(found["open_"]), _costs(found[""]), 2),
        **{
            f"{name}mb_per_s": round(median(_rates(rows)) * BLOCK_BYTES / 1e6)
            for name, rows in blocks.items()
        },
    }


async def compare_payloads(rounds: int, seconds: float) -> dict[str, Any]:
    """Measure large calls of ours, of `grpc.aio` and of stock `zmq.asyncio`."""
    contents = {name: bytes(size) for name, size in payloads.SIZES.items()}
    host = HostMeter()
    async with AsyncExitStack() as stack:
        ours, ref = await stack.enter_async_context(reached(own_keys()))
        plain, open_ref = await stack.enter_async_context(reached())
        grpc, grpc_address = stack.enter_context(peer("grpc"))
        zmq, zmq_address = stack.enter_context(peer("size"))
        by_grpc = await stack.enter_async_context(GrpcClient(grpc_address))
        by_zmq = await stack.enter_async_context(DealerClient(zmq_address))
        ways: dict[tuple[str, str], Way] = {}
        for size, content in contents.items():
            block, most = Block(np.frombuffer(content, np.uint8)), payloads.IN_FLIGHT[size]
            ways |= {
                ("", size): Way(partial(ref.call, Echo.block, block), ours, most),
                ("open", size): Way(partial(open_ref.call, Echo.block, block), plain, most),
                ("grpc", size): Way(partial(by_grpc.size, content), grpc, most),
                ("zmq", size): Way(partial(by_zmq.size, content), zmq, most),
            }
        found = await measured(ways, rounds, seconds)
    return payloads.figures(found) | host.reading()


async def compare_curve(rounds: int, seconds: float) -> dict[str, Any]:
    """Measure the cost of CURVE, with a key for each process."""
    block = Block(np.zeros(BLOCK_BYTES, np.uint8))
    host = HostMeter()
    async with reached(own_keys()) as (curve, ref), reached() as (plain, plain_ref):
        ways = {
            "": Way(partial(ref.call, Echo.inline, PING), curve, IN_FLIGHT),
            "plain_": Way(partial(plain_ref.call, Echo.inline, PING), plain, IN_FLIGHT),
            "block_": Way(partial(ref.call, Echo.block, block), curve, BLOCKS_IN_FLIGHT),
            "plain_block_": Way(
                partial(plain_ref.call, Echo.block, block), plain, BLOCKS_IN_FLIGHT
            ),
        }
        found = await measured(ways, rounds, seconds)
    costs = {name: _costs(rows) for name, rows in found.items()}
    return {
        **spread("ratio_plain", ratios(costs["plain_"], costs[""]), 3),
        **spread("ratio_plain_block", ratios(costs["plain_block_"], costs["block_"]), 3),
        **_summarize(found),
        **host.reading(),
    }


async def both(rounds: int, seconds: float) -> dict[str, Any]:
    """Measure small calls, then large ones."""
    return await compare(rounds, seconds) | await compare_payloads(rounds, seconds)


def _rates(rows: list[Measured]) -> list[float]:
    return [row.calls_per_s for row in rows]


def _costs(rows: list[Measured]) -> list[float]:
    return [row.cpu_us for row in rows]


def _summarize(found: Found) -> dict[str, float]:
    return {
        **{f"{name}calls_per_s": round(median(_rates(rows))) for name, rows in found.items()},
        **{
            f"{name}cpu_us_per_call": round(median(_costs(rows)), 1) for name, rows in found.items()
        },
    }


def main() -> None:
    parser = options(
        __doc__,
        rounds=7,
        seconds=1.0,
        curve=(False, "what CURVE costs, and no more"),
        payloads=(False, "large calls, and no more"),
        calls=(False, "small calls, and no more"),
    )
    a = parser.parse_args()
    arms = {compare_curve: a.curve, compare_payloads: a.payloads, compare: a.calls, both: True}
    compared = next(arm for arm, wanted in arms.items() if wanted)
    report(uvloop.run(compared(a.rounds, a.seconds)))


if __name__ == "__main__":
    main()
