"""Chaos test that kills processes of a running mesh, corrupts files, fills its disk, and checks for
losses.

Usage:

    python -m loadtests.chaos examples/calculator.toml --faults kill,stop --count 10 --seed 1
    python -m loadtests.chaos examples/calculator.toml --faults kill,stop,damage,full --seed 1
    python -m loadtests.chaos examples/calculator.toml --jobs 2 --faults kill,stop --count 12
    python -m loadtests.chaos examples/calculator.toml --jobs 2 --shared --count 12
    python -m loadtests.chaos examples/calculator.toml --spot 3 --count 12

Every few seconds one process gets SIGKILL, or SIGSTOP and, once its lease has expired, SIGCONT:
services, planners, workers, role processes, environment processes, the agent, Redis, the fork
server; never the launcher. While one is stopped, `meshrl status --stalled` must name it. Or a
durable file loses a bit, its end or all, and its readers are killed; or the run's disk, a tmpfs of
its own (which needs root), is full for some seconds. A run that has finished before
all faults were made gets more steps.

With `--shared` all jobs compute on one gang: on one worker, or with `--workers N` their cores on
one of N. The accelerator holds any of their instances, but not two cores, so that tensors move.
`other_pause_s` is the longest time between two steps of a job in which only processes of other jobs
were hit; `common_pause_s`: one that serves all jobs was hit, such as their worker, and none of the
job's own. `shared` is 0, and so is `ok`, if a job had no time slices on a gang of another, or if
nothing moved.

With `--spot N` spot workers on N hosts of their own join the mesh, and the faults are bursts: some
of these hosts, often all, get SIGKILL at once, without or after a notice in a file; or such a
notice is withdrawn. Others join after each burst.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from loadtests.chaos.faults import run
from loadtests.chaos.markets import run_markets
from loadtests.chaos.several_jobs import run_several
from loadtests.measuring.entry import options, report


def main() -> None:
    parser = options(
        __doc__,
        faults="kill,stop",
        count=10,
        seed=1,
        out=(Path, "run directory; default: a temporary one"),
        jobs=(1, "of different seeds, on one mesh"),
        workers=(
            0,
            "of the mesh of several jobs; 0: 2 for each, or 1 with --shared; 2 with --spot",
        ),
        shared=(False, "all jobs on one gang"),
        spot=(0, "spot workers, which vanish in bursts"),
    )
    parser.add_argument("job", type=Path)
    parser.add_argument("--set", action="append", help="KEY=VALUE of the job")
    arguments = parser.parse_args()
    if arguments.shared and arguments.jobs < 2:
        parser.error("--shared needs --jobs 2 or more")
    if arguments.spot and arguments.jobs > 1:
        parser.error("--spot runs one job at a time")
    several = run_several if arguments.jobs > 1 else run
    answer = asyncio.run((run_markets if arguments.spot else several)(arguments))
    report(answer)
    sys.exit(0 if answer["ok"] else 1)


if __name__ == "__main__":
    main()
