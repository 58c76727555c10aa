"""Availability of workers that may vanish: the number of a group's hosts over time.

It is read from a CSV file, or drawn by a generator.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.random import Random
from meshrl.common.job.constraints import (
    ConfigTable,
    JobName,
    NonNegativeInteger,
    NonNegativeNumber,
    PositiveInteger,
    PositiveNumber,
)

Availability = Sequence[tuple[float, int]]  # (seconds, hosts from then on), ascending


@dataclass(frozen=True)
class SegmentTable(ConfigTable):
    """`[[segments]]`: a synthetic availability. Changes are a Poisson process: with the larger
    probability the farther the number is from `mean`, it returns towards it.
    """

    name: JobName = "segment"
    seed: NonNegativeInteger = 0
    seconds: PositiveNumber = 7200.0
    least: NonNegativeInteger = 0
    most: PositiveInteger = 6
    mean: NonNegativeNumber = 3.0
    change_s: PositiveNumber = 600.0  # mean time between changes
    burst: PositiveInteger = 1  # hosts that vanish at once, at most


def draw_availability(segment: SegmentTable) -> Availability:
    """Draw a segment, which depends only on its table. It begins with the rounded mean."""
    random, now_s = Random(segment.seed).child(segment.name), 0.0
    present = min(max(round(segment.mean), segment.least), segment.most)
    found = [(0.0, present)]
    while True:
        now_s -= segment.change_s * math.log(1.0 - random.random())
        if now_s >= segment.seconds:
            return found
        width = max(1, segment.most - segment.least)
        if random.random() < 0.5 + (segment.mean - present) / width:
            present = min(present + 1, segment.most)
        else:
            present = max(present - 1 - int(random.random() * segment.burst), segment.least)
        if present != found[-1][1]:
            found.append((now_s, present))


def read_availability(path: Path) -> Availability:
    """Read a CSV file with the columns `time_s` and `instances`; raise ConfigError with the line
    that is not valid.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"reading the availability failed: {error}", where=str(path)) from error
    found: list[tuple[float, int]] = []
    for number, row in enumerate(rows, 2):
        try:
            time_s, count = float(row["time_s"]), int(row["instances"])
            if count < 0 or not (found[-1][0] if found else 0.0) <= time_s < math.inf:
                raise ValueError(f"{count} instances at {time_s:g} s")
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}, line {number}: no availability: {error}",
                fix="Write the columns time_s, ascending, and instances",
            ) from error
        found.append((time_s, count))
    if not found:
        raise ConfigError("the availability has no rows", where=str(path))
    return found
