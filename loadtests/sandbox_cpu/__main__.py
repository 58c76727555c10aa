"""What a jail that spins in all its processes does to its own limit, and to its neighbours.

`enforce_s`: the longest that a limit of one second takes to end a hundred that spin, on one core
that they share with their keeper and the sandbox, in each tier that works here. `noisy_ratio`: the
99th percentile of honest calls beside a jail that spins in all its processes, over alone; rounds
alternate. `python -m loadtests.sandbox_cpu`
"""

from __future__ import annotations

import argparse
import asyncio

from loadtests.measuring.entry import options, report
from loadtests.sandbox.sandboxed import sandboxed
from loadtests.sandbox_cpu.spinning import WARM_S, add_sizes, latencies, measured


async def main(sizes: argparse.Namespace) -> dict[str, float]:
    async with sandboxed() as place:
        await place.load("load")
        await latencies(place, min(WARM_S, sizes.seconds))
        found = await measured(place, sizes)
    return {key: round(value, 3) for key, value in found.items()}


if __name__ == "__main__":
    parser = options(__doc__, seconds=(60.0, "of honest calls"))
    add_sizes(parser)
    report(asyncio.run(main(parser.parse_args())))
