"""Benchmark of the planner's moves against every static split, on randomly drawn jobs.

Usage:

    python -m loadtests.regret [--arms demo,virtual,real] [--seeds 0:30] [--processes 2] [-v]

- `demo`: `demo_time_ratio`, RL phase of `make demo` with the planner over the one with its first
  split held (`planner.moves = false`), median of three seeds.
- `virtual`: random jobs on the virtual mesh, each with the planner and with every split that stays:
  `regret_p90`, time lost against the best of these; `far_defaults`, jobs whose first split loses
  15 % or more; `moves_that_paid` of those that the planner judged; `prediction_error_p50` of the
  steps that it predicted for them. It takes 20 minutes of two cores.
- `real`: three paced jobs on the real mesh, the same figures as `real_*`; invalid when the host
  used more than 1.6 cores.

The last line is JSON; the exit status says whether what is asked of every arm was reached.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtests.measuring.commands import meshrl
from loadtests.measuring.entry import options, print_progress, report
from loadtests.measuring.metered import HostMeter
from loadtests.regret import figures, real, virtual
from meshrl.common.base.files import json_lines
from meshrl.common.state.events import Event
from meshrl.common.state.pool.store.planner_reports import SPEEDUP_RULES
from meshrl.sim.mesh.emulated_run import compute_rl_s
from meshrl.view.recording.run_record import EVENTS_FILE, parse_event

DEMO = 1.02  # most of demo_time_ratio
FAR_DEFAULTS, MOVES = 10, 15  # of thirty jobs: with fewer there was nothing to decide
JOB = Path(__file__).parents[2] / "examples" / "calculator.toml"
RUN_S = 600.0
ARMS = {"planner": "true", "held": "false"}  # name -> planner.moves


async def compared(seeds: Sequence[int]) -> dict[str, Any]:
    """Return flat figures; ratios are medians over seeds, and the order of arms alternates."""
    found: dict[str, list[float]] = {name: [] for name in ARMS}
    meter = HostMeter()
    for number, seed in enumerate(seeds):
        for name in list(ARMS) if number % 2 else list(reversed(ARMS)):
            events = await _ran(seed, ARMS[name])
            found[name].append(round(compute_rl_s(events), 2))
            moved = sum(e.kind == "move" and e.fields.get("rule") in SPEEDUP_RULES for e in events)
            told = {"arm": name, "seed": seed, "rl_s": found[name][-1], "moves": moved}
            print_progress(told | meter.reading())
    ratios = [ours / held for ours, held in zip(*found.values(), strict=True)]
    return {
        "demo_time_ratio": round(statistics.median(ratios), 4),
        **{f"demo_{key}": value for key, value in meter.reading().items()},
    }


async def _ran(seed: int, moves: str) -> list[Event]:
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        out = Path(folder) / "run"
        words = ("run", str(JOB), "--seed", str(seed), "--set", f"out={out}")
        await meshrl(*words, "--set", f"planner.moves={moves}", within_s=RUN_S)
        return [parse_event(row) for row in json_lines.read_lines(out / EVENTS_FILE).rows]


def main() -> int:
    parser = options(
        __doc__,
        arms="demo,virtual,real",
        demo_seeds="3,4,5",
        processes=(2, "that run virtual jobs"),
        steps=(0, "of each job but the demo; 0: its own"),
        jobs=(",".join(real.JOBS), "of the real mesh"),
    )
    parser.add_argument("--seeds", default="0:30", metavar="A:B", help="of the virtual jobs")
    parser.add_argument("-v", "--verbose", action="store_true", help="tells of every virtual run")
    a = parser.parse_args()
    first, _, last = a.seeds.partition(":")
    answer: dict[str, Any] = {}
    reached = True
    arms = a.arms.split(",")
    if "demo" in arms:
        answer |= asyncio.run(compared([int(seed) for seed in a.demo_seeds.split(",")]))
        reached &= answer["demo_time_ratio"] <= DEMO
    if "virtual" in arms:
        answer |= virtual.compared(range(int(first), int(last)), a.processes, a.verbose, a.steps)
        reached &= figures.good(answer) and answer["far_defaults"] >= FAR_DEFAULTS
        reached &= answer["moves"] >= MOVES
    if "real" in arms:
        answer |= asyncio.run(real.compared(a.jobs.split(","), 0, a.steps))
        reached &= bool(answer["real_valid"]) and figures.good(answer, "real_")
    report(answer)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
