"""Benchmark of generated code in fresh jails, beside a bubblewrap and a bare interpreter per call.

All three run the same program and read its output. Ours is called through a real sandbox process
over ZeroMQ; the two peers are started by asyncio, with the same concurrency. Rounds alternate;
rates are medians over rounds, latencies of all calls. The effect of spinning jails on their limits
and neighbours is `loadtests.sandbox_cpu`, and part of it. `python -m loadtests.sandbox`
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time

from loadtests.measuring.entry import options, print_progress, report
from loadtests.measuring.rounds import percentile, ratio
from loadtests.sandbox.sandboxed import PROGRAM, SAID, One, Place, jailed, sandboxed, sustained
from loadtests.sandbox_cpu.__main__ import add_sizes, measured
from meshrl.common.base.clock import SystemClock
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.sandbox.isolation.outer_jail.interpreters import Interpreter
from meshrl.services.sandbox.loaded_job import TRUSTED_BUILTINS as TRUSTED_TOOLS
from meshrl.services.sandbox.workers.calls import PoolCall, PoolFunctions, PoolLimits
from meshrl.services.sandbox.workers.pool import WorkerPool
from meshrl.services.sandbox.workers.worker import TOOL

ISOLATED = ("-I", "-S")  # as in our jails: no site packages, whose lookup is slow
CONCURRENCY = (1, 8, 64)
PEER_SHARE = 0.4  # of the time that ours gets in a round
ROUNDS = 6
TRUSTED = 2000  # calls of the calculator, one after the other
LEAK_CALLS = 10_000
WARM_S = 2.0
JAILS = 8  # of the sandbox at a time


def bare(*flags: str) -> list[str]:
    return [Interpreter.default().python, *flags, "-c", PROGRAM]


def cold(*flags: str) -> list[str]:
    """Return a command with our profile's flags that creates a new jail for each call."""
    interpreter = Interpreter.default()
    argv = ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"]
    argv += ["--new-session", "--clearenv", "--ro-bind", "/usr", "/usr"]
    for link in ("/bin", "/lib", "/lib64"):
        if os.path.islink(link):
            argv += ["--symlink", os.readlink(link), link]
    for place in interpreter.directories:
        argv += ["--ro-bind", place, place]
    argv += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--remount-ro", "/"]
    return [*argv, "--cap-drop", "ALL", interpreter.python, *flags, "-c", PROGRAM]


async def started(argv: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
    )
    said, _ = await process.communicate()
    if said.decode().strip() != SAID:
        raise RuntimeError(f"{argv[0]} said {said!r}")


async def measure(place: Place, concurrency: int, seconds: float, rounds: int) -> dict[str, float]:
    kinds: dict[str, tuple[One, float]] = {
        "fresh": (lambda: jailed(place), 1.0),
        "cold_bwrap": (lambda: started(cold()), PEER_SHARE),
        "bare": (lambda: started(bare()), PEER_SHARE),
        "cold_isolated": (lambda: started(cold(*ISOLATED)), PEER_SHARE),
        "bare_isolated": (lambda: started(bare(*ISOLATED)), PEER_SHARE),
    }
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    latencies: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, (one, share) in kinds.items():
            rate, took = await sustained(one, concurrency, share * seconds / rounds)
            rates[kind].append(rate)
            latencies[kind] += took
    found: dict[str, float] = {}
    for kind in kinds:
        found[f"{kind}_calls_per_s_{concurrency}"] = statistics.median(rates[kind])
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            found[f"{kind}_{name}_ms_{concurrency}"] = 1e3 * percentile(latencies[kind], share)
    for peer in [kind for kind in kinds if kind != "fresh"]:
        name = peer.removesuffix("_bwrap")
        found[f"ratio_{name}_{concurrency}"] = ratio(rates["fresh"], rates[peer])
    found[f"fresh_calls_{concurrency}"] = len(latencies["fresh"])
    return found


async def trusted(place: Place, calls: int) -> float:
    took = []
    for number in range(calls):
        begun = time.perf_counter()
        status, value = await place.run("load", "calculator", f"{number} * 2")
        took.append(time.perf_counter() - begun)
        if value != str(2 * number):
            raise RuntimeError(f"the calculator said {status}: {value}")
    return 1e3 * statistics.median(took[calls // 10 :])


async def in_worker(place: Place, calls: int) -> float:
    """Measure the same at the sandbox: from a call's arrival at its pool to its answer."""
    references = {f"{TOOL}c": TRUSTED_TOOLS["calculator"]}
    functions = PoolFunctions("load", str(place.directory), references)
    pool = WorkerPool(SystemHost(), SystemClock(), functions, PoolLimits())
    await pool.start()
    took = []
    try:
        for number in range(calls):
            begun = time.perf_counter()
            (answer,) = await pool.run([PoolCall(f"{TOOL}c", [f"{number} * 2"], 5.0)])
            took.append(time.perf_counter() - begun)
            if answer.value != str(2 * number):
                raise RuntimeError(f"the calculator said {answer}")
    finally:
        await pool.stop()
    return 1e3 * statistics.median(took[calls // 10 :])


async def main(sizes: argparse.Namespace) -> dict[str, float]:
    async with sandboxed("--jails", str(JAILS)) as place:
        await place.load("load")
        warm_s = min(WARM_S, sizes.seconds)
        await sustained(lambda: jailed(place), 64, warm_s)  # every slot has had a jail
        before = place.leavings()
        found: dict[str, float] = {"pool_size": JAILS, "cores": os.cpu_count() or 1}
        for concurrency in sizes.concurrency:
            found |= await measure(place, concurrency, sizes.seconds, sizes.rounds)
            print_progress(found)
        found |= await measured(place, sizes)
        calls = sum(int(found[f"fresh_calls_{c}"]) for c in sizes.concurrency)
        while calls < sizes.leak_calls:
            _, took = await sustained(lambda: jailed(place), 64, min(5.0, sizes.seconds))
            calls += len(took)
        found["trusted_wire_p50_ms"] = await trusted(place, sizes.trusted)
        found["trusted_p50_ms"] = await in_worker(place, sizes.trusted)
        await asyncio.sleep(1.0)
        after = place.leavings()
        print(before, after, sep="\n", file=sys.stderr)
        found["leaked"] = after.beyond(before)
        found["leak_calls"] = calls
    alone = ("fresh_p50_ms", "fresh_p99_ms", "cold_bwrap_p50_ms", "bare_p50_ms")
    short = {key: found[f"{key}_1"] for key in alone if 1 in sizes.concurrency}
    if 64 in sizes.concurrency:
        short["calls_per_s_64"] = found["fresh_calls_per_s_64"]
    return {key: round(value, 3) for key, value in {**found, **short}.items()}


if __name__ == "__main__":
    parser = options(
        __doc__,
        seconds=(60.0, "of ours, at each concurrency"),
        rounds=ROUNDS,
        concurrency=[*CONCURRENCY],
        trusted=(TRUSTED, "calls of the calculator"),
        leak_calls=LEAK_CALLS,
    )
    add_sizes(parser)
    report(asyncio.run(main(parser.parse_args())))
