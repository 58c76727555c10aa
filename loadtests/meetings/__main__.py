"""Benchmark of the rendezvous of a gang's ranks: at a file, as on one host, and at a store of
rank 0.

Both run in rotating order, on loopback.

Usage:

    python -m loadtests.meetings --ranks 2 --pairs 9

Prints one JSON object: medians with their quartiles, and the median of the pairs' ratios.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from loadtests.measuring.entry import options, report
from loadtests.measuring.processes import forked
from loadtests.measuring.rounds import ratio, spread
from meshrl.common.api.ranks import Rendezvous
from meshrl.common.weights.transports.rendezvous import format_rendezvous_url, open_listener
from meshrl.services.trainer.ranks.rank import join_group, leave_group

WITHIN_S = 60.0
ARMS = ("file", "store")
Turn = tuple[int, str]  # pair, arm


def turns(pairs: int) -> list[Turn]:
    return [(pair, arm) for pair in range(pairs) for arm in ARMS[:: 1 if pair % 2 else -1]]


def together(barrier: Any, ranks: int, turn: Turn) -> None:
    barrier.add(str(turn), 1)
    while barrier.add(str(turn), 0) < ranks:
        time.sleep(0.001)


def rank(number: int, ranks: int, directory: Path, doors: dict[Turn, socket.socket]) -> list[float]:
    torch.set_num_threads(1)
    barrier = dist.FileStore(str(directory / "barrier"), ranks)  # type: ignore[attr-defined]
    took = []
    for turn, door in doors.items():
        store = turn[1] == "store"
        where = (
            format_rendezvous_url(door, "word") if store else str(directory / f"meeting{turn[0]}")
        )
        together(barrier, ranks, turn)
        began = time.perf_counter()
        served = door if store and number == 0 else None
        join_group(Rendezvous(1, where, WITHIN_S), number, ranks, "cpu", "lo", served)
        took.append(time.perf_counter() - began)
        leave_group()
    return took


def figures(took: list[float], order: list[Turn], ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {"ranks": ranks, "pairs": len(order) // 2}
    by = {arm: {p: t for (p, a), t in zip(order, took, strict=True) if a == arm} for arm in ARMS}
    for arm, times in by.items():
        found |= spread(f"{arm}_ms", [1000 * t for t in times.values()], 1)
    ratio_store = ratio([*by["store"].values()], [*by["file"].values()])
    return found | {"ratio_store": ratio_store, "load": os.getloadavg()[0]}


def main() -> None:
    parser = options(__doc__, ranks=2, pairs=9)
    chosen = parser.parse_args()
    order = turns(chosen.pairs)
    doors = {turn: open_listener("127.0.0.1", range(1)) for turn in order}
    with tempfile.TemporaryDirectory() as directory:
        took, *_ = forked(
            chosen.ranks, lambda number: rank(number, chosen.ranks, Path(directory), doors)
        )
    report(figures(took, order, chosen.ranks))


if __name__ == "__main__":
    main()
