"""Whether the planner's moves pay: against every static split, on jobs that were drawn.

python -m loadtests.regret [--arms demo,virtual,real] [--seeds 0:30] [--processes 2] [-v]
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from loadtests.regret import figures, virtual


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m loadtests.regret", description=__doc__)
    found.add_argument("--arms", default="demo,virtual,real")
    found.add_argument("--seeds", default="0:30", metavar="A:B", help="of the virtual jobs")
    found.add_argument("--processes", type=int, default=2, help="that run virtual jobs")
    found.add_argument("-v", "--verbose", action="store_true", help="tells of every run")
    return found


def main() -> int:
    a = parser().parse_args()
    first, _, last = a.seeds.partition(":")
    answer: dict[str, Any] = {}
    answer |= virtual.compared(range(int(first), int(last)), a.processes, a.verbose)
    print(json.dumps(answer))
    return 0 if figures.good(answer) else 1


if __name__ == "__main__":
    sys.exit(main())
