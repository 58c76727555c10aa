"""Benchmark of sharing: instances of several jobs on one gang.

Usage:

    python -m loadtests.sharing policies
    python -m loadtests.sharing colocate [--seeds 3]
    python -m loadtests.sharing colocate-real [--cells 1:4,2:1:2]
    python -m loadtests.sharing gang [--steps 8] [--budgets 1.6,1.2,2.0]
        [--policies fifo,round_robin] [--repeats 3]

- `policies`: the policies of time slices under virtual time, on `--cases` small random cases
  against every order (`*_over_oracle`: median ratio of the mean response time; `_p95`), and on
  `--workloads` longer ones: `*_makespan_ratio` to the default policy, `*_wait_p99_s`,
  `*_response_mean_s`, `*_switch_share`.
- `colocate`: engines on the core's workers against engines of their own, and the planner's choice,
  on simulated accelerators: `auto_regret_p90` (excess time over the better mode), and the speedups
  of the colocated mode by accelerators and by the ratio of rollout to training time.
- `colocate-real`: the same on the real mesh with emulated accelerators, in a minute for each job.
  Each cell of `--cells` is WORKERS:RATIO or WORKERS:RATIO:STALENESS (0 without it). `real_auto_*`
  and `real_colocated_speedup_*` are of the last steps of each run, `real_run_auto_*` of whole runs.
- `gang`: two jobs with engines of their own whose cores share a gang, on the real mesh with
  emulated accelerators, without staleness and with fixed seeds. `bit_equal`: each job's weights of
  all steps are those of the job alone. `gpu_hours_saved`: of those on separate gangs.
  `slowdown_max`: of a job's training time relative to the job alone. `switch_s_warm`,
  `switch_share` of the time, and `prefetch_hidden_share` of the loaded bytes: those that were
  loaded before the gang switched to their slice. Each budget of `--budgets` is that multiple of a
  core's tensors on the accelerator; figures of all but the first end with it in percent. At the
  first one, `switch_s_cold`, `switch_share_cold` and `bit_equal_cold` are of a host without memory
  for copies, so that they go to its disk. Each of `--policies` runs there, too:
  `*_gang_makespan_ratio` and `*_gang_wait_p99_ratio` (for a slice) to `hrrs`. `lost`, `host_cores`
  and other figures of the host are of all runs, and with an ending or `*_gang_` of one run.
  `--repeats` rounds of all runs give medians; checks and figures of the host are the worst.

The last line is JSON. It begins with `valid` and the like: 0 if the host was too busy, as
`invalid_runs` names them.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from loadtests.measuring.entry import options, parts_of
from loadtests.sharing.colocation import STEPS, measure_colocation
from loadtests.sharing.policies import measure_policies
from loadtests.sharing.real_colocation import CELLS, measure_real_colocation, parse_cell
from loadtests.sharing.shared_gang import GangPlan, measure_shared_gang


def run_policies(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    return measure_policies(chosen.cases, chosen.workloads, chosen.seed)


def run_colocation(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    return measure_colocation(chosen.seeds, chosen.colocation_steps)


def run_real_colocation(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    return measure_real_colocation(
        list(map(parse_cell, chosen.cells.split(","))), chosen.cell_steps
    )


def run_gang(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    plan = GangPlan(chosen.steps, chosen.rollout_pace, chosen.training_pace)
    budgets = list(map(float, chosen.budgets.split(",")))
    policies = [name for name in chosen.policies.split(",") if name]
    return measure_shared_gang(plan, budgets, policies, chosen.repeats, os.environ)


def main() -> None:
    parser = options(
        __doc__,
        cases=200,
        workloads=40,
        seed=0,
        seeds=(3, "of each job that chooses a mode"),
        colocation_steps=(STEPS, "of each job that chooses a mode"),
        cells=(CELLS, "of the real mesh"),
        cell_steps=(20, "of each job of a cell"),
        steps=(8, "of each job of a gang"),
        budgets=("1.6,1.2,2.0", "of an accelerator, in cores"),
        policies=("fifo,round_robin", "of time slices, beside the default one"),
        repeats=(1, "rounds of all runs of a gang"),
        rollout_pace="100/8/100000",
        training_pace="200/600",
    )
    parser.add_argument("parts", nargs="*", help="parts to run; all without any")
    parts = {
        "policies": run_policies,
        "colocate": run_colocation,
        "colocate-real": run_real_colocation,
        "gang": run_gang,
    }
    parts_of(parser, parser.parse_args(), parts)


if __name__ == "__main__":
    main()
