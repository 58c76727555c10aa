"""How long and on what the arms run, and what tells whether their figures are worth anything."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadtests.measuring.host import MOST_CORES, HostMeter

Arm = dict[str, Any]  # what one arm found, flat
MIB = 1 << 20


@dataclass(frozen=True)
class Plan:
    """What the command line tells. Sizes are bytes of a version."""

    rounds: int = 7
    one_host: int = 1024 * MIB
    fanout: int = 32 * MIB
    link: int = 256 * MIB
    codec: int = 256 * MIB
    memory: int = 2048 * MIB
    swaps: int = 25  # of an engine, for its pauses
    steps: int = 6  # of the small real run
    directory: str = ""  # where versions lie; empty: the system's temporary directory


class Honest:
    """What this machine did while an arm ran."""

    def __init__(self) -> None:
        self._meter = HostMeter()

    def told(self, paced: bool = False) -> Arm:
        """`host_cores`, `steal_cores` and `load`; `valid`: 0 where a paced arm's machine was too
        busy for its pace.
        """
        reading: Arm = dict(self._meter.reading())
        return reading | {"valid": int(not paced or reading["host_cores"] <= MOST_CORES)}


def spread(name: str, values: Sequence[float], digits: int = 4) -> Arm:
    """The median of values, its quartiles as `_low` and `_high`, and how many there were."""
    if len(values) > 1:
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    else:
        low = middle = high = values[0]
    found = {name: middle, f"{name}_low": low, f"{name}_high": high}
    return {key: round(value, digits) for key, value in found.items()} | {f"{name}_n": len(values)}


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Pair by pair, as they were measured after each other."""
    return [a / b for a, b in zip(over, under, strict=True)]
