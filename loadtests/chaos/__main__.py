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

import argparse
import asyncio
import json
import sys
from pathlib import Path

from loadtests.chaos.faults import run
from loadtests.chaos.several import several


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--faults", default="kill,stop")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="run directory; default: a temporary one")
    parser.add_argument("--set", action="append", help="KEY=VALUE of the job")
    parser.add_argument("--jobs", type=int, default=1, help="of different seeds, on one mesh")
    arguments = parser.parse_args()
    answer = asyncio.run((several if arguments.jobs > 1 else run)(arguments))
    print(json.dumps(answer))
    sys.exit(0 if answer["ok"] else 1)


if __name__ == "__main__":
    main()
