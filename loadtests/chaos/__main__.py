"""Kills and stops random processes of a running mesh, damages its files, fills its disk, and says
whether anything was lost.

    python -m loadtests.chaos examples/calculator.toml --faults kill,stop --count 10 --seed 1
    python -m loadtests.chaos examples/calculator.toml --faults kill,stop,damage,full --seed 1
    python -m loadtests.chaos examples/calculator.toml --jobs 2 --faults kill,stop --count 12

Every few seconds one process gets SIGKILL, or SIGSTOP and, once its lease has expired, SIGCONT:
services, planners, workers, role processes, environment processes, the agent, Redis, the nursery;
never the launcher. While one is stopped, `meshrl status --stalled` is asked whether it names it.
Or a durable file loses a bit, its end or all, and whoever reads it is killed; or the run's disk, a
tmpfs of its own (which needs root), has no room for some seconds. A run that has finished before
all faults were made gets more steps.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from loadtests.chaos.faults import run
from loadtests.chaos.several import several
from loadtests.measuring.entry import options, report


def main() -> None:
    parser = options(
        __doc__,
        faults="kill,stop",
        count=10,
        seed=1,
        out=(Path, "run directory; default: a temporary one"),
        jobs=(1, "of different seeds, on one mesh"),
    )
    parser.add_argument("job", type=Path)
    parser.add_argument("--set", action="append", help="KEY=VALUE of the job")
    arguments = parser.parse_args()
    answer = asyncio.run((several if arguments.jobs > 1 else run)(arguments))
    report(answer)
    sys.exit(0 if answer["ok"] else 1)


if __name__ == "__main__":
    main()
