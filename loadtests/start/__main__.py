"""Benchmark of process starts: time, cost, and processes left over after kills.

Usage:

    python -m loadtests.start [roles mesh churn orphans ...] [--repeats 3]

Prints one flat JSON object, the figures of all parts that were named (default: all).
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadtests.measuring.entry import options, parts_of
from loadtests.start import churn, mesh, orphans, roles

Figures = dict[str, Any]
PARTS: dict[str, Callable[[Path, argparse.Namespace], Figures]] = {
    "roles": lambda folder, a: asyncio.run(roles.measured(folder, a.repeats, a.kinds)),
    "mesh": mesh.mesh,
    "churn": lambda folder, a: asyncio.run(churn.churned(folder, a.starts)),
    "orphans": lambda folder, a: asyncio.run(orphans.orphans(folder, a.trials)),
}


def main() -> None:
    parser = options(
        __doc__,
        repeats=(3, "starts of each kind, each way"),
        starts=(1000, "through one fork server"),
        trials=(80, "in which somebody dies"),
    )
    parser.add_argument("parts", nargs="*", default=[], help=f"of {', '.join(PARTS)}; none: all")
    parser.add_argument("--kinds", nargs="*", default=[], help="of processes; none: all")
    chosen = parser.parse_args()
    parts_of(parser, chosen, PARTS)


if __name__ == "__main__":
    main()
