"""Seeded traces of the number of available spot workers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

MEAN_SEGMENT_S = 20.0
LOST_ALL_AT = 0.5  # share of a trace after which all workers vanish at once


@dataclass(frozen=True, slots=True)
class Segment:
    """Time from which so many spot workers are available."""

    start_s: float
    workers: int


def draw_trace(seed: int, duration_s: float, most: int) -> list[Segment]:
    """Draw a trace whose mean availability is about two thirds of `most`.

    Segments last between half and one and a half times their mean. In the middle of the trace all
    workers vanish at once.
    """
    rng = random.Random(seed)
    found = [Segment(0.0, max(1, most - 1))]
    at_s, has_lost_all = 0.0, False
    while (at_s := at_s + rng.uniform(0.5, 1.5) * MEAN_SEGMENT_S) < duration_s:
        now = found[-1].workers
        if now and not has_lost_all and at_s >= LOST_ALL_AT * duration_s:
            has_lost_all, workers = True, 0
        else:
            choices = [n for n in range(most + 1) if n != now]
            workers = rng.choices(choices, [1 + n for n in choices])[0]
        found.append(Segment(round(at_s, 1), workers))
    return found


def compute_mean_workers(trace: Sequence[Segment], duration_s: float) -> float:
    """Return the mean number of available workers over a time; the last segment stays."""
    ends = [*(one.start_s for one in trace[1:]), duration_s]
    spans = zip(trace, ends, strict=True)
    weighted = sum(one.workers * max(0.0, min(end, duration_s) - one.start_s) for one, end in spans)
    return weighted / duration_s
