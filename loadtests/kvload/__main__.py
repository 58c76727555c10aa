"""Keys and values that are loaded while they are computed.

    python -m loadtests.kvload [--arms sweep sockets busy turns cost] [--rounds 5]

`sweep`: the time to the first token after a stored prefix, computed, loaded and both, with the disk
slowed down so that loading takes 0.2 to 5 times as long as computing. `sockets`: the same with the
prefix on another host, behind the token bucket of its link. `busy`: the same request
beside 22 others. `turns`: conversations whose tools take longer than the cache lasts. `cost`: what
keeping costs when nothing comes back. The last line is one flat JSON object; figures of `sockets`
begin with the arm's name, those of one length are called `MODEL_TOKENS_RATIO_*`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtests.kvload.busy import LONG, busy
from loadtests.kvload.link import linked
from loadtests.kvload.sweep import OVER_SOCKETS, POINTS, Point, sweep
from loadtests.kvload.turns import PROMPT, cost, turns
from loadtests.measuring.entry import options, report
from loadtests.measuring.host import MOST_CORES, HostMeter


def point_of(text: str) -> Point:
    """Return the point that MODEL:TOKENS:RATIO,RATIO describes."""
    model, tokens, ratios = text.split(":")
    return Point(model, int(tokens), tuple(map(float, ratios.split(","))))


def main() -> None:
    """The entry."""
    parser = options(
        __doc__,
        arms=["sweep"],
        rounds=5,
        model=("30M", "of the other arms"),
        long=(LONG, "tokens of `busy`'s long prompt"),
        prompt=(PROMPT, "tokens of `turns` and `cost`"),
        directory=(Path, "on the disk that is read"),
    )
    parser.add_argument(
        "--points",
        nargs="+",
        type=point_of,
        metavar="MODEL:TOKENS:RATIOS",
        help="of `sweep` and `sockets`, such as 30M:2048:0.2,1,5; a model is 1M, 30M or 200M",
    )
    chosen = parser.parse_args()
    began, use = time.monotonic(), HostMeter()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=chosen.directory) as directory:
        if "sweep" in chosen.arms:
            points: Sequence[Point] = chosen.points or POINTS
            found |= sweep(points, Path(directory), chosen.rounds)
        if "sockets" in chosen.arms:
            points = chosen.points or OVER_SOCKETS
            there = sweep(points, Path(directory) / "there", chosen.rounds, linked)
            found |= {f"sockets_{name}": figure for name, figure in there.items()}
        sizes = {"busy": chosen.long, "turns": chosen.prompt, "cost": chosen.prompt}
        for name, arm in (("busy", busy), ("turns", turns), ("cost", cost)):
            if name in chosen.arms:
                where = Path(directory) / name
                figures = arm(where, chosen.rounds, chosen.model, sizes[name])
                print(name, figures, flush=True)
                found |= figures
    found |= use.reading()
    found["wall_s"] = round(time.monotonic() - began, 1)
    found["valid"] = int(found["host_cores"] <= MOST_CORES)
    report(found)


if __name__ == "__main__":
    main()
