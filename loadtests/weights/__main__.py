"""Benchmark of weight versions from publishers to receivers: speed, cost, size.

Usage:

    python -m loadtests.weights [--arms one_host,fanout] [--rounds 7]

Arms run one after the other; what is compared within one runs in rotating order, round by round,
and a ratio is the median of its pairs, with their quartiles as `_low` and `_high`. Costs are
CPU-seconds of all processes that take part. Each arm reports this machine's load
(`ARM_host_cores`, `ARM_steal_cores`, `ARM_load`), and is not `valid` where it is paced by links and
more than 1.6 cores were busy. Needs root where links are capped.

Prints one flat JSON object: the figures, `valid`, and in `misses` those that are not within their
bounds (`LEAST`, `MOST`). Exits with 0 when there are none.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable

from loadtests.measuring.entry import arms_of, flat, print_progress, report
from loadtests.measuring.rounds import Arm
from loadtests.namespaces.hosts import list_missing_tools
from loadtests.weights.arms.adapters import adapters
from loadtests.weights.arms.codec import codec
from loadtests.weights.arms.late_joiners import late_joiners
from loadtests.weights.arms.link import link
from loadtests.weights.arms.one_host import one_host
from loadtests.weights.arms.pauses import fanout, first_token, pauses
from loadtests.weights.arms.runs import changed, memory
from loadtests.weights.arms.server_push import server_push
from loadtests.weights.scene import MIB, Plan

RUNS: dict[str, Callable[[Plan], Awaitable[Arm]]] = {
    "one_host": one_host,
    "fanout": fanout,
    "codec": codec,
    "link": link,
    "pauses": pauses,
    "first_token": first_token,
    "late_joiners": late_joiners,
    "adapters": adapters,
    "changed": changed,
    "memory": memory,
    "server_push": server_push,
}
CAPPED = {"fanout", "first_token", "link"}  # that need networks of their own
ABOUT = ("host_cores", "steal_cores", "load", "valid", "late_share", "took_s", "cold")
LEAST = {
    "pull_share_of_memcpy": 0.35,  # of stored chunks, which were hashed when they were stored
    "ratio_gloo": 1.0,
    "ratio_http": 1.0,
    "ratio_full_over_delta_3pct": 9.0,
    "ratio_full_over_delta_1pct": 18.0,
    "multi_adapter_ratio": 0.8,
}
MOST = {
    "copies_per_byte": 1.0,
    "fanout_16_over_4": 1.5,
    "fanout_16_s": 3.4,  # twice the time of 32 MiB at 20 MB/s
    "source_copies_sent": 2.0,
    "delta_bytes_share_1pct": 0.0135,
    "delta_bytes_share_02pct": 0.0030,
    "running_update_ratio": 1.3,
    "running_update_ratio_slow_links": 2.0,
    "running_update_ratio_without_uploads": 1.5,
    "joiners_over_tree": 1.0,
    "logprob_gap": 1e-4,
    "pause_p99_over_bound": 1.0,
    "server_push_disk_extra": 1.1,  # the file itself is one
    "server_push_tensors_extra": 0.4,
}


def missed(answer: Arm) -> list[str]:
    """List the present figures that violate their bounds, each with its bound."""
    low = [f"{key} {answer[key]} < {least}" for key, least in LEAST.items()
           if key in answer and not answer[key] >= least]  # fmt: skip
    high = [f"{key} {answer[key]} > {most}" for key, most in MOST.items()
            if key in answer and not answer[key] <= most]  # fmt: skip
    return low + high


async def measured(names: list[str], plan: Plan) -> Arm:
    """Return the figures of these arms; run them in turn and print each result to stderr."""
    answer: Arm = {"cores": os.cpu_count() or 0, "rounds": plan.rounds, "valid": 1}
    for name in names:
        started_s = time.monotonic()
        found = await RUNS[name](plan)
        found["took_s"] = round(time.monotonic() - started_s, 1)
        print_progress({"arm": name, **found})
        answer["valid"] = min(answer["valid"], found.get("valid", 1))
        about = {f"{name}_{key}": found.pop(key) for key in ABOUT if key in found}
        answer |= flat(about | found)
    answer["misses"] = missed(answer)
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = Plan()
    parser.add_argument("--arms", default=",".join(RUNS))
    parser.add_argument("--rounds", type=int, default=default.rounds)
    parser.add_argument("--directory", default="", help="where versions lie")
    sizes = ("one_host", "fanout", "codec", "link", "memory", "server_push")
    for size in sizes:
        option = f"--{size.replace('_', '-')}-mib"
        parser.add_argument(option, type=int, default=getattr(default, size) // MIB, dest=size)
    parser.add_argument("--swaps", type=int, default=default.swaps, help="versions of `pauses`")
    chosen = parser.parse_args()
    names = arms_of(parser, chosen.arms, RUNS)
    if CAPPED & set(names) and (lack := list_missing_tools()):
        sys.exit(f"loadtests.weights needs {lack} for {', '.join(sorted(CAPPED & set(names)))}")
    about = {size: getattr(chosen, size) * MIB for size in sizes}
    plan = Plan(rounds=chosen.rounds, directory=chosen.directory, swaps=chosen.swaps, **about)
    answer = asyncio.run(measured(names, plan))
    report(answer)
    return 1 if answer["misses"] or not answer["valid"] else 0


if __name__ == "__main__":
    sys.exit(main())
