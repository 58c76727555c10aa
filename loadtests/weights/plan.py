"""How long and on what the arms run, and what tells whether their figures are worth anything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from loadtests.measuring.host import MOST_CORES, HostMeter
from loadtests.measuring.rounds import Arm
from loadtests.weights.scene import Scene

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

    def scene(self, rates: Iterable[str] = ()) -> Scene:
        """Return a scene in the plan's directory; `rates`: of the links of its hosts."""
        return Scene(rates, Path(self.directory) if self.directory else None)


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
