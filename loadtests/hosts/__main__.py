"""Benchmark of a mesh over three hosts, each a set of namespaces of this machine, on one network.

Usage:

    python -m loadtests.hosts [--arms demo,ratio,killed,partitions,joining,doors,flood] [--rounds 1]

Needs root. Rounds of all arms run in rotating order; figures are medians over rounds.

- `accuracy`, `lost`: the demo on three hosts.
- `ratio_one_host`: wall of a paced job on three hosts over the same on one, of as many workers.
- `recover_s`: a host with a shard is killed; seconds until the second step after it. `host_lost`
  are the trajectories whose ledger it had, and which were begun again; `missed` says that
  the mesh knew.
- `stall_named_s`, `leaders_per_token`, `trained_twice`: each host in turn is cut off for
  `--cut-s`, and comes back.
- `join_s`: from the command to the first token of an engine on the new host; `drain_s`.
- `refused_without_key`, `role_matrix_errors`, `planted`: as of `loadtests.doors.matrix`, while a
  job trains.
- `flood_frames_per_s`, `grew_mib`, `gone`: a host without a key floods all ports of two others.

An arm in which this machine used more than 1.6 cores is not `valid`, and the result says so.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from loadtests.hosts import arms
from loadtests.hosts.mesh import BOOKS, Plan
from loadtests.jobs.mesh import Paces
from loadtests.measuring.entry import arms_of, options, report
from loadtests.measuring.rounds import Arm, measured, median_of
from loadtests.namespaces.hosts import list_missing_tools

JOB = Path(__file__).parents[2] / "examples" / "calculator.toml"
LEARNT = 0.85  # held-out accuracy that the demo reaches
RATIO, NAMED_S = 1.25, 30.0
RUNS: dict[str, Callable[[Plan], Awaitable[Arm]]] = {
    "demo": arms.demo,
    "three": lambda plan: arms.paced(plan, True),
    "one": lambda plan: arms.paced(plan, False),
    "killed": arms.killed,
    "partitions": arms.partitions,
    "joining": arms.joining,
    "doors": arms.doors,
    "flood": arms.flooded,
}
PARTS = {"ratio": ("three", "one")}


def result(found: dict[str, list[Arm]]) -> dict[str, Any]:
    every = [arm for runs in found.values() for arm in runs]
    answer: dict[str, Any] = {
        "valid": min(arm["valid"] for arm in every),
        "late_share": max((arm["late_share"] or 0.0 for arm in every), default=0.0),
        **{key: max(arm[key] for arm in every) for key in ("host_cores", "steal_cores", "load")},
        "router_cores": max(arm.get("router_cores", 0.0) for arm in every),
        **{key: sum(arm[key] for arm in every) for key in BOOKS},
    }
    if runs := found.get("demo"):
        answer["accuracy"] = min(arm["accuracy"] for arm in runs)
    if found.get("three") and found.get("one"):
        pairs = zip(found["three"], found["one"], strict=True)
        ratios = sorted(three["took_s"] / one["took_s"] for three, one in pairs)
        answer["ratio_one_host"] = round(statistics.median(ratios), 4)
        answer["ratios"] = [round(ratio, 4) for ratio in ratios]
    if runs := found.get("killed"):
        answer["recover_s"] = median_of(runs, "recover_s", 3)
        answer["missed"] = min(arm["hosts_lost"] for arm in runs)
    if runs := found.get("partitions"):
        named = [arm["stall_named_s"] for arm in runs]
        answer["stall_named_s"] = max(named) if None not in named else None
        answer["leaders_per_token"] = max(arm["leaders_per_token"] for arm in runs)
    if runs := found.get("joining"):
        answer |= {key: median_of(runs, key, 3) for key in ("join_s", "drain_s")}
    if runs := found.get("doors"):
        answer["refused_without_key"] = min(arm["refused_without_key"] for arm in runs)
        for key in ("role_matrix_errors", "planting_tried", "planted"):
            answer[key] = sum(arm[key] for arm in runs)
    if runs := found.get("flood"):
        answer["flood_frames"] = sum(arm["flood_frames"] for arm in runs)
        answer["flood_frames_per_s"] = median_of(runs, "flood_frames_per_s", 3)
        for key in ("grew_mib", "grew_descriptors", "grew_threads"):
            answer[key] = max(arm[key] for arm in runs)
        answer["gone"] = [name for arm in runs for name in arm["gone"]]
    answer["ok"] = int(_good(answer))
    return answer


def _good(answer: dict[str, Any]) -> bool:
    bounds = (
        answer["valid"] == 1,
        (answer["lost"], answer["trained_twice"]) == (0, 0),
        answer.get("accuracy", 1.0) >= LEARNT,
        answer.get("ratio_one_host", 0.0) <= RATIO,
        answer.get("leaders_per_token", 1) == 1,
        answer.get("refused_without_key", 1.0) == 1.0,
        answer.get("role_matrix_errors", 0) == answer.get("planted", 0) == 0,
        not answer.get("gone"),
        answer.get("missed", 1) == 1,
        answer.get("stall_named_s", 0.0) is not None
        and answer.get("stall_named_s", 0.0) <= NAMED_S,
    )
    return all(bounds)


def main() -> int:
    parser = options(
        __doc__,
        arms="demo,ratio,killed,partitions,joining,doors,flood",
        rounds=1,
        steps=(16, "of a paced job"),
        problems=(64, "of an evaluation"),
        cut_s=30.0,
        frames=(200_000, "of a flood"),
        rate=("1gbit", "of each link, as of tc; empty: as it goes"),
        delay_ms=(2.0, "one way, between two hosts"),
        rollout_pace=Paces.rollout,
        training_pace=Paces.training,
    )
    parser.add_argument("job", type=Path, nargs="?", default=JOB)
    a = parser.parse_args()
    names = arms_of(parser, a.arms, RUNS, PARTS)
    if lack := list_missing_tools():
        sys.exit(f"loadtests.hosts needs {lack}")
    paces = Paces(a.rollout_pace, a.training_pace)
    delay_s = a.delay_ms / 1000
    job = a.job.resolve()
    plan = Plan(job, a.steps, a.problems, a.cut_s, a.rate, delay_s, a.frames, paces)
    answer = result(asyncio.run(measured(RUNS, plan, names, a.rounds)))
    report(answer)
    return 0 if answer["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
