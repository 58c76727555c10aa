"""Keys and values that are loaded while they are computed.

    python -m loadtests.kvload [--arms sweep sockets busy turns cost] [--rounds 5] [--quick]

`sweep`: the time to the first token after a stored prefix, computed, loaded and both, with the disk
slowed down so that loading takes 0.2 to 5 times as long as computing. `sockets`: the same with the
prefix on another host, behind the token bucket of its link. `busy`: the same request
beside 22 others. `turns`: conversations whose tools take longer than the cache lasts. `cost`: what
keeping costs when nothing comes back. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtests.jobs.host import MOST_CORES, HostMeter
from loadtests.kvload.busy import busy
from loadtests.kvload.link import linked
from loadtests.kvload.sweep import OVER_SOCKETS, POINTS, Point, sweep
from loadtests.kvload.turns import cost, turns

QUICK = (Point("30M", 2048, (0.2, 1.0, 5.0)),)


def main() -> None:
    """The entry."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--arms", nargs="+", default=["sweep"])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--quick", action="store_true", help="one length of one model")
    options.add_argument("--directory", type=Path, help="on the disk that is read")
    chosen = options.parse_args()
    began, use = time.monotonic(), HostMeter()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=chosen.directory) as directory:
        if "sweep" in chosen.arms:
            points: Sequence[Point] = QUICK if chosen.quick else POINTS
            found["sweep"] = sweep(points, Path(directory), chosen.rounds)
        if "sockets" in chosen.arms:
            points = QUICK if chosen.quick else OVER_SOCKETS
            found["sockets"] = sweep(points, Path(directory) / "there", chosen.rounds, linked)
        for name, arm in (("busy", busy), ("turns", turns), ("cost", cost)):
            if name in chosen.arms:
                found[name] = arm(Path(directory) / name, chosen.rounds)
                print(name, found[name], flush=True)
    found |= use.reading()
    found["wall_s"] = round(time.monotonic() - began, 1)
    found["valid"] = int(found["host_cores"] <= MOST_CORES)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
