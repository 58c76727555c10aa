"""Benchmark of a jail that spins in all its processes: its own limit, and the effect on its
neighbours.

`enforce_s`: the longest that a limit of one second takes to end a hundred that spin, on one core
that they share with their keeper and the sandbox, in each tier that works here. `noisy_ratio`: the
99th percentile of honest calls beside a jail that spins in all its processes, over alone; rounds
alternate. `python -m loadtests.sandbox_cpu`
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

from loadtests.measuring.entry import options, report
from loadtests.measuring.rounds import percentile
from loadtests.sandbox.sandboxed import Place, jailed, sandboxed, sustained
from meshrl.common.base.clock import SystemClock
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.sandbox.isolation import tier_detection
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.program import JailProgram
from meshrl.services.sandbox.isolation.outer_jail.interpreters import Interpreter
from meshrl.services.sandbox.isolation.resources import cgroups
from meshrl.services.sandbox.isolation.resources.limits import MIB, JailLimits
from meshrl.services.sandbox.sessions import Sessions

SPINNERS = 100
LIMIT_S = 1.0
TRIES = 3
ROUNDS = 6
HONEST = 4  # callers
WARM_S = 2.0
NOISE_S = 2.0  # CPU time of one call that spins; the next begins at once
LEFT = f"""
import os
waits, go = os.pipe()
for _ in range({SPINNERS}):
    if os.fork() == 0:
        os.close(go)
        try:
            os.setsid()  # a share of its own, where the kernel groups tasks by session
        except OSError:
            pass
        os.read(waits, 1)
        while True: pass
os.close(go)
"""
SPIN = f"{LEFT}\nwhile True: pass"
WAIT = f"{LEFT}\nimport time\ntime.sleep(3600)"
THREADS = f"""
import threading
threading.stack_size(1 << 18)
def spin():
    while True: pass
for _ in range({SPINNERS}):
    threading.Thread(target=spin).start()
"""
# As many as a jail may have: it is refused more, and all that it got spin.
NOISE = """
import os
try:
    while os.fork(): pass
except OSError:
    pass
while True: pass
"""


def add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tries", type=int, default=TRIES, help="of each limit, in each tier")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="that is enforced")
    parser.add_argument("--noise-s", type=float, default=NOISE_S, help="of one call that spins")
    parser.add_argument("--noisy-rounds", type=int, default=ROUNDS, help="alone and beside noise")


async def enforced(tries: int, limit_s: float) -> dict[str, tuple[float, float]]:
    """Return by tier the longest until a limit ends a program, and its CPU-seconds until then."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    found = {}
    try:
        host, clock = SystemHost(), SystemClock()
        for name in ("cgroup", "bwrap", "landlock"):
            tier, homes = (name, None) if name != "cgroup" else ("bwrap", cgroups.find_parents())
            if await tier_detection.probe_tier(tier, host, clock, Path(os.devnull)):
                continue
            if name == "cgroup" and homes is None:
                continue
            launcher = JailLauncher(host, clock, tier, Interpreter.default(), homes)
            try:
                await launcher.start()
                tried = [await _enforced(launcher, clock, limit_s) for _ in range(tries)]
                found[name] = max(took for took, _ in tried), max(used for _, used in tried)
            finally:
                await launcher.stop()
    finally:
        os.sched_setaffinity(0, before)
    return found


async def _enforced(
    launcher: JailLauncher, clock: SystemClock, limit_s: float
) -> tuple[float, float]:
    limits = JailLimits(
        wall_s=limit_s, cpu_s=limit_s, memory_bytes=256 * MIB, processes=SPINNERS + 20
    )
    worst = most = 0.0
    for source in (SPIN, WAIT, THREADS):
        begun = time.perf_counter()
        ran = await launcher.run(JailProgram(source), limits)
        worst, most = max(worst, time.perf_counter() - begun), max(most, ran.cpu_s)
        if ran.status != "timeout":
            raise RuntimeError(f"a limit was not enforced: {ran}")
    unhurried = replace(limits, wall_s=60.0)  # to start them may take long; their CPU time counts
    sessions = Sessions(launcher, clock, unhurried, 1, 600.0)
    try:
        first = await sessions.run("a", LEFT)
        begun = time.perf_counter()
        second = await sessions.run("a", "while True: pass")
        worst = max(worst, time.perf_counter() - begun)
    finally:
        sessions.close()
    if (first.status, second.status) != ("ok", "timeout"):
        raise RuntimeError(f"a limit was not enforced in a session: {first}, {second}")
    return worst, most


async def noisy(place: Place, sizes: argparse.Namespace) -> dict[str, float]:
    """Measure 99th percentiles of honest calls, in ms, alone and beside one noisy neighbour."""
    alone: list[float] = []
    beside: list[float] = []
    ratios = []
    part_s = sizes.seconds / sizes.noisy_rounds / 2
    for _ in range(sizes.noisy_rounds):
        quiet = await latencies(place, part_s)
        stop = asyncio.Event()
        noise = asyncio.create_task(_noise(place, stop, sizes.noise_s))
        await asyncio.sleep(0.5)  # until it has all its processes
        loud = await latencies(place, part_s)
        stop.set()
        await noise
        alone += quiet
        beside += loud
        ratios.append(percentile(loud, 0.99) / percentile(quiet, 0.99))
    return {
        "noisy_ratio": statistics.median(ratios),
        "noisy_p99_ms": 1e3 * percentile(beside, 0.99),
        "alone_p99_ms": 1e3 * percentile(alone, 0.99),
        "noisy_p50_ratio": statistics.median(beside) / statistics.median(alone),
    }


async def _noise(place: Place, stop: asyncio.Event, deadline_s: float) -> None:
    while not stop.is_set():
        status, value = await place.run("load", "python", NOISE, deadline_s=deadline_s)
        if not (isinstance(value, dict) and value["status"] == "timeout"):
            raise RuntimeError(f"noise ended with {status}: {value}")


async def latencies(place: Place, seconds: float) -> list[float]:
    _, took = await sustained(lambda: jailed(place), HONEST, seconds)
    return took


async def measured(place: Place, sizes: argparse.Namespace) -> dict[str, float]:
    """Measure everything; the limit is enforced first, on launchers of our own."""
    by_tier = await enforced(sizes.tries, sizes.limit_s)
    found = {f"enforce_s_{tier}": took for tier, (took, _) in by_tier.items()}
    found |= {f"enforce_cpu_s_{tier}": used for tier, (_, used) in by_tier.items()}
    found["enforce_s"] = max(took for took, _ in by_tier.values())
    return {**found, **await noisy(place, sizes)}


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
